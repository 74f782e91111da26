"""MXFP4 weights: numbers of 4 bits (`e2m1`) whose blocks are scaled by powers of two.

    power = 2 ** (exponent - 127),                                    NaN for an exponent of 255

Exponents are e8m0 of the OCP Microscaling Formats specification 1.0, where 32 columns of a row share one: so gpt-oss
is published. Here blocks may have any number of rows, and of columns any multiple of 32.
"""

import torch
from torch import Tensor

from moe_ops.e2m1 import POWERS

ONE = 127
"""The exponent of 1."""

_NAN = 255  # exponent


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
    return found.masked_fill(~largest.isfinite(), _NAN).to(POWERS)
