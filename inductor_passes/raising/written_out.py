"""Products that Inductor has written out as sums, seen as products by the passes that raise layers.

On a GPU it does so for one row or one column with `coordinate_descent_tuning`, which `mode="max-autotune"` sets: then
bmm(a, b) is (a.unsqueeze(-1) * b.unsqueeze(1)).sum(2), in float32. What is not raised is written out again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from inductor_passes.raising.views_of_rows import args, aten, is_cast, rank

_PLACES = {2: (aten.mm.default, 2, 0, 1), 3: (aten.bmm.default, 3, 1, 2)}
"""By the rank of factors: their product, where each of them gets a dimension, and over which the sum is."""


class _WrittenOut(NamedTuple):
    """A product."""

    node: Node
    """What gives its result."""
    product: Any
    factors: tuple[Node, Node]
    rounded: Node | None
    """The sum, if `node` rounds it."""
    target: Any
    args: Any
    """Of `node` as it is written out."""


@contextmanager
def multiplied(graph: Graph) -> Iterator[None]:
    """Every product that is written out is one, until the end."""
    products = [each for node in graph.nodes if (each := _written_out(node)) is not None]
    rounded = {each.rounded for each in products}  # a sum that is cast is one product, not two
    found = [each for each in products if each.node not in rounded]
    for each in found:
        each.node.target, each.node.args = each.product, each.factors
    try:
        yield
    finally:
        for each in found:
            if not each.node._erased:
                each.node.target, each.node.args = each.target, each.args


def _written_out(node: Node) -> _WrittenOut | None:
    total = args(node)[0] if is_cast(node) else node
    if total.target is not aten.sum.dim_IntList or total.kwargs or len(args(total)) > 2:
        return None
    scaled = args(total)[0]
    if scaled.target is not aten.mul.Tensor:
        return None
    shown = args(scaled)
    if not all(isinstance(each, Node) and each.target is aten.unsqueeze.default for each in shown):
        return None
    if not _is_product(total, shown):
        return None
    factors = _unrounded(*(args(each)[0] for each in shown))
    rounded = total if total is not node else None
    return _WrittenOut(node, _PLACES[rank(factors[0])][0], factors, rounded, node.target, node.args)


def _unrounded(left: Node, right: Node) -> tuple[Node, Node]:
    """Two factors as they were before both were cast, if they were."""
    if is_cast(left) and is_cast(right):
        narrow = args(left)[0], args(right)[0]
        if narrow[0].meta["val"].dtype == narrow[1].meta["val"].dtype:
            return narrow
    return left, right


def _is_product(total: Node, shown: tuple[Node, Node]) -> bool:
    """Whether a sum over two factors, as they are shown, is a product of them."""
    left, right = (args(each)[0] for each in shown)
    if rank(left) != rank(right) or rank(left) not in _PLACES:
        return False
    _, *places = _PLACES[rank(left)]
    found = [args(each)[1] % (rank(left) + 1) for each in shown]
    found += [dim % (rank(left) + 1) for dim in args(total)[1] or ()]
    return found == places
