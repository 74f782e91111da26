"""Integers of 4 bits, two in a byte (`pairs`), whose blocks have a scale of a floating dtype and may have a zero point.

    number = (code - zero) * scale,    code and zero from 0 to 15

Symmetric weights have no zero points, they are all 8: so compressed-tensors packs them ("pack-quantized"). AWQ, GPTQ
and asymmetric weights of compressed-tensors have one for each block, a code, which is not packed here: torch.uint8, as
many as scales. Blocks are groups of a row's columns, 32 or a multiple, or whole rows.
"""

import torch
from torch import Tensor

from moe_ops.pairs import PAIRS, codes_of, paired

INTEGERS = torch.uint4  # type: ignore[attr-defined]  # torch has no stub of it
"""What names the format where weights are made; no tensor has it, for torch computes nothing in it."""

ZERO = 8
"""The code of 0 where there are no zero points."""

_LARGEST = 7.5  # magnitude of a block, in steps: -7.5 becomes -8, and 7.5 becomes 7
_LAST = 15  # code


def numbers(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., A / 2] bytes as [..., A] numbers from -8 to 7."""
    return (codes_of(pairs) - ZERO).to(dtype)


def shifts(zero: Tensor, dtype: torch.dtype) -> Tensor:
    """What zero points add to `numbers`, from -7 to 8."""
    return (ZERO - zero.int()).to(dtype)


def scales_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Of blocks with such largest magnitudes, in `dtype`; 1 where there would be zeros."""
    found = (largest / _LARGEST).to(dtype)
    return torch.where(found == 0, 1, found)


def asymmetric(least: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales in `dtype` and zero points of blocks from `least` to `largest`, between which 0 is taken to be.

    Both ends are within half a step of a code, but for what rounding the scale costs. It is 1 where it would be 0.
    """
    least, largest = least.clamp(max=0), largest.clamp(min=0)
    scale = ((largest - least) / _LAST).to(dtype)
    scale = torch.where(scale == 0, 1, scale)
    zero = (-least / scale.to(least.dtype)).round().clamp(0, _LAST)
    return scale, zero.masked_fill(zero.isnan(), ZERO).to(PAIRS)


def rounded(values: Tensor, shift: Tensor | float = 0) -> Tensor:
    """[..., A] values, already divided by their scales, as bytes: the nearest numbers, of two the even.

    shift: `shifts` of their zero points.
    """
    return paired((values.round() - shift).clamp(-ZERO, ZERO - 1) + ZERO)
