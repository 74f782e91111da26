"""What the rows of a first product are: the tokens of their slots, weighed already perhaps."""

import math

from torch.fx import Node

from inductor_passes import _compat
from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.indices import Indices, Order
from inductor_passes.raising.layer import Tokens
from inductor_passes.raising.products import Product
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    indexed,
    is_cast,
    is_one,
    is_view_of_rows,
    rank,
    same_shape,
    without_views,
)
from inductor_passes.raising.weights import weights_of_rows


def tokens_of(first: Product, order: Order, indices: Indices) -> Tokens:
    """The tokens that are the rows of `first`. Raises Refusal where rows are anything else."""
    if first.kind == "shared":
        return Tokens(flat(first.rows, indices), None)
    rows, weights = without_views(_unrounded(without_views(first.rows, indices)), indices), None
    if rows.target is aten.mul.Tensor and not indices.has_each_token(order):  # of a top-1 they may be normed
        rows, weights = _weighed(rows, order, indices)
    source = indexed(rows)
    if source is not None and indices.are_tokens(source[1], order):
        _expect_all_tokens(source[0], indices)
        return Tokens(source[0], weights)
    repeated = None if source is None else indices.order_of_places(source[1], order)
    if source is not None and repeated is not None and order is not repeated:
        rows, order = without_views(source[0], indices), repeated
    if indices.lies_by_choice(order) and (every := _repeated_by_choice(rows, indices)) is not None:
        return Tokens(flat(every, indices), weights)
    if rows.target is aten.expand.default and order is indices.slot_order:
        return Tokens(_repeated(rows, indices), weights)
    if indices.has_each_token(order):
        return Tokens(flat(rows, indices), weights)
    raise Refusal(first.node, f"rows come from {describe(rows)}, not from the tokens of their slots")


def _expect_all_tokens(source: Node, indices: Indices) -> None:
    rows, tokens = source.meta["val"].shape[0], indices.num_tokens
    if not _compat.statically_known_true(rows == tokens):
        raise Refusal(source, f"rows come from {rows} rows, of which {tokens} have expert ids")


def flat(rows: Node, indices: Indices) -> Node:
    """The innermost [T, H] that `rows` shows; where it shows none the innermost [B, S, H] with as many tokens."""
    found, other, node = None, None, rows
    while True:
        found = node if rank(node) == 2 else found
        other = node if rank(node) > 2 and _has_tokens(node, indices) else other
        if not is_view_of_rows(node) or is_cast(node) or node.target is aten.alias.default:
            break  # an alias may be where gradients stop
        node = args(node)[0]
    found = found or other
    if found is None:
        raise Refusal(rows, f"rows come from {describe(rows)}, not from tokens [T, H]")
    return found


def _has_tokens(rows: Node, indices: Indices) -> bool:
    """Whether there are T rows."""
    return _compat.statically_known_true(math.prod(rows.meta["val"].shape[:-1]) == indices.num_tokens)


def _unrounded(node: Node) -> Node:
    return args(node)[0] if is_cast(node) else node


def _weighed(product: Node, order: Order, indices: Indices) -> tuple[Node, Node]:
    """The rows and the weights of `rows * weights`."""
    for rows in product.all_input_nodes:
        if (source := indexed(_unrounded(rows))) is not None and source[0].meta["val"].dim() == 2:
            return _unrounded(rows), weights_of_rows(product, rows, order, indices)
    raise Refusal(product, f"rows come from {describe(product)}, not from tokens")


def _repeated_by_choice(rows: Node, indices: Indices) -> Node | None:
    """The tokens of which `rows` is [K * T, H] or [K, T, H], all of them K times."""
    if rows.target is aten.repeat.default:
        return args(rows)[0] if args(rows)[1] == [indices.top_k, 1] else None
    if rows.target is not aten.expand.default:
        return None
    shape, repeated = args(rows)[0].meta["val"].shape, rows.meta["val"].shape
    inner = shape[1:] if len(shape) == len(repeated) and is_one(shape[0]) else shape
    return args(rows)[0] if same_shape(repeated, (indices.top_k, *inner)) else None


def _repeated(rows: Node, indices: Indices) -> Node:
    """The tokens of which `rows` is [T, K, H], each K times; [B, S] for T, and dimensions of size 1, are the same."""
    source = args(rows)[0]
    tokens, before, after = flat(source, indices), source.meta["val"].shape, rows.meta["val"].shape
    of_ids = indices.ids.meta["val"].shape[:-1]
    leading = of_ids if same_shape(before[: len(of_ids)], of_ids) else (indices.num_tokens,)
    inner, repeated = before[len(leading) :], after[len(leading) :]
    columns = [place for place, size in enumerate(inner) if not is_one(size)]
    if (
        tokens is source
        or not same_shape(before[: len(leading)], leading)
        or len(before) != len(after)
        or len(columns) != 1
        or not all(map(is_one, repeated[columns[0] + 1 :]))
    ):
        raise Refusal(rows, f"rows come from {describe(source)}, repeated, not from tokens")
    return tokens
