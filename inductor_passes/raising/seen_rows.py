"""Which rows of one tensor are those of another that shows it, past copies and casts: tried on numbers.

Strides tell it too, but only up to the next copy, and tokens [B, S, H] are copied on their way to experts.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes._compat import statically_known_true
from inductor_passes.raising.evaluation import cut, evaluate, is_size
from inductor_passes.raising.views_of_rows import is_cast, is_shown
from inductor_passes.sizes import size_given, size_hint

_MOST_NUMBERS = 1 << 27


class Sizes(NamedTuple):
    """What the sizes of a graph are with so many tokens."""

    num_tokens: int | torch.SymInt
    """T, as the graph has it."""
    number: int

    def given(self, size: int | torch.SymInt) -> int:
        """One size. Raises ValueError where it does not follow from T."""
        traced = size_hint(size)
        if traced is not None and statically_known_true(size == traced):
            return traced  # guarded, as `F.one_hot` does its number of classes
        found = size_given(size, self.num_tokens, self.number)
        if found is None:
            raise ValueError(f"{size} does not follow from the number of tokens")
        return found

    def shape(self, node: Node) -> list[int]:
        """The shape of a tensor. Raises ValueError as well."""
        return [self.given(each) for each in node.meta["val"].shape]


def shows_rows(node: Node) -> bool:
    """Whether `node` shows a tensor in another shape or order, copied or rounded perhaps."""
    return is_shown(node) or is_cast(node)


def seen_rows(source: Node, shown: Node, sizes: Sizes, columns: tuple[int, int] = (-1, -1)) -> Tensor | None:
    """Of which row of `source` each row of `shown` is: these have the shape of `shown` without its columns.

    None where they are rows of something else, or in parts. `columns` are the dimensions in which rows lie in both.
    """
    views = cut([shown], lambda node: node is source or not shows_rows(node))
    others = [leaf for leaf in views.leaves if leaf is not source]
    try:
        shape = sizes.shape(source)
        if not all(map(is_size, others)) or math.prod(shape) > _MOST_NUMBERS:
            return None
        known: dict[Node, Any] = {leaf: sizes.given(leaf.meta["val"]) for leaf in others}
        known[source] = _laid_out(_numbered(shape, columns[0]), source)
        found = evaluate(views.nodes, known)[shown].movedim(columns[1], -1)
    except (RuntimeError, ValueError, TypeError):
        return None
    return _rows_of(found, shape[columns[0]])


def _numbered(shape: Sequence[int], dim: int) -> Tensor:
    """1, 2, 3, … along the columns of each row, and on in the next row."""
    *leading, columns = torch.empty(shape, device="meta").movedim(dim, -1).shape
    numbers = torch.arange(math.prod(shape), dtype=torch.int32)
    return numbers.view(*leading, columns).movedim(-1, dim)


def _laid_out(numbers: Tensor, like: Node) -> Tensor:
    """The same in memory as a tensor of the graph lies there: of others there may be no such views."""
    strides = [size_hint(each) or 0 for each in like.meta["val"].stride()]
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    lying = numbers.permute(order).contiguous()
    return lying.permute([order.index(dim) for dim in range(len(order))])


def _rows_of(found: Tensor, columns: int) -> Tensor | None:
    rows = found[..., 0].div(columns, rounding_mode="floor")
    wanted = rows.unsqueeze(-1) * columns + torch.arange(columns, dtype=found.dtype)
    return rows.long() if torch.equal(found, wanted) else None
