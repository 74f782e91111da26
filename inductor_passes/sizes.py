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


def is_open(size: int | torch.SymInt) -> bool:
    """Whether a size may be another number when the code runs."""
    return bool(free_symbols(size))


def size_given(size: int | torch.SymInt, other: int | torch.SymInt, number: int) -> int | None:
    """What a size is where `other` is this number, its first symbol having grown; None where that does not say it."""
    if not free_symbols(size) <= free_symbols(other):
        return None
    if isinstance(size, int) or isinstance(other, int) or number == size_hint(other):
        return size_hint(size)
    symbols, hint = sorted(free_symbols(other), key=str), size_hint(other)
    known = {symbol: int(other.node.shape_env.backed_var_to_val[symbol]) for symbol in symbols}
    known[symbols[0]] = known[symbols[0]] * number // (hint or 1)
    given = [int(each.node.expr.subs(known)) for each in (size, other)]
    return given[0] if given[1] == number else None
