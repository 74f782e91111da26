"""explain(): compile once for show, and report what the passes did."""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from inductor_passes import _compat
from inductor_passes.base import LAYER_KEY, PassLog
from inductor_passes.graph_tools import is_moe_op
from inductor_passes.hazards import Hazard, capture_hazards
from inductor_passes.naming import name_layers
from inductor_passes.pipeline import FUSIONS, LOWERINGS, is_training, run_passes
from inductor_passes.report import Break, GraphView, LayerGraph, NodeView, Report

# Nodes that compute nothing: picking an output, allocating, and looking at a tensor in another shape.
_BOOKKEEPING = (operator.getitem, torch.ops.aten.empty.memory_format, torch.ops.aten.as_strided.default)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Traces `fn(*args, **kwargs)` as `torch.compile` would, runs our passes and reports.

    The function runs once, on its ATen graph; no code is generated and no cache is read or written. What is compiled
    already stays valid, and Dynamo's counters are put back.

    Args:
        fn: a module or function, compiled or not.
        args, kwargs: its inputs. Mark a dimension dynamic to see the graph for dynamic shapes; call under
            `torch.no_grad()` to see the inference graph.

    Returns:
        A frozen `Report`; print it, or write it out with `.to_html(path)`.

    Example:
        >>> with torch.no_grad():
        ...     print(inductor_passes.explain(model, input_ids))
    """
    recorder = _Recorder()
    target = _compat.uncompiled(fn)
    with _compat.preserved_dynamo_state():
        call = torch.compile(
            _compat.fresh_code(_call), backend=_compat.post_grad_backend(recorder.record, recorder.trace)
        )
        call(target, args, kwargs)
        return recorder.report(_compat.graph_breaks_counted())


def _call(target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return target(*args, **kwargs)


@dataclass
class _Recorder:
    breaks: list[Break] = field(default_factory=list)
    logs: list[PassLog] = field(default_factory=list)
    views: list[GraphView] = field(default_factory=list)
    layers: list[LayerGraph] = field(default_factory=list)
    hazards: list[Hazard] = field(default_factory=list)
    training: bool = False

    def trace(self, module: GraphModule) -> None:
        """Notes why Dynamo ended a graph."""
        cause = _compat.with_graph_break_reason(module)
        if cause is not None:
            self.breaks.append(Break(cause.reason, _location(cause.user_stack)))

    def record(self, module: GraphModule, example_inputs: Sequence[Any]) -> None:
        """Runs our passes over a copy of a post-grad graph."""
        graph = _copy(module.graph)
        name_layers(graph)
        before, traced = _view(graph), _calls(graph)
        log = run_passes(graph, FUSIONS)
        fused = _calls(graph)
        run_passes(graph, LOWERINGS, log)
        launches = _launches(graph)
        self.layers += [LayerGraph(name, traced[name], fused[name], launches[name]) for name in traced]
        self.views.append(GraphView(before, _view(graph)))
        self.hazards += capture_hazards(graph)
        self.logs.append(log)
        self.training = self.training or is_training(graph)

    def report(self, counted: dict[str, int]) -> Report:
        """Everything recorded. `counted`, Dynamo's count by reason, adds breaks that no graph came before; its numbers
        are no use, for a break counts once per function it is nested in.
        """
        seen = {_headline(each.reason) for each in self.breaks}
        missing = [Break(reason, "") for reason in counted if _headline(reason) not in seen]
        return Report(
            graph_breaks=tuple(dict.fromkeys([*self.breaks, *missing])),
            fused=tuple(each for log in self.logs for each in log.fused),
            refused=tuple(each for log in self.logs for each in log.refused),
            capture_hazards=tuple(self.hazards),
            layers=tuple(self.layers),
            lowered=tuple(each for log in self.logs for each in log.lowered),
            kept=tuple(each for log in self.logs for each in log.kept),
            graphs=tuple(self.views),
            is_training=self.training,
        )


def _headline(reason: str) -> str:
    return reason.strip().partition("\n")[0]


def _location(stack: Sequence[Any]) -> str:
    if not stack:
        return ""
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _copy(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _in_layer(node: Node) -> bool:
    return LAYER_KEY in node.meta and node.target not in _BOOKKEEPING


def _calls(graph: Graph) -> Counter[str]:
    return Counter(node.meta[LAYER_KEY] for node in graph.nodes if _in_layer(node))


def _launches(graph: Graph) -> Counter[str]:
    return Counter(node.meta[LAYER_KEY] for node in graph.nodes if _in_layer(node) and _is_launch(node))


def _is_launch(node: Node) -> bool:
    return node.op == "call_function" and node.target is _compat.triton_launch()


def _view(graph: Graph) -> tuple[NodeView, ...]:
    """Nodes of MoE layers and their neighbours; picking an output is drawn as an edge."""
    inside = [node for node in graph.nodes if _in_layer(node)]
    sources = {node: tuple(dict.fromkeys(map(_past_bookkeeping, node.all_input_nodes))) for node in inside}
    shown = set(inside) | {source for node in inside for source in sources[node]}
    return tuple(
        NodeView(
            name=node.name,
            label=_label(node),
            detail=_detail(node.meta.get("val")),
            inputs=tuple(source.name for source in sources.get(node, ()) if source in shown),
            layer=node.meta.get(LAYER_KEY, "") if node in sources else "",
        )
        for node in graph.nodes
        if node in shown
    )


def _past_bookkeeping(node: Node) -> Node:
    while node.target in _BOOKKEEPING and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _label(node: Node) -> str:
    if node.op == "placeholder":
        return node.name
    if _is_launch(node):
        return _compat.kernel_name(cast(int, node.kwargs["kernel_idx"]))
    return str(node.target).removesuffix(".default") if is_moe_op(node) else str(node.target)


def _detail(value: Any) -> str:
    values = (
        value
        if isinstance(value, list | tuple)
        else list(value.values())
        if isinstance(value, dict)
        else [value]
    )
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors)
