"""What the rows of a first product are: the tokens of their slots, weighed already perhaps."""

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
    is_view,
    is_view_of_rows,
    rank,
    without_views,
)
from inductor_passes.raising.weights import weights_of_rows


def tokens_of(first: Product, order: Order, indices: Indices) -> Tokens:
    """The tokens that are the rows of `first`. Raises Refusal where rows are anything else."""
    rows, weights = without_views(first.rows, indices), None
    if first.kind == "shared":
        return Tokens(_flat(first.rows), None)
    if _unrounded(rows).target is aten.mul.Tensor:
        rows, weights = _weighed(_unrounded(rows), order, indices)
    source = indexed(rows)
    if source is not None and indices.are_tokens(source[1], order):
        _expect_all_tokens(source[0], indices)
        return Tokens(source[0], weights)
    if rows.target is aten.expand.default and order is indices.slot_order:
        return Tokens(_repeated(rows, indices), weights)
    raise Refusal(first.node, f"rows come from {describe(rows)}, not from the tokens of their slots")


def _expect_all_tokens(source: Node, indices: Indices) -> None:
    rows, tokens = source.meta["val"].shape[0], indices.ids.meta["val"].shape[0]
    if not _compat.statically_known_true(rows == tokens):
        raise Refusal(source, f"rows come from {rows} rows, of which {tokens} have expert ids")


def _flat(rows: Node) -> Node:
    """The innermost [T, H] that `rows` shows."""
    found, node = None, rows
    while True:
        found = node if rank(node) == 2 else found
        if not is_view_of_rows(node) or is_cast(node):
            break
        node = args(node)[0]
    if found is None:
        raise Refusal(rows, f"rows come from {describe(rows)}, not from tokens [T, H]")
    return found


def _unrounded(node: Node) -> Node:
    return args(node)[0] if is_cast(node) else node


def _weighed(product: Node, order: Order, indices: Indices) -> tuple[Node, Node]:
    """The rows and the weights of `rows * weights`."""
    for rows in product.all_input_nodes:
        if (source := indexed(_unrounded(rows))) is not None and source[0].meta["val"].dim() == 2:
            return _unrounded(rows), weights_of_rows(product, rows, order, indices)
    raise Refusal(product, f"rows come from {describe(product)}, not from tokens")


def _repeated(rows: Node, indices: Indices) -> Node:
    """[T, H] where `rows` is [T, K, H] or [T, K, 1, H], each token K times."""
    source = args(rows)[0]
    flat = source
    while rank(flat) > 2 and is_view(flat):
        flat = args(flat)[0]
    before, after = source.meta["val"].shape, rows.meta["val"].shape
    sizes = (indices.ids.meta["val"].shape[0], *[1] * (len(after) - 2), after[-1])
    is_column = len(before) == len(after) and all(
        map(_compat.statically_known_true, map(_equal, before, sizes))
    )
    if flat is source or rank(flat) != 2 or not is_column:
        raise Refusal(rows, f"rows come from {describe(source)}, repeated, not from tokens")
    return flat


def _equal(one: object, other: object) -> bool:
    return one == other
