"""How the outputs of experts become one row for each token: weighted, brought back into the order of slots, summed."""

from collections.abc import Iterator
from typing import NamedTuple

from torch.fx import Node

from inductor_passes import _compat
from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.indices import Indices, Order
from inductor_passes.raising.products import (
    VIEWS,
    aten,
    indexed,
    is_cast,
    is_view,
    is_view_of_rows,
    only_user,
    operand,
    unmasked,
)


class WeightedSum(NamedTuple):
    """`root` is the sum over a token's experts, each times its weight in `topk_weights` [T, K]."""

    topk_weights: Node
    root: Node


def weighted_sum(expert_out: Node, order: Order, indices: Indices, hidden_states: Node) -> WeightedSum:
    """Follows `expert_out` [S, H], rows in `order`, to the sum. Raises Refusal where it is read in another way."""
    node, weights = expert_out, None
    while (user := only_user(node)) is not None:
        if is_view_of_rows(user) or unmasked(user, indices) is node:
            node = user
        elif weights is None and user.target is aten.mul.Tensor:
            weights, node = _weights(user, node, order, indices), user
        elif (source := indexed(user)) is not None and source[0] is node and indices.are_rows(source[1], order):
            order, node = indices.slot_order, user
        elif weights is not None and _sums(user, node, order, indices):
            return WeightedSum(weights, _rounded(user, hidden_states))
        elif weights is None and order is indices.slot_order:
            return _product_with_weights(user, node, indices, hidden_states)
        else:
            raise Refusal(user, f"{describe(user)} reads what experts give, not a weighted sum")
    raise Refusal(node, f"what experts give is read by {', '.join(map(describe, node.users)) or 'nobody'}")


def _weights(product: Node, rows: Node, order: Order, indices: Indices) -> Node:
    """[T, K] where `product` is rows times the weights of their slots."""
    other, found = operand(product, rows), None
    if other is not None and order is indices.slot_order:
        found = _chosen(other, indices)
    elif other is not None:
        source = indexed([*_inwards(other, indices)][-1])
        if source is not None and indices.are_slots(source[1], order):
            found = _chosen(source[0], indices)
    if found is None:
        raise Refusal(product, f"{describe(other)} is no weight for each slot")
    return found


def _inwards(node: Node, indices: Indices) -> Iterator[Node]:
    """`node` and what it shows: before views, masks of ids out of range, and casts."""
    while True:
        yield node
        is_rounded = is_cast(node) and node.args[0].meta["val"].dtype.is_floating_point  # type: ignore[union-attr]
        if is_view(node) or node.target is aten.clone.default or is_rounded:
            node = node.args[0]  # type: ignore[assignment]
        elif (kept := unmasked(node, indices)) is not None:
            node = kept
        else:
            return


def _chosen(node: Node, indices: Indices) -> Node | None:
    """The innermost tensor that `node` shows and that has the shape of the ids: before it was rounded."""
    return next((each for each in reversed([*_inwards(node, indices)]) if _has_shape(each, indices.ids)), None)


def _has_shape(node: Node, other: Node) -> bool:
    ours, theirs = node.meta["val"].shape, other.meta["val"].shape
    same = (_compat.statically_known_true(a == b) for a, b in zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) and all(same)


def _sums(user: Node, rows: Node, order: Order, indices: Indices) -> bool:
    """Whether `user` adds the weighed rows of each token."""
    if user.target is aten.sum.dim_IntList and order is indices.slot_order:
        shape, dims = rows.meta["val"].shape, list(user.args[1])  # type: ignore[arg-type]
        keeps_dim = len(user.args) > 2 and user.args[2]
        return len(shape) == 3 and dims in ([1], [-2]) and _is(shape[1], indices.top_k) and not keeps_dim
    if user.target is aten.index_add.default:
        into, dim, index, added = user.args[:4]
        return dim == 0 and added is rows and _is_zero(into) and indices.are_tokens(index, order)  # type: ignore[arg-type]
    if user.target is aten.index_put.default:
        into, where, added, accumulates = (*user.args, False)[:4]
        return (
            added is rows
            and bool(accumulates)
            and _is_zero(into)
            and len(where) == 1  # type: ignore[arg-type]
            and indices.are_tokens(where[0], order)  # type: ignore[index,arg-type]
        )
    return False


def _product_with_weights(user: Node, rows: Node, indices: Indices, hidden_states: Node) -> WeightedSum:
    """The sum as a product: `weights [T, 1, K] @ rows [T, K, H]`, or the other way round, transposed."""
    if user.target is aten.permute.default and list(user.args[1]) == [0, 2, 1]:  # type: ignore[arg-type]
        product, side = only_user(user), 0
        rows = user
    else:
        product, side = user, 1
    if product is not None and product.target is aten.bmm.default and product.args[side] is rows:
        weights = _chosen(product.args[1 - side], indices)  # type: ignore[arg-type]
        if weights is not None and rows.meta["val"].dim() == 3:
            return WeightedSum(weights, _rounded(product, hidden_states))
    raise Refusal(user, f"{describe(user)} reads what experts give, not a weighted sum")


def _is_zero(node: object) -> bool:
    """Whether `node` is filled with zeros."""
    while isinstance(node, Node) and node.target in VIEWS:
        node = node.args[0]
    return isinstance(node, Node) and node.target is aten.full.default and node.args[1] == 0


def _is(size: object, number: int | None) -> bool:
    return isinstance(size, int) and size == number


def _rounded(sum: Node, hidden_states: Node) -> Node:
    """The sum, in the dtype of the layer where that is all that is read of it."""
    user = only_user(sum)
    dtype = hidden_states.meta["val"].dtype
    return user if user is not None and is_cast(user) and user.meta["val"].dtype == dtype else sum
