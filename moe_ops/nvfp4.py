"""NVFP4 weights: numbers of 4 bits (`e2m1`) with a scale of 8 bits for a block, and one of 32 for each matrix.

    weight = number * scale * global_scale

Scales are float8_e4m3fn and 16 columns of a row share one: so ModelOpt publishes models (its `weight_scale_2` is the
global one), and compressed-tensors ("nvfp4-pack-quantized", whose `weight_global_scale` is one over it). Here blocks
may have any number of rows, and of columns any multiple of 16.
"""

import torch
from torch import Tensor

from moe_ops.e2m1 import FLOAT8, LARGEST

NUMBERS = torch.float4_e2m1fn_x2  # type: ignore[attr-defined]  # torch has no stub of it
"""What names the format where weights are made; they are stored as `pairs.PAIRS`, in which torch computes."""

_LEAST, _MOST = 2.0**-9, 448.0  # of a scale


def global_scale_of(largest: Tensor) -> Tensor:
    """[1], of a matrix whose blocks have such largest magnitudes: with it the largest scale is the largest there is.

    Blocks that are not finite do not count. 1 where there are only zeros.
    """
    found = largest.masked_fill(~largest.isfinite(), 0).amax().view(1) / (LARGEST * _MOST)
    return torch.where(found == 0, 1, found)


def scales_of(largest: Tensor, global_scale: Tensor) -> Tensor:
    """Of its blocks: the largest magnitude of each becomes the largest number. NaN of those that are not finite."""
    found = (largest / global_scale / LARGEST).clamp(_LEAST, _MOST)
    return found.masked_fill(~largest.isfinite(), float("nan")).to(FLOAT8)
