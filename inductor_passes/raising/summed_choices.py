"""Products that sum over the choices of a token as well, seen as one for each choice and a sum.

    torch.einsum("tki,tkih->th", hidden * weights.unsqueeze(-1), w2[ids])  # [T, 1, K * I] @ [T, K * I, H]

What is not raised is one product again.
"""

import math
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.raising.evaluation import concrete
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.shown_sums import ShownSum, shown_as_sums
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


def multiplied_by_choice(graph: Graph) -> AbstractContextManager[None]:
    """Every such product is a sum over products of each choice, until the end."""
    return shown_as_sums(graph, _by_choice)


def _by_choice(product: Node) -> ShownSum | None:
    found = _summed(product)
    if found is None:
        return None
    is_turned = found.is_turned

    def multiply(gathered: Tensor, rows: Tensor) -> Tensor:
        """[T, K, B]. Sizes are those of what was gathered, whoever else reads it."""
        factor = gathered.mT if is_turned else gathered
        return (rows.reshape(factor.shape[:-1]).unsqueeze(-2) @ factor).squeeze(-2).flatten(0, -3)

    return ShownSum(found.rows, found.gathered, multiply, 1)


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
