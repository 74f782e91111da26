"""Which tensor holds the weight of each slot."""

from collections.abc import Iterator

from torch.fx import Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import WIDE
from inductor_passes.raising.indices import Indices, Order
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    indexed,
    is_cast,
    is_view,
    operand,
    rank,
    same_shape,
    unmasked,
)


def weights_of_rows(product: Node, rows: Node, order: Order, indices: Indices) -> Node:
    """[T, K] where `product` is rows times the weights of their slots. Raises Refusal where it is not."""
    found = weights_beside(product, rows, order, indices)
    if found is None:
        raise Refusal(product, f"{describe(operand(product, rows))} is no weight for each slot")
    return found


def weights_beside(product: Node, rows: Node, order: Order, indices: Indices) -> Node | None:
    """[T, K] where `product` is rows times the weights of their slots."""
    other = operand(product, rows)
    if other is None or not _is_column(other, rows):
        return None  # what lies along the columns is no weight, however many there are
    if order is indices.slot_order:
        return chosen(other, indices)
    source = indexed([*_inwards(other, indices)][-1])
    return chosen(source[0], indices) if source is not None and indices.are_slots(source[1], order) else None


def _is_column(weights: Node, rows: Node) -> bool:
    """Whether `weights` has a number for each row, [S, 1] for rows [S, H]; a size has none."""
    are_tensors = rank(weights) > 0 and rank(rows) > 0
    return are_tensors and same_shape(weights.meta["val"].shape, (*rows.meta["val"].shape[:-1], 1))


def _inwards(node: Node, indices: Indices) -> Iterator[Node]:
    """`node` and what it shows: before views, masks of ids out of range, and casts."""
    while True:
        yield node
        if is_view(node) or node.target is aten.clone.default or is_cast(node):
            node = args(node)[0]
        elif (kept := unmasked(node, indices)) is not None:
            node = kept
        else:
            return


def chosen(node: Node, indices: Indices) -> Node | None:
    """The innermost tensor that `node` shows and that has the shape of the ids: before it was rounded."""
    return next((each for each in reversed([*_inwards(node, indices)]) if are_weights(each, indices)), None)


def are_weights(node: Node, indices: Indices) -> bool:
    """Whether `node` has a floating number for each slot, in the shape that the ids have."""
    value = node.meta["val"]
    return value.dtype in WIDE and same_shape(value.shape, indices.ids.meta["val"].shape)
