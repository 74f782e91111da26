"""Rows times gathered weights, number by number and added up, seen as products by the passes that raise layers.

`(weight[ids] * x[:, None, None]).sum(-1)` is `weight[ids] @ x`. What is not raised is a sum again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.graph_tools import write_out
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.views_of_rows import args, aten, indexed, is_one, rank, same_shape, size, unseen
from inductor_passes.raising.writing import erase_unread


class _Summed(NamedTuple):
    """A sum, and the product [..., B, 1] that it shows meanwhile."""

    total: Node
    product: Node
    args: Any
    """Of the sum."""


@contextmanager
def multiplied_sums(graph: Graph) -> Iterator[None]:
    """Every such sum is a product, until the end."""
    found = [
        _with_product(graph, node, factors)
        for node in list(graph.nodes)
        if (factors := _factors(node)) is not None
    ]
    try:
        yield
    finally:
        for each in found:
            _show(graph, each)


def _factors(total: Node) -> tuple[Node, Node] | None:
    """Gathered weights [..., B, A] and rows [..., 1, A], where `total` is the sum of their products."""
    if total.target is not aten.sum.dim_IntList or total.kwargs or not total.users:
        return None
    scaled, dims, *_ = args(total)
    last = rank(scaled) - 1
    if scaled.target is not aten.mul.Tensor or list(dims or ()) not in ([-1], [last]):
        return None
    pairs = (args(scaled), args(scaled)[::-1])
    return next(((weights, rows) for weights, rows in pairs if _meet(weights, rows)), None)


def _meet(weights: object, rows: object) -> bool:
    if not isinstance(weights, Node) or not isinstance(rows, Node) or not 2 <= rank(weights) == rank(rows):
        return False
    are_rows = is_one(size(rows, -2)) and same_shape(
        rows.meta["val"].shape[-1:], weights.meta["val"].shape[-1:]
    )
    source = indexed(unseen(weights))
    return are_rows and source is not None and rank(source[0]) == 3 and is_integral(source[1])


def _with_product(graph: Graph, total: Node, factors: tuple[Node, Node]) -> _Summed:
    def multiply(weights: Tensor, rows: Tensor) -> Tensor:
        return weights @ rows.transpose(-1, -2)

    with graph.inserting_before(total):
        (product,) = write_out(graph, multiply, factors, total)
    found = _Summed(total, product, total.args)
    if rank(total) == rank(product):  # keepdim
        total.target, total.args = aten.permute.default, (product, [*range(rank(product))])
    else:
        total.target, total.args = aten.squeeze.dim, (product, -1)
    return found


def _show(graph: Graph, each: _Summed) -> None:
    if each.total._erased:
        erase_unread(graph, each.args[0])
    else:
        each.total.target, each.total.args = aten.sum.dim_IntList, each.args
        erase_unread(graph, each.product)
