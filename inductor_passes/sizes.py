"""Sizes, which are numbers or symbols: what is asked of them, and which guards that may add."""

from collections.abc import Sequence

import torch
from torch.fx.experimental.symbolic_shapes import free_symbols, statically_known_true


def same_size(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are equal.

    Two symbols that are equal now are guarded to stay equal: the sizes compared are those that an operator's own
    check requires to be equal. A symbol is never guarded to equal a number.
    """
    if statically_known_true(one == other):
        return True
    symbolic = [isinstance(size, torch.SymInt) and size.node.has_hint() for size in (one, other)]
    return all(symbolic) and not _is_constant(one) and not _is_constant(other) and bool(one == other)


def same_shape(one: Sequence[int | torch.SymInt], other: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes are equal, size by size as `same_size`."""
    return len(one) == len(other) and all(map(same_size, one, other))


def _is_constant(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) or size.node.maybe_as_int() is not None


def size_hint(size: int | torch.SymInt) -> int | None:
    """The number that a size had when it was traced; None for one that depends on data. Adds no guard."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None


def is_symbol(size: int | torch.SymInt) -> bool:
    """Whether a size is one symbol, which may be any number."""
    return isinstance(size, torch.SymInt) and size.node.expr.is_Symbol


def size_given(size: int | torch.SymInt, other: int | torch.SymInt, number: int) -> int | None:
    """What a size is where `other` is this number; None where it does not follow from that."""
    if not free_symbols(size) <= free_symbols(other):
        return None
    if isinstance(size, int) or isinstance(other, int) or not is_symbol(other):
        return size_hint(size)
    return int(size.node.expr.subs({other.node.expr: number}))
