"""MXFP4 weights: numbers of 4 bits, two in a byte (`pairs`), whose blocks are scaled by powers of two.

    number = sign * {0, 0.5, 1, 1.5, 2, 3, 4, 6}[last three bits]
    power  = 2 ** (exponent - 127),                                   NaN for an exponent of 255

Numbers are e2m1 and exponents e8m0 of the OCP Microscaling Formats specification 1.0, where 32 columns of a row share
one: so gpt-oss is published. Here blocks may have any number of rows, and of columns any multiple of 32.
"""

import torch
from torch import Tensor

from moe_ops.pairs import PAIRS, codes_of, paired

ONE = 127
"""The exponent of 1."""

_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # magnitudes
_NAN = 255  # exponent


def numbers(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., A / 2] bytes as [..., A] numbers. By arithmetic: a table would come from the host, in no CUDA graph."""
    codes = codes_of(pairs)
    exponent, half = (codes >> 1) & 3, codes & 1
    quarters = torch.where(exponent > 0, (2 + half) << exponent, 2 * half)
    return torch.where(codes > 7, -quarters, quarters).to(dtype) / 4


def powers(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """What exponents stand for, in float32 or float64: they are those of a float32, but the least, 2 ** -127."""
    bits = exponents.int()
    found = torch.where(bits > 0, bits << 23, 1 << 22).view(torch.float32)
    return found.masked_fill(exponents == _NAN, float("nan")).to(dtype)


def exponents_of(largest: Tensor) -> Tensor:
    """Of blocks with such largest magnitudes: 6 times the power is just not exceeded, or by less than a third.

    The specification's rule (section 6.3): the largest's exponent less that of the largest number, 4.
    """
    fraction, exponent = torch.frexp(largest)
    found = (exponent - 3 + ONE).clamp(0, _NAN - 1).masked_fill(fraction == 0, ONE)
    return found.masked_fill(~largest.isfinite(), _NAN).to(PAIRS)


def rounded(values: Tensor) -> Tensor:
    """[..., A] values, already divided by their powers, as bytes: the nearest numbers, of two the even."""
    between = torch.tensor(_BETWEEN, dtype=values.dtype, device=values.device)
    magnitudes = values.abs().contiguous()  # torch warns of others
    below, above = (torch.bucketize(magnitudes, between, right=upper) for upper in (False, True))
    codes = torch.where(below % 2 == 0, below, above) + 8 * values.signbit()
    return paired(codes)
