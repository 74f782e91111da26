"""What in a graph could not be captured in a CUDA graph.

It reads the graph only: a host synchronisation inside an operator's implementation does not show here. Those of our
operators are ruled out by a test over their sources and by captures on a GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from inductor_passes import _compat

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


def capture_hazards(graph: Graph) -> tuple[Hazard, ...]:
    """Nodes of a post-grad graph that a CUDA graph cannot hold. CPU tensors count only in a graph with CUDA ones."""
    on_cuda = any(tensor.is_cuda for node in graph.nodes for tensor in _tensors(node))
    hazards = []
    for node in graph.nodes:
        reason = next(_reasons(node, on_cuda), None)
        if reason is not None:
            hazards.append(Hazard(node.name, str(node.target), reason))
    return tuple(hazards)


def _reasons(node: Node, on_cuda: bool) -> Iterator[str]:
    if on_cuda and any(tensor.device.type == "cpu" for tensor in _tensors(node)):
        yield "a CPU tensor in a CUDA graph"
    if node.op != "call_function":
        return
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        if node.target.name() in _STEERED:
            yield "the host reads its condition"
        return
    tags = getattr(node.target, "tags", ())
    yield from (reason for tag, reason in _UNSAFE_TAGS.items() if tag in tags)
    # Not by the tag dynamic_output_shape: `index` carries it for the sake of boolean masks only.
    if node.meta.get("unbacked_bindings"):
        yield "its output size is known only after running it"
    if _compat.is_cudagraph_unsafe_fx_node(node):
        yield "Inductor does not capture it"


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]
