"""What explain() keeps of each graph that Dynamo traces."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule

from inductor_passes import _compat
from inductor_passes.base import PassLog
from inductor_passes.costs import costs, total
from inductor_passes.graph_tools import Part, is_moe_op, parts
from inductor_passes.hazards import Hazard, capture_hazards
from inductor_passes.naming import (
    LayerNames,
    TracedInputs,
    is_within,
    module_path,
    modules_around,
    path_of,
    write_names,
    write_sources,
)
from inductor_passes.overlap import exchanges_of, is_collective
from inductor_passes.pipeline import LOWERINGS, PIPELINE, is_training, run_passes
from inductor_passes.records import Cost, Exchange, GraphView, LayerGraph, Unfused
from inductor_passes.survey import Named, moe_modules
from inductor_passes.training import RaiseForTraining
from inductor_passes.views import calls, launches, layers_by_node, view

_REWRITES = tuple(each for each in PIPELINE if each not in LOWERINGS)


@dataclass
class Recorder:
    """Runs our passes over copies of post-grad graphs, and keeps what they did and what the graphs look like."""

    modules: Named
    logs: list[PassLog] = field(default_factory=list)
    views: list[GraphView] = field(default_factory=list)
    sizes: list[LayerGraph] = field(default_factory=list)
    """Of layers, and of modules that look like one, for each graph they are in."""
    hazards: list[Hazard] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    training: bool = False
    names: LayerNames = field(default_factory=LayerNames)
    has_operators: bool = False
    """Whether any of ours was traced."""
    modules_reached: set[str] = field(default_factory=set)
    """Ids of the modules that MoE operators were traced in."""

    def backend(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph of Dynamo's for show: it runs as it was traced."""
        inputs = TracedInputs.of(module.graph, self.weights)
        self._name(module.graph, inputs.start)  # layers are raised, and told of, before autograd too

        def record(traced: GraphModule, _: Sequence[Any]) -> None:
            write_sources(traced.graph, inputs.names)
            self.record(traced, inputs.start)

        before_autograd = RaiseForTraining(note=self.logs.append)
        return _compat.post_grad_backend(record, before_autograd)(module, example_inputs)

    @cached_property
    def weights(self) -> dict[int, str]:
        """The path of each parameter and buffer, by its id."""
        held = ((name, {**module._parameters, **module._buffers}) for name, module in self.modules)
        return {
            id(tensor): f"{name}.{own}".lstrip(".")
            for name, tensors in held
            for own, tensor in tensors.items()
        }

    def record(self, module: GraphModule, start: str | None = None) -> None:
        """Keeps a post-grad graph and its subgraphs; `start` is the module in whose forward tracing began."""
        self.training = self.training or is_training(module.graph)
        for part in parts(module):
            before = _copy(part.graph)
            self._name(before, start)
            self._record(part, before)

    def _name(self, graph: Graph, start: str | None) -> None:
        ids = {name: str(id(module)) for name, module in self.modules}
        began = None if start is None else ids.get(start)
        write_names(graph, {key: name for name, key in ids.items()}, began)

    def _record(self, part: Part, before: Graph) -> None:
        log = PassLog()
        self.names.write(before, part.where)
        fused = _copy(before)
        run_passes(fused, _REWRITES, log)
        self.names.write(fused, part.where)
        self._reach(before, fused)
        stock = self._stock(before)
        lowered = _copy(fused)
        run_passes(lowered, LOWERINGS, log)
        log.refused[:] = dict.fromkeys(log.refused)  # both parts may refuse a training graph
        traced = {**_replaced(before, fused, log), **stock}
        left, written = ({**stock, **layers_by_node(graph)} for graph in (fused, lowered))
        self.sizes += _sizes(part, (before, traced), (fused, left), launches(lowered, written))
        drawn = [view(*each) for each in ((before, traced), (fused, left), (lowered, written))]
        self.views.append(GraphView(drawn[0], drawn[1], part.where, drawn[2]))
        self.hazards += capture_hazards(lowered)
        self.exchanges += _exchanges(before) if log.layers else []
        self.logs.append(log)

    def _reach(self, *graphs: Graph) -> None:
        for node in (node for graph in graphs for node in graph.nodes if is_moe_op(node)):
            self.has_operators = True
            self.modules_reached.update(modules_around(node))

    def _stock(self, graph: Graph) -> dict[str, str]:
        """The MoE module of each node that is in one where no operator of ours was traced."""
        names = {str(id(module)): name for name, module in self._unreached()}
        inside = ((node.name, set(modules_around(node)) & names.keys()) for node in graph.nodes)
        return {node: names[found.pop()] for node, found in inside if found}

    def _unreached(self) -> Named:
        found = moe_modules(self.modules)
        return [(name, module) for name, module in found if not self._is_reached(name, module)]

    def _is_reached(self, name: str, module: nn.Module) -> bool:
        """Whether an operator of ours was traced in it. Dynamo does not note the module whose forward it starts in."""
        is_start = name == "" and self.has_operators
        return is_start or any(str(id(inside)) in self.modules_reached for inside in module.modules())

    @property
    def layers(self) -> tuple[LayerGraph, ...]:
        """The layers that run operators of ours, and those that look like one to a pass but are no module's."""
        unreached = dict(self._unreached())
        return tuple(each for each in self.sizes if each.name not in unreached)

    def unfused(self) -> tuple[Unfused, ...]:
        """MoE modules that no operator of ours was traced in."""
        unreached = dict(self._unreached())
        kinds = {type(module) for name, module in moe_modules(self.modules) if name not in unreached}
        # Of layers that share a subgraph only the first is traced.
        sharing = kinds if any(layer.calls > 1 for layer in self.layers) else set()
        return tuple(
            Unfused(name, type(module).__name__, self._size(name))
            for name, module in unreached.items()
            if type(module) not in sharing
        )

    def _size(self, name: str) -> LayerGraph | None:
        """Of a module that is no layer: in all graphs, for it may lie on both sides of a graph break."""
        sizes = [each for each in self.sizes if each.name == name]
        number, cost = sum(each.before for each in sizes), total(each.cost_before for each in sizes)
        return LayerGraph(name, number, number, 0, cost_before=cost, cost_after=cost) if sizes else None


_Layers = tuple[Graph, dict[str, str]]
"""A graph, and which layer each of its nodes belongs to."""


def _sizes(part: Part, before: _Layers, after: _Layers, launched: dict[str, int]) -> Iterable[LayerGraph]:
    """Every layer of a graph, by its nodes before and after the fusions."""
    (calls_before, cost_before), (calls_after, cost_after) = (
        (calls(*each), costs(*each)) for each in (before, after)
    )
    for name in {**calls_before, **calls_after}:
        yield LayerGraph(
            name,
            calls_before[name],
            calls_after[name],
            launched[name],
            part.where,
            part.calls,
            cost_before.get(name, Cost()),
            cost_after.get(name, Cost()),
        )


def _exchanges(before: Graph) -> list[Exchange]:
    """In the order in which Inductor, as it is set by default, gives our pass its graph."""
    graph = _copy(before)
    if not any(is_collective(node) for node in graph.nodes):
        return []
    if not is_training(graph):
        _compat.reorder_for_locality(graph)
    run_passes(graph, PIPELINE)
    return exchanges_of(graph)


def _replaced(before: Graph, after: Graph, log: PassLog) -> dict[str, str]:
    """The layer of each node before the fusions: the operator's own, or of what it was raised to.

    What was raised is in the records; what vanished with it was in the module of the layer.
    """
    layers = layers_by_node(after)
    left = {node.name for node in after.nodes}
    raised = {node: each.layer for each in log.raised for node in each.nodes if each.layer in layers.values()}
    paths = {path_of(layer): layer for layer in layers.values()}
    gone = [(node.name, module_path(node)) for node in before.nodes if node.name not in left]
    vanished = {
        name: layer for name, module in gone for path, layer in paths.items() if is_within(module, path)
    }
    return {**vanished, **raised, **layers, **layers_by_node(before)}


def _copy(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
