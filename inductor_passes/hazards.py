"""What in a graph could not be captured in a CUDA graph.

It reads the graph, and the source of what a `torch.library.custom_op` runs: a host synchronisation in there shows in no
graph. Those of our operators are ruled out by a test over their sources and by captures on a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.naming import module_path
from inductor_passes.source_lint import waits

_UNSAFE_TAGS = {
    torch.Tag.data_dependent_output: "its output is read on the host",
    torch.Tag.cudagraph_unsafe: "it is tagged cudagraph_unsafe",
}
# Higher-order operators that go on according to the value of a tensor.
_STEERED = ("cond", "while_loop", "while_loop_stack_output")


@dataclass(frozen=True, slots=True)
class Hazard:
    """A node that stops a capture, and why."""

    node: str
    target: str
    reason: str
    module: str = ""
    """Path of the module the node came from, where that is known."""


def capture_hazards(graph: Graph) -> tuple[Hazard, ...]:
    """Nodes of a post-grad graph that a CUDA graph cannot hold. CPU tensors count only in a graph with CUDA ones."""
    on_cuda = any(tensor.is_cuda for node in graph.nodes for tensor in _tensors(node))
    hazards = []
    for node in graph.nodes:
        reason = next(_reasons(node, on_cuda), None)
        if reason is not None:
            hazards.append(Hazard(node.name, str(_compat.called_op(node)), reason, module_path(node)))
    return tuple(hazards)


def _reasons(node: Node, on_cuda: bool) -> Iterator[str]:
    if on_cuda and any(tensor.device.type == "cpu" for tensor in _tensors(node)):
        yield "a CPU tensor in a CUDA graph"
    if node.op != "call_function":
        return
    target = _compat.called_op(node)
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target.name() in _STEERED:
            yield "the host reads its condition"
        return
    tags = getattr(target, "tags", ())
    yield from (reason for tag, reason in _UNSAFE_TAGS.items() if tag in tags)
    # Not by the tag dynamic_output_shape: `index` carries it for the sake of boolean masks only.
    if node.meta.get("unbacked_bindings"):
        yield "its output size is known only after running it"
    if _compat.is_cudagraph_unsafe_fx_node(node):
        yield "Inductor does not capture it"
    yield from _waits_inside(target)


def _waits_inside(target: Any) -> Iterator[str]:
    """What the body of a user's operator waits for."""
    body = _compat.op_body(target.name()) if isinstance(target, torch._ops.OpOverload) else None
    if body is None or body.__module__.partition(".")[0] == "torch":
        return
    found = waits(body)
    if found:
        yield f"its body waits for the device: {'; '.join(found)}"


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]
