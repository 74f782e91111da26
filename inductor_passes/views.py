"""What of a graph is drawn and counted: the nodes of MoE layers and their neighbours."""

import operator
from collections import Counter
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import LAYER_KEY
from inductor_passes.graph_tools import is_moe_op
from inductor_passes.records import NodeView

# Nodes that compute nothing: picking an output, allocating, and looking at a tensor in another shape.
_BOOKKEEPING = (operator.getitem, torch.ops.aten.empty.memory_format, torch.ops.aten.as_strided.default)


def calls(graph: Graph) -> Counter[str]:
    """How many nodes of each MoE layer compute something."""
    return Counter(node.meta[LAYER_KEY] for node in graph.nodes if _in_layer(node))


def launches(graph: Graph) -> Counter[str]:
    """How many of them launch a Triton kernel."""
    return Counter(node.meta[LAYER_KEY] for node in graph.nodes if _in_layer(node) and _is_launch(node))


def view(graph: Graph) -> tuple[NodeView, ...]:
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


def _in_layer(node: Node) -> bool:
    return LAYER_KEY in node.meta and node.target not in _BOOKKEEPING


def _is_launch(node: Node) -> bool:
    return node.op == "call_function" and node.target is _compat.triton_launch()


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
