"""Products that sum over experts as well, seen as products with each expert and a sum by the passes that raise layers.

    torch.einsum("te,eti,eih->th", weights, hidden, w2)  # [T, E * I] @ [E * I, H]

What is not raised is one product again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.graph_tools import write_out
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    has_layout,
    indexed,
    is_one,
    is_view,
    rank,
    same_shape,
    seen_from,
    size,
    unseen,
)
from inductor_passes.raising.writing import erase_unread


class _Merged(NamedTuple):
    """A product [T, E * A] @ [E * A, B]."""

    rows: Node
    """[..., E, A], or with dimensions of size 1 anywhere."""
    weight: Node
    is_turned: bool
    """Whether the weight is [E, B, A]."""


@contextmanager
def summed_by_expert(graph: Graph) -> Iterator[None]:
    """Every such product is a sum over products with each expert, until the end."""
    before: dict[Node, tuple[_Merged, Any, Any]] = {}
    for node in list(graph.nodes):
        if (found := _merged(node)) is not None:
            before[node] = found, node.target, node.args
            product = _by_expert(graph, node, found)
            node.target, node.args = aten.sum.dim_IntList, (product, [0], rank(node) == 3)
    try:
        yield
    finally:
        for node, (found, target, factors) in before.items():
            if not node._erased:
                product, (rows, factor) = args(node)[0], factors
                node.target, node.args = target, (rows, _factor(graph, node, found, factor))
                erase_unread(graph, product)


def _factor(graph: Graph, node: Node, found: _Merged, factor: Node) -> Node:
    """The second factor, once more where it went with a layer of the same weights: nobody read it meanwhile."""
    if not factor._erased:
        return factor

    def beside(weight: Tensor) -> Tensor:
        matrix = (weight.mT if found.is_turned else weight).flatten(0, 1)
        return matrix.unsqueeze(0) if rank(node) == 3 else matrix

    with graph.inserting_before(node):
        return write_out(graph, beside, (found.weight,), node)[0]


def _by_expert(graph: Graph, node: Node, found: _Merged) -> Node:
    """[E, T, B], before they are added up."""

    def multiply(rows: Tensor, weight: Tensor) -> Tensor:
        weight = weight.mT if found.is_turned else weight
        return torch.bmm(rows.reshape(-1, *weight.shape[:2]).transpose(0, 1), weight)

    with graph.inserting_before(node):
        return write_out(graph, multiply, (found.rows, found.weight), node)[0]


def _merged(product: Node) -> _Merged | None:
    is_batch_of_one = product.target is aten.bmm.default and is_one(size(product, 0))
    if not is_batch_of_one and product.target is not aten.mm.default:
        return None
    left, right = args(product)
    weight = unseen(right)
    shape = weight.meta["val"].shape
    is_known = rank(weight) == 3 and all(isinstance(each, int) for each in shape)
    is_stored = is_known and indexed(weight) is None and not _is_given(weight)
    is_turned = _is_turned(weight, right) if is_stored else None
    rows = None if is_turned is None else _unmerged(left, (shape[0], shape[1 + is_turned]))
    return None if rows is None or is_turned is None else _Merged(rows, weight, is_turned)


def _is_given(weight: Node) -> bool:
    """Whether it is what a product gives, with a bias perhaps: rows, which masks [T, E, C] add up."""
    added = weight.all_input_nodes if weight.target is aten.add.Tensor else [weight]
    return any(unseen(each).target in (aten.bmm.default, aten.baddbmm.default) for each in added)


def _is_turned(weight: Node, factor: Node) -> bool | None:
    """Whether `factor` [E * A, B] shows `weight` [E, B, A], rather than [E, A, B]; None where it shows neither."""
    number, x, y = weight.meta["val"].shape
    for is_turned, sizes, strides in ((False, (x, y), (y, 1)), (True, (y, x), (1, y))):
        node = _unmerged(factor, (number, *sizes))
        shown = None if node is None else seen_from(weight, node)
        is_whole = same_shape(factor.meta["val"].shape[-2:], (number * sizes[0], sizes[1]))
        if (
            is_whole
            and shown is not None
            and has_layout(shown.squeeze(), (number, *sizes), (x * y, *strides))
        ):
            return is_turned
    return None


def _unmerged(node: Node, last: tuple[int, ...]) -> Node | None:
    """What `node` shows whose last sizes are these, but for sizes of 1: einsums have some between them."""
    while is_view(node) or node.target is aten.clone.default:
        node = args(node)[0]
        shape = [each for each in node.meta["val"].shape if not is_one(each)]
        if len(shape) >= len(last) and same_shape(shape[-len(last) :], last):
            return node
    return None
