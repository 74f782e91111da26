"""Products with copies of quantised weights in the dtype of rows, of one slab (`slabs`) after the other."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops import _library
from moe_ops.scaled_arguments import dequantising
from moe_ops.slabs import features_at_once
from moe_ops.values import GroupedLinear, PairedLinear, ScaledLinear
from moe_ops.weight_formats import of_rows


def copied(linear: ScaledLinear, dtype: torch.dtype) -> GroupedLinear:
    """A copy of the weight, and the bias, in `dtype`."""
    bias = None if linear.bias is None else linear.bias.to(dtype)
    return GroupedLinear(_library.call(dequantising(linear, dtype)), bias)


def by_slabs(
    linear: ScaledLinear, dtype: torch.dtype, halves: int, multiply: Callable[[PairedLinear, slice], Tensor]
) -> Tensor:
    """What `multiply` makes of each slab, and of where it lies in a half, side by side. One copy is there at a time."""
    half = linear.weight.shape[1] // halves
    step = features_at_once(linear, dtype, halves) or half
    if step == half:
        return multiply(PairedLinear(*copied(linear, dtype)), slice(half))
    parts = [slice(first, min(first + step, half)) for first in range(0, half, step)]
    return torch.cat([multiply(_copied_slab(linear, dtype, halves, part), part) for part in parts], 1)


def _copied_slab(linear: ScaledLinear, dtype: torch.dtype, halves: int, part: slice) -> PairedLinear:
    half = linear.weight.shape[1] // halves
    starts = range(part.start, halves * half, half)
    gate, *up = (copied(_cut(linear, first, first + part.stop - part.start), dtype) for first in starts)
    return PairedLinear(*gate, *(up[0] if up else ()))


def _cut(linear: ScaledLinear, first: int, last: int) -> ScaledLinear:
    weight, scale, bias, rows, columns, zero, global_scale = linear
    blocks = slice(first // rows, -(-last // rows))
    bias = None if bias is None else bias[:, first:last]
    zero = None if zero is None else zero[:, blocks]
    if global_scale is not None:
        global_scale = of_rows(global_scale, weight.shape[1])[:, first:last]
    return ScaledLinear(weight[:, first:last], scale[:, blocks], bias, rows, columns, zero, global_scale)
