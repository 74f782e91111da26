"""Numbers of e2m1, two in a byte (`pairs`): those of MXFP4 and NVFP4.

    number = sign * {0, 0.5, 1, 1.5, 2, 3, 4, 6}[last three bits]

As in the OCP Microscaling Formats specification 1.0. What scales them has one of `SCALES`, which says of which format
they are.
"""

import torch
from torch import Tensor

from moe_ops.pairs import PAIRS, codes_of, paired

LARGEST = 6

POWERS = PAIRS
"""The dtype of exponents, of `mxfp4`."""

FLOAT8 = torch.float8_e4m3fn
"""That of `nvfp4`."""

SCALES = (POWERS, FLOAT8)

_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # magnitudes


def numbers(pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., A / 2] bytes as [..., A] numbers. By arithmetic: a table would come from the host, in no CUDA graph."""
    codes = codes_of(pairs)
    exponent, half = (codes >> 1) & 3, codes & 1
    quarters = torch.where(exponent > 0, (2 + half) << exponent, 2 * half)
    return torch.where(codes > 7, -quarters, quarters).to(dtype) / 4


def rounded(values: Tensor) -> Tensor:
    """[..., A] values, already divided by their scales, as bytes: the nearest numbers, of two the even."""
    between = torch.tensor(_BETWEEN, dtype=values.dtype, device=values.device)
    magnitudes = values.abs().contiguous()  # torch warns of others
    below, above = (torch.bucketize(magnitudes, between, right=upper) for upper in (False, True))
    codes = torch.where(below % 2 == 0, below, above) + 8 * values.signbit()
    return paired(codes)
