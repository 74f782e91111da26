"""explain(): compile once for show, and report what the passes did."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from inductor_passes import _compat
from inductor_passes.base import PassLog
from inductor_passes.graph_tools import Part, is_moe_op, parts
from inductor_passes.hazards import Hazard, capture_hazards
from inductor_passes.naming import LayerNames
from inductor_passes.pipeline import FUSIONS, LOWERINGS, is_training, run_passes
from inductor_passes.records import Break, GraphView, LayerGraph, Unfused
from inductor_passes.report import Report
from inductor_passes.survey import Named, is_on_meta, modules_of, moe_modules
from inductor_passes.text import unfused_lines
from inductor_passes.views import calls, launches, view


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Traces `fn(*args, **kwargs)` as `torch.compile` would, runs our passes and reports.

    The function runs once, on its ATen graph; no code is generated and no cache is read or written. What is compiled
    already stays valid, and Dynamo's counters are put back. A model on the meta device is not traced, and the report
    says so.

    Args:
        fn: a module or function, compiled or not.
        args, kwargs: its inputs. Mark a dimension dynamic to see the graph for dynamic shapes; call under
            `torch.no_grad()` to see the inference graph.

    Returns:
        A frozen `Report`; print it, or write it out with `.to_html(path)`.

    Raises:
        Whatever `fn` raises.

    Example:
        >>> with torch.no_grad():
        ...     print(inductor_passes.explain(model, input_ids))
    """
    target = _compat.uncompiled(fn)
    modules = modules_of(target, args, kwargs)
    recorder = _Recorder(LayerNames({str(id(module)): name for name, module in modules}))
    if is_on_meta(modules, args, kwargs):
        return recorder.report((), (_meta_remark(modules),))
    with _compat.preserved_dynamo_state():
        call = torch.compile(_compat.fresh_code(_call), backend=_compat.post_grad_backend(recorder.record))
        call(target, args, kwargs)
        breaks = _breaks(_compat.graph_breaks())
    unfused = recorder.unfused(modules)
    return recorder.report(breaks, recorder.remarks(unfused), unfused)


def _call(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return target(*args, **kwargs)


@dataclass
class _Recorder:
    names: LayerNames
    log: PassLog = field(default_factory=PassLog)
    views: list[GraphView] = field(default_factory=list)
    layers: list[LayerGraph] = field(default_factory=list)
    hazards: list[Hazard] = field(default_factory=list)
    training: bool = False
    modules_reached: set[str] = field(default_factory=set)
    """Ids of the modules that MoE operators were traced in."""

    def record(self, module: GraphModule, example_inputs: Sequence[Any]) -> None:
        """Runs our passes over copies of a post-grad graph and its subgraphs."""
        self.training = self.training or is_training(module.graph)
        for part in parts(module):
            self._record(part._replace(graph=_copy(part.graph)))

    def _record(self, part: Part) -> None:
        graph = part.graph
        self.names.write(graph, part.where)
        for node in filter(is_moe_op, graph.nodes):
            self.modules_reached.update(self.names.modules_around(node))
        before, traced = view(graph), calls(graph)
        run_passes(graph, FUSIONS, self.log)
        fused = calls(graph)
        run_passes(graph, LOWERINGS, self.log)
        launched = launches(graph)
        self.layers += [
            LayerGraph(name, traced[name], fused[name], launched[name], part.where, part.calls)
            for name in traced
        ]
        self.views.append(GraphView(before, view(graph), part.where))
        self.hazards += capture_hazards(graph)

    def unfused(self, modules: Named) -> tuple[Unfused, ...]:
        """MoE modules that no operator of ours was traced in."""
        seen = moe_modules(modules)
        reached = [module for name, module in seen if self._is_reached(name, module)]
        # Of layers that share a subgraph only the first is traced.
        sharing = (
            {type(module) for module in reached} if any(layer.calls > 1 for layer in self.layers) else set()
        )
        return tuple(
            Unfused(name, type(module).__name__)
            for name, module in seen
            if module not in reached and type(module) not in sharing
        )

    def _is_reached(self, name: str, module: nn.Module) -> bool:
        """Whether an operator of ours was traced in it. Dynamo does not note the module whose forward it starts in."""
        is_start = name == "" and bool(self.layers)
        return is_start or any(str(id(inside)) in self.modules_reached for inside in module.modules())

    def remarks(self, unfused: tuple[Unfused, ...]) -> tuple[str, ...]:
        """What the records mean, and what to do about it."""
        remarks = []
        if unfused:
            remarks.append(
                f"MoE modules that run none of our operators, so that nothing of them is fused: "
                f"{'; '.join(unfused_lines(unfused))}. For a model of transformers call "
                f"layers.huggingface.patch(model), whose report says what it leaves and why"
            )
        elif not self.layers:
            remarks.append(
                "no MoE operator was traced and no module looks like an MoE layer: nothing to do for us"
            )
        if self.training:
            remarks.append(
                "gradients are on, so this is the training graph, in which most fusions are not done yet. For the "
                "inference graph call explain under torch.no_grad()"
            )
        return tuple(remarks)

    def report(
        self, breaks: tuple[Break, ...], remarks: tuple[str, ...], unfused: tuple[Unfused, ...] = ()
    ) -> Report:
        """Everything recorded."""
        return Report(
            graph_breaks=breaks,
            fused=tuple(self.log.fused),
            refused=tuple(self.log.refused),
            capture_hazards=tuple(self.hazards),
            layers=tuple(self.layers),
            lowered=tuple(self.log.lowered),
            kept=tuple(self.log.kept),
            graphs=tuple(self.views),
            is_training=self.training,
            unfused=unfused,
            remarks=remarks,
        )


def _meta_remark(modules: Named) -> str:
    seen = unfused_lines([Unfused(name, type(module).__name__) for name, module in moe_modules(modules)])
    found = f" MoE modules in it: {'; '.join(seen)}." if seen else ""
    return (
        "nothing was traced: the model or its input is on the meta device, where there is nothing to compute with."
        f"{found} Give it memory and weights first, as from_pretrained or model.to_empty(device=...) do"
    )


def _breaks(kept: Sequence[tuple[str, Sequence[Any]]]) -> tuple[Break, ...]:
    """Each break once: Dynamo tells it for every frame that it ended, and some without a stack."""
    found: dict[tuple[str, str], Break] = {}
    for reason, stack in kept:
        headline, location = reason.strip().partition("\n")[0], _location(stack)
        if location or headline not in {told for told, _ in found}:
            found.setdefault((headline, location), Break(reason, location))
    return tuple(found.values())


def _location(stack: Sequence[Any]) -> str:
    if not stack:
        return ""
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _copy(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
