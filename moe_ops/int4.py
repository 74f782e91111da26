"""Integers of 4 bits, two in a byte (`pairs`), whose blocks have a scale of a floating dtype.

    number = (code - 8) * scale,    code from 0 to 15

So compressed-tensors packs symmetric weights ("pack-quantized"), and so GPTQ means them where all its zeros are 8: in
groups of a row's columns, 32 or a multiple, or in whole rows. There are no zero points here.
"""

import torch
from torch import Tensor

from moe_ops.pairs import codes_of, paired

INTEGERS = torch.uint4  # type: ignore[attr-defined]  # torch has no stub of it
"""What names the format where weights are made; no tensor has it, for torch computes nothing in it."""

_ZERO = 8  # code
_LARGEST = 7.5  # magnitude of a block, in steps: -7.5 becomes -8, and 7.5 becomes 7


def numbers(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., A / 2] bytes as [..., A] numbers from -8 to 7."""
    return (codes_of(pairs) - _ZERO).to(dtype)


def scales_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Of blocks with such largest magnitudes, in `dtype`; 1 where there would be zeros."""
    found = (largest / _LARGEST).to(dtype)
    return torch.where(found == 0, 1, found)


def rounded(values: Tensor) -> Tensor:
    """[..., A] values, already divided by their scales, as bytes: the nearest numbers, of two the even."""
    return paired(values.round().clamp(-_ZERO, _ZERO - 1) + _ZERO)
