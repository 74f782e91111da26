"""Assertions about expert ids that hold for whatever a router gives.

`F.one_hot` has two: a layer that counts its slots so would keep its ids for them alone, and launch kernels for each.
"""

from torch.fx import Graph, Node

from inductor_passes.base import Refusal
from inductor_passes.raising.evaluation import aten, cut, is_size
from inductor_passes.raising.indices import Indices, is_integral
from inductor_passes.raising.views_of_rows import args
from inductor_passes.raising.writing import erase_unread

_ASSERTS = (aten._assert_async.msg, aten._assert_async.default)


def erase_held(graph: Graph, ids: Node, num_experts: int) -> None:
    """Erases every assertion that follows from `ids` [T, K] of a router, which are never out of range, and holds.

    Where ids are too many to be tried out, all stay.
    """
    asserts = [each for target in _ASSERTS for each in graph.find_nodes(op="call_function", target=target)]
    if not asserts:
        return
    try:
        indices = Indices(ids, num_experts, {})
    except Refusal:
        return
    for each in asserts:
        condition = args(each)[0]
        if _is_of(condition, ids) and indices.is_everywhere(condition, True):
            graph.erase_node(each)
            erase_unread(graph, condition)


def _is_of(condition: Node, ids: Node) -> bool:
    """Whether a condition is one of `ids` alone. Of another layer's it is not followed back through the model."""
    leaves = cut([condition], lambda each: each is ids or not is_integral(each)).leaves
    return all(leaf is ids or is_size(leaf) for leaf in leaves)
