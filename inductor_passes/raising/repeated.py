"""Products with weights that are repeated for each token, seen as products of all tokens with each expert.

    hidden = x[:, None, None, :] @ weight.mT  # [T, E, 1, I], of weights [T, E, H, I] that are a copy

What is not raised multiplies as before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.graph_tools import write_out
from inductor_passes.raising.instead import instead
from inductor_passes.raising.views_of_rows import (
    SHOWN,
    args,
    aten,
    has_layout,
    indexed,
    is_one,
    is_view,
    only_user,
    rank,
    same_shape,
    seen_from,
    size,
    unseen,
)
from inductor_passes.raising.writing import erase_unread, held


class _Repeated(NamedTuple):
    """A product of rows with all of a weight, which is repeated for each of them."""

    rows: Node
    """[..., E, 1, A], or [..., E, A, 1] behind the weight."""
    weight: Node
    is_turned: bool
    """Whether rows meet the weight [E, B, A] transposed."""
    is_behind: bool


@contextmanager
def multiplied_by_expert(graph: Graph) -> Iterator[None]:
    """Every such product is one of rows by expert with the weight, until the end; who reads it sees what he saw."""
    found: dict[Node, Node] = {}
    before: dict[Node, tuple[Any, Any]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        shown = only_user(node)
        if shown is not None and (product := _repeated(node, shown)) is not None:
            before[node] = node.args, node.meta["val"]
            found[shown] = _write(graph, node, shown, product)
    try:
        kept = [(each, node) for node, (factors, _) in before.items() for each in factors]
        with held(kept), instead(graph, found):
            yield
    finally:
        for node, (factors, value) in before.items():
            _restore(graph, node, factors, value)


def _write(graph: Graph, node: Node, shown: Node, product: _Repeated) -> Node:
    """Makes `node` a product by expert; what shows it as it was shown."""

    def by_expert(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rows.transpose(0, 1), weight.mT if product.is_turned else weight

    def by_token(out: Tensor) -> Tensor:
        return out.transpose(0, 1).unsqueeze(-1 if product.is_behind else -2)

    with graph.inserting_before(node):
        rows = _flat(graph, product)
        factors = write_out(graph, by_expert, (rows, product.weight), node)
    node.args = tuple(factors)
    node.meta["val"] = torch.bmm(*(each.meta["val"] for each in factors))
    with graph.inserting_before(shown):
        (out,) = write_out(graph, by_token, (node,), shown)
        return graph.node_copy(shown, lambda each: out if each is node else each)


def _flat(graph: Graph, product: _Repeated) -> Node:
    """[T, E, A] of rows. Nothing asks for their sizes, as who reads rows of experts else keeps a layer."""
    number, *shape = product.weight.meta["val"].shape
    wanted = [-1, number, shape[product.is_turned]]
    rows = graph.call_function(aten.reshape.default, (product.rows, wanted))
    rows.meta["val"] = product.rows.meta["val"].reshape(wanted)
    return rows


def _restore(graph: Graph, node: Node, factors: Any, value: Any) -> None:
    written = factors if node._erased else args(node)
    if not node._erased:
        node.args, node.meta["val"] = factors, value
    for each in written:
        erase_unread(graph, each)


def _repeated(product: Node, shown: Node) -> _Repeated | None:
    """The product of which `shown` [..., E, 1, B] is the result, or [..., E, B, 1]."""
    if shown.target not in SHOWN or rank(shown) < 4:
        return None
    left, right = (_unmerged(each, shown) for each in args(product))
    if left is None or right is None:
        return None
    for rows, weights, is_behind in ((left, right, False), (right, left, True)):
        is_turned = _is_turned(weights)
        if is_one(size(rows, -1 if is_behind else -2)) and is_turned is not None:
            return _Repeated(rows, unseen(weights), is_turned != is_behind, is_behind)
    return None


def _unmerged(factor: Node, shown: Node) -> Node | None:
    """[..., E, A, B] of which a factor [S, A, B] is a view, its first dimensions those of what is shown."""
    node = factor
    while rank(node) < rank(shown) and (is_view(node) or node.target is aten.clone.default):
        node = args(node)[0]
    leading, wanted = (each.meta["val"].shape[:-2] for each in (node, shown))
    return node if same_shape(leading, wanted) else None


def _is_turned(weights: Node) -> bool | None:
    """Whether `weights` [..., E, A, B] repeats [E, B, A] transposed; None where it repeats none."""
    source = unseen(weights)
    is_known = rank(source) == 3 and all(isinstance(each, int) for each in source.meta["val"].shape)
    if not is_known or indexed(source) is not None:
        return None
    shown = seen_from(source, weights)
    number, x, y = source.meta["val"].shape
    for is_turned, sizes, strides in ((False, (x, y), (y, 1)), (True, (y, x), (1, y))):
        before = () if shown is None else shown.shape[:-3]
        wanted = (*[0] * len(before), x * y, *strides)
        if shown is not None and has_layout(shown, (*before, number, *sizes), wanted):
            return is_turned
    return None
