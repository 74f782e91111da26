"""How the outputs of experts become one row for each token: weighted, brought back into the order of slots, summed."""

import contextlib
import operator
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import concrete
from inductor_passes.raising.indices import Indices, Order
from inductor_passes.raising.layer import Tokens, WeightedSum
from inductor_passes.raising.strays import stray_runs
from inductor_passes.raising.totals import Given, of_choices, total, unweighed
from inductor_passes.raising.views_of_rows import (
    VIEWS,
    args,
    aten,
    features,
    has_layout,
    indexed,
    is_cast,
    is_reshape,
    is_view_of_rows,
    only_user,
    row_index,
    seen_from,
    unmasked,
)
from inductor_passes.raising.weights import chosen, weights_of_rows


def weighted_sum(expert_out: Node, order: Order, indices: Indices, tokens: Tokens) -> WeightedSum:
    """The sum of `expert_out` [S, H], rows in `order`. Raises Refusal where it is read in another way."""
    try:
        return _followed(expert_out, order, indices, tokens)
    except Refusal:
        if stray_runs(indices):
            raise
        with contextlib.suppress(Refusal):
            return _computed(expert_out, order, indices, tokens)
        raise


def _computed(expert_out: Node, order: Order, indices: Indices, tokens: Tokens) -> WeightedSum:
    """The sum, where rows are added in any other way, weighed before or not at all perhaps."""

    def part(rows: Tensor, place: int) -> Tensor:
        return rows.flatten(0, 1)[order[place]]

    given = Given({expert_out: part}, indices.samples[0].shape[1], of_choices)
    found = _weighed_or_not(expert_out.graph, given, indices, tokens.topk_weights)
    return found if found.into else found._replace(root=_rounded(found.root, tokens.hidden_states))


def _weighed_or_not(graph: Graph, given: Given, indices: Indices, topk_weights: Node | None) -> WeightedSum:
    if topk_weights is None:
        with contextlib.suppress(Refusal):
            return total(graph, given, indices, indices.samples)
    found = unweighed(graph, given, indices, indices.samples)
    return found if topk_weights is None else WeightedSum(topk_weights, found.root, into=found.into)


def _followed(expert_out: Node, order: Order, indices: Indices, tokens: Tokens) -> WeightedSum:
    """Follows rows to where they are added, one operator after another."""
    node, weights, hidden_states = expert_out, tokens.topk_weights, tokens.hidden_states
    while (user := only_user(node)) is not None:
        if is_view_of_rows(user) or unmasked(user, indices) is node:
            node = user
        elif weights is None and user.target is aten.mul.Tensor:
            weights, node = weights_of_rows(user, node, order, indices), user
        elif _brings_back(user, node, order, indices):
            order, node = indices.slot_order, user
        elif weights is not None and _sums(user, node, order, indices):
            return _added_up(weights, user, hidden_states)
        elif weights is None and order is indices.slot_order:
            return _product_with_weights(user, node, indices, hidden_states)
        else:
            raise Refusal(user, f"{describe(user)} reads what experts give, not a weighted sum")
    raise Refusal(node, f"what experts give is read by {', '.join(map(describe, node.users)) or 'nobody'}")


def _brings_back(user: Node, rows: Node, order: Order, indices: Indices) -> bool:
    """Whether `user` puts rows into the order of slots."""
    if user.target is aten.index_put.default:
        into, where, put, accumulates = _put(user)
        is_plain = put is rows and not accumulates and len(where) == 1
        return (
            is_plain
            and into.meta["val"].shape == rows.meta["val"].shape
            and indices.are_slots(where[0], order)
        )
    if user.target is aten.scatter.src:
        into, dim, index, put = args(user)
        row = row_index(index)
        is_whole = dim == 0 and put is rows and into.meta["val"].shape == rows.meta["val"].shape
        return is_whole and row is not None and indices.are_slots(row, order)
    source = indexed(user)
    return source is not None and source[0] is rows and indices.are_rows(source[1], order)


def _sums(user: Node, rows: Node, order: Order, indices: Indices) -> bool:
    """Whether `user` adds the weighed rows of each token."""
    if user.target is aten.sum.dim_IntList and order is indices.slot_order:
        shape, dims = rows.meta["val"].shape, list(args(user)[1])
        return len(shape) > 2 and dims in ([len(shape) - 2], [-2]) and _is(shape[-2], indices.top_k)
    if user.target is aten.index_add.default:
        into, dim, index, added = args(user)[:4]
        is_plain = dim == 0 and added is rows and not user.kwargs
        return is_plain and _is_by_token(into, rows, indices) and indices.are_tokens(index, order)
    if user.target is aten.scatter_add.default or _is_sum_by_scatter(user):
        into, dim, index, added = args(user)[:4]
        row = row_index(index)
        return (
            dim == 0
            and added is rows
            and _is_by_token(into, rows, indices)
            and row is not None
            and indices.are_tokens(row, order)
        )
    if user.target is aten.index_put.default:
        into, where, added, accumulates = _put(user)
        return (
            added is rows
            and bool(accumulates)
            and _is_by_token(into, rows, indices)
            and len(where) == 1
            and indices.are_tokens(where[0], order)
        )
    return False


def _is_sum_by_scatter(user: Node) -> bool:
    return user.target is aten.scatter_reduce.two and args(user)[4:] == ("sum",) and not user.kwargs


def _product_with_weights(user: Node, rows: Node, indices: Indices, hidden_states: Node) -> WeightedSum:
    """The sum as a product: `weights [T, 1, K] @ rows [T, K, H]`, or `rows [T, H, K] @ weights [T, K, 1]`."""
    shown, product = rows, user
    while is_reshape(product) and (reader := only_user(product)) is not None:
        shown, product = product, reader
    is_left = args(product)[0] is shown
    # Of one token Inductor makes `mm`; what that gives on the left is [H, 1], not a row.
    if product.target is aten.bmm.default or (product.target is aten.mm.default and not is_left):
        weights = chosen(args(product)[is_left], indices)
        if weights is not None and _shows_slots(shown, rows, is_left, indices):
            return WeightedSum(weights, _rounded(product, hidden_states))
    raise Refusal(user, f"{describe(user)} reads what experts give, not a weighted sum")


def _shows_slots(shown: Node, rows: Node, is_left: bool, indices: Indices) -> bool:
    """Whether `shown` is [T, K, H] of `rows`, or [T, H, K] on the left."""
    view, (tokens, top_k) = seen_from(rows, shown), indices.samples[0].shape
    columns = concrete(features(rows.meta["val"]))
    if view is None or columns is None:
        return False
    view = view if view.dim() == 3 else view.unsqueeze(0)
    if is_left:
        return has_layout(view, (tokens, columns, top_k), (top_k * columns, 1, columns))
    return has_layout(view, (tokens, top_k, columns), (top_k * columns, columns, 1))


def _put(index_put: Node) -> tuple[Any, Any, Any, Any]:
    """Into what, where, what, and whether it is added."""
    given = args(index_put)
    return given[0], given[1], given[2], len(given) > 3 and given[3]


def _added_up(weights: Node, user: Node, hidden_states: Node) -> WeightedSum:
    """The sum, and what rows are added to: zeros, or what a model has made of its tokens otherwise."""
    into = None if user.target is aten.sum.dim_IntList else args(user)[0]
    if into is None or is_zero(into):
        return WeightedSum(weights, _rounded(user, hidden_states))
    return WeightedSum(weights, user, into=into)


def _is_by_token(into: Any, rows: Node, indices: Indices) -> bool:
    """Whether rows are added to [T, H]: there may be more rows than tokens, which a sum over experts has not."""
    shape, wanted = into.meta["val"].shape, (indices.num_tokens, rows.meta["val"].shape[-1])
    same = map(_compat.statically_known_true, map(operator.eq, shape, wanted))
    return len(shape) == len(wanted) and all(same)


def is_zero(node: object) -> bool:
    """Whether `node` is filled with zeros."""
    while isinstance(node, Node) and node.target in VIEWS:
        node = args(node)[0]
    return isinstance(node, Node) and node.target is aten.full.default and args(node)[1] == 0


def _is(size: object, number: int | None) -> bool:
    return isinstance(size, int) and size == number


def _rounded(sum: Node, hidden_states: Node) -> Node:
    """The sum, in the dtype of the layer where that is all that is read of it."""
    user = only_user(sum)
    dtype = hidden_states.meta["val"].dtype
    return user if user is not None and is_cast(user) and user.meta["val"].dtype == dtype else sum
