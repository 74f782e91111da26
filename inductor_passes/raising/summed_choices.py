"""Products that sum over the choices of a token as well, seen as one for each choice and a sum.

    torch.einsum("tki,tkih->th", hidden * weights.unsqueeze(-1), w2[ids])  # [T, 1, K * I] @ [T, K * I, H]

What is not raised is one product again.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.graph_tools import write_out
from inductor_passes.raising.evaluation import concrete
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    indexed,
    is_copy,
    is_one,
    rank,
    same_shape,
    size,
    unseen,
)
from inductor_passes.raising.writing import erase_unread


class _Summed(NamedTuple):
    """A product `[T, 1, K * A] @ [T, K * A, B]`, whose longer dimension may be [A, K] as well."""

    rows: Node
    """[..., K, A], or with dimensions of size 1 behind."""
    gathered: Node
    """[..., K, A, B]."""
    is_turned: bool
    """Whether that is [..., K, B, A]."""
    is_by_choice: bool
    """Whether all that is summed of one choice comes before the next one's."""


@contextmanager
def multiplied_by_choice(graph: Graph) -> Iterator[None]:
    """Every such product is a sum over products of each choice, until the end."""
    before: dict[Node, tuple[_Summed, Any, Any]] = {}
    for node in list(graph.nodes):
        if (found := _summed(node)) is not None:
            before[node] = found, node.target, node.args
            product = _by_choice(graph, node, found)
            node.target, node.args = aten.sum.dim_IntList, (product, [1], rank(node) == 3)
    try:
        yield
    finally:
        for node, (found, target, factors) in before.items():
            if not node._erased:
                product, (rows, factor) = args(node)[0], factors
                node.target, node.args = target, (rows, _factor(graph, node, found, factor))
                erase_unread(graph, product)


def _factor(graph: Graph, node: Node, found: _Summed, factor: Node) -> Node:
    """The second factor, once more where it went with a layer of the same weights: nobody read it meanwhile."""
    if not factor._erased:
        return factor

    def below(gathered: Tensor) -> Tensor:
        matrices = gathered.mT if found.is_turned else gathered
        matrices = matrices if found.is_by_choice else matrices.transpose(-3, -2)
        matrix = matrices.flatten(-3, -2)
        return matrix.flatten(0, -3) if rank(node) == 3 else matrix.flatten(0, -2)

    with graph.inserting_before(node):
        return write_out(graph, below, (found.gathered,), node)[0]


def _by_choice(graph: Graph, node: Node, found: _Summed) -> Node:
    """[T, K, B], before they are added up. Sizes are those of what was gathered, whoever else reads it."""

    def multiply(gathered: Tensor, rows: Tensor) -> Tensor:
        factor = gathered.mT if found.is_turned else gathered
        return (rows.reshape(factor.shape[:-1]).unsqueeze(-2) @ factor).squeeze(-2).flatten(0, -3)

    with graph.inserting_before(node):
        return write_out(graph, multiply, (found.gathered, found.rows), node)[0]


def _summed(product: Node) -> _Summed | None:
    if product.target not in (aten.bmm.default, aten.mm.default) or product.kwargs:
        return None
    left, right = args(product)
    gathered, rows = unseen(right), unseen(left)
    if not is_one(size(left, -2)) or not _are_of_choices(gathered):
        return None
    *leading, x, y = gathered.meta["val"].shape
    for is_turned, (summed, columns) in ((False, (x, y)), (True, (y, x))):
        is_whole = same_shape(right.meta["val"].shape[-2:], (leading[-1] * summed, columns))
        if is_whole and same_shape([rows.meta["val"].numel()], [math.prod(leading) * summed]):
            ways = (_Summed(rows, gathered, is_turned, is_by_choice) for is_by_choice in (True, False))
            found = next((each for each in ways if _is_in_order(each, left, right)), None)
            if found is not None:
                return found
    return None


def _are_of_choices(gathered: Node) -> bool:
    """Whether these are `weight[ids]` [..., K, X, Y] of several choices of each token."""
    source = indexed(gathered)
    if source is None or rank(source[0]) != 3 or rank(source[1]) < 2 or not is_integral(source[1]):
        return False
    return not is_one(size(source[1], -1))


def _is_in_order(found: _Summed, left: Node, right: Node) -> bool:
    """Whether both factors have what is summed, choices and columns of these, in this order."""
    *leading, x, y = (concrete(each) or 0 for each in found.gathered.meta["val"].shape)
    tokens, number, summed = math.prod(leading[:-1]), leading[-1], y if found.is_turned else x
    place, last = (3, 2) if found.is_turned else (2, 3)
    of_rows, of_weights = ((0, 1, 2), (1, place)) if found.is_by_choice else ((0, 2, 1), (place, 1))
    return is_copy(found.rows, left, (tokens, number, summed), of_rows) and is_copy(
        found.gathered, right, (tokens, number, x, y), (0, *of_weights, last)
    )
