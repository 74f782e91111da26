"""ShareRepeats: layers that would route or sort the same ids twice do it once.

topk_weights, topk_ids = topk_routing(router_logits, ...)         again with the same arguments: the first one
sorted_slots, inverse, offsets = build_dispatch(topk_ids, ...)    likewise
rows = permute(hidden_states, sorted_slots)                       and so on, until arguments differ

Before the fusions these are operators, behind the lowerings what they were written out as.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes.base import LAYER_KEY, PassLog
from inductor_passes.graph_tools import getitem_source, is_moe_op, operator_name, outputs


class ShareRepeats:
    """Nodes of layers that compute the same become one. `name` tells the one behind the lowerings from the first."""

    requires: tuple[str, ...] = ()
    inference_only = True

    def __init__(self, name: str = "share_repeats") -> None:
        self.name = name

    def run(self, graph: Graph, log: PassLog) -> None:
        """Keeps the first of equal nodes that belong to layers."""
        firsts: dict[Node, Node] = {}
        seen: dict[Any, Node] = {}
        constants: set[Node] = set()
        for node in list(graph.nodes):
            if not _is_of_layer(node) or not _gives_the_same(node):
                continue
            args = map_arg((node.args, node.kwargs), lambda arg: firsts.get(arg, arg))
            first = firsts[node] = seen.setdefault((node.target, repr(args)), node)
            if constants.issuperset(node.all_input_nodes):
                constants.add(node)  # as cheap to have twice
            elif first is not node and not _is_returned(node):
                _replace(graph, node, first, log)


def _is_of_layer(node: Node) -> bool:
    source = getitem_source(node)
    return LAYER_KEY in (node if source is None else source[0]).meta


def _gives_the_same(node: Node) -> bool:
    """Whether a call gives the same whenever it gets the same."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not is_random and not node.target._schema.is_mutable and not node.is_impure()


def _is_returned(node: Node) -> bool:
    """Whether a graph returns `node`, or one of its outputs, to somebody who may write into it."""
    readers = (*node.users, *(user for each in outputs(node).values() for user in each.users))
    return any(user.op == "output" for user in readers)


def _replace(graph: Graph, node: Node, first: Node, log: PassLog) -> None:
    if is_moe_op(node):
        log.fuse(f"repeated {operator_name(node)}", node, (first, node))
    node.replace_all_uses_with(first)
    graph.erase_node(node)
