"""What of a graph is drawn and counted: the nodes of MoE layers and their neighbours."""

import operator
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import LAYER_KEY
from inductor_passes.naming import input_name
from inductor_passes.records import NodeView

# Nodes that compute nothing: picking an output, allocating, and (with every view) looking at a tensor otherwise.
_BOOKKEEPING = (operator.getitem, torch.ops.aten.empty.memory_format, torch.ops.aten.as_strided.default)


def computes(node: Node) -> bool:
    """Whether a call does work; views, picking an output and allocating do none."""
    is_view = node.target in _BOOKKEEPING or getattr(node.target, "is_view", False)
    return node.op == "call_function" and not is_view


def past_bookkeeping(node: Node) -> Node:
    """The node whose result `node` picks or views; `node` itself when it computes."""
    while node.op == "call_function" and not computes(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def layers_by_node(graph: Graph) -> dict[str, str]:
    """The layer of each node that has one, by the node's name."""
    return {node.name: node.meta[LAYER_KEY] for node in graph.nodes if LAYER_KEY in node.meta}


def calls(graph: Graph, layers: Mapping[str, str]) -> Counter[str]:
    """How many nodes of each MoE layer compute something."""
    return Counter(layers[node.name] for node in graph.nodes if node.name in layers and computes(node))


def launches(graph: Graph, layers: Mapping[str, str]) -> Counter[str]:
    """How many of them launch a Triton kernel."""
    return Counter(layers[node.name] for node in graph.nodes if node.name in layers and _is_launch(node))


def view(graph: Graph, layers: Mapping[str, str]) -> tuple[NodeView, ...]:
    """Nodes of MoE layers and their neighbours; picking an output and views are drawn as an edge."""
    inside = [node for node in graph.nodes if node.name in layers and computes(node)]
    sources = {node: _sources(node) for node in inside}
    aliases = defaultdict(list)
    for node in graph.nodes:
        if past_bookkeeping(node) is not node:
            aliases[past_bookkeeping(node)].append(node.name)
    shown = set(inside) | {source for node in inside for source in sources[node]}
    return tuple(
        NodeView(
            name=node.name,
            label=_label(node),
            detail=_detail(node.meta.get("val")),
            inputs=tuple(source.name for source in sources.get(node, ())),
            layer=layers[node.name] if node in sources else "",
            is_input=node.op in ("placeholder", "get_attr"),
            aliases=tuple(aliases[node]),
        )
        for node in graph.nodes
        if node in shown
    )


def _sources(node: Node) -> tuple[Node, ...]:
    """What a node reads, past bookkeeping; memory that was only allocated is not read."""
    found = dict.fromkeys(map(past_bookkeeping, node.all_input_nodes))
    return tuple(each for each in found if each.op != "call_function" or computes(each))


def _is_launch(node: Node) -> bool:
    return node.op == "call_function" and node.target is _compat.triton_launch()


def _label(node: Node) -> str:
    if node.op != "call_function":
        return input_name(node)
    if _is_launch(node):
        return _compat.kernel_name(cast(int, node.kwargs["kernel_idx"]))
    is_overload = isinstance(node.target, torch._ops.OpOverload)
    return str(node.target.overloadpacket if is_overload else node.target)  # type: ignore[union-attr]


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
