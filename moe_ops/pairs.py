"""Numbers of 4 bits, two in a byte, that of the even column in the lower half: what formats of them share.

The dtype of scales says which format it is: exponents, stored as `PAIRS` too, are of `mxfp4`, float8_e4m3fn of `nvfp4`,
and wider floating ones of `int4`.
"""

import torch
from torch import Tensor

from moe_ops.errors import value_error

PAIRS = torch.uint8
"""The dtype of two numbers."""

GROUP = 32
"""Columns that share a scale at least."""

_SHORT_GROUP = 16  # of NVFP4


def numbers_in(stored: torch.dtype) -> int:
    """How many numbers an element of a stored weight holds."""
    return 2 if stored == PAIRS else 1


def codes_of(pairs: Tensor) -> Tensor:
    """[..., A / 2] bytes as [..., A] of 4 bits, int32."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).int()


def paired(codes: Tensor) -> Tensor:
    """The opposite, of whole numbers from 0 to 15 in any dtype."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(PAIRS)


def group_of(scale: torch.dtype) -> int:
    """Columns that share a scale at least where it has this dtype."""
    return _SHORT_GROUP if scale == torch.float8_e4m3fn else GROUP


def expect_columns(name: str, columns: int, depth: int, scale: torch.dtype) -> None:
    """Raises ValueError for blocks of columns, of `depth`, that a group at a time does not go through."""
    group = group_of(scale)
    if columns % group and columns < depth:
        value_error("{}={} with weights of 4 bits: expected a multiple of {}", name, columns, group)
