"""Products that sum over experts as well, seen as products with each expert and a sum by the passes that raise layers.

    torch.einsum("te,eti,eih->th", weights, hidden, w2)  # [T, E * I] @ [E * I, H]

What is not raised is one product again.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.raising.shown_sums import ShownSum, shown_as_sums
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


def summed_by_expert(graph: Graph) -> AbstractContextManager[None]:
    """Every such product is a sum over products with each expert, until the end."""
    return shown_as_sums(graph, _merged)


def _by_expert(rows: Node, weight: Node, is_turned: bool) -> ShownSum:
    """Of rows [..., E, A], or with dimensions of size 1 anywhere, and a weight [E, A, B], or turned [E, B, A]."""

    def multiply(weight: Tensor, rows: Tensor) -> Tensor:
        weight = weight.mT if is_turned else weight
        return torch.bmm(rows.reshape(-1, *weight.shape[:2]).transpose(0, 1), weight)

    return ShownSum(rows, weight, multiply, 0)


def _merged(product: Node) -> ShownSum | None:
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
    return None if rows is None or is_turned is None else _by_expert(rows, weight, is_turned)


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
