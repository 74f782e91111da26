"""What quantised weights stand for, and how weights become such: 8 bits, `mxfp4`, `nvfp4` and `int4`."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from moe_ops import _checks, e2m1, int4, mxfp4, nvfp4
from moe_ops.pairs import PAIRS
from moe_ops.quantise_rows import DTYPES, maxima, quantised, spread
from moe_ops.types import ScaledWeight
from moe_ops.values import ScaledLinear

IN_4_BITS = (PAIRS, int4.INTEGERS, nvfp4.NUMBERS)
"""What names formats of 4 bits where weights are made: MXFP4, integers, NVFP4."""


def dequantised(linear: ScaledLinear, dtype: torch.dtype) -> Tensor:
    """[E, B, A] in `dtype`: what the weight stands for."""
    weight, scale, _, rows, columns, zero, global_scale = linear
    computed = _checks.compute_dtype(dtype)
    if weight.dtype == PAIRS:
        weight = (e2m1 if scale.dtype in e2m1.SCALES else int4).numbers(weight, computed)
    if zero is not None:
        weight = weight + spread(int4.shifts(zero, computed), weight.shape, rows, columns)
    scaled = weight.to(computed) * spread(_factors(scale, computed), weight.shape, rows, columns)
    if global_scale is not None:
        scaled = scaled * of_rows(global_scale, weight.shape[-2]).to(computed)[..., None]
    return scaled.to(dtype)


def of_rows(global_scale: Tensor, rows: int) -> Tensor:
    """[..., P] global scales as [..., rows]."""
    return global_scale.repeat_interleave(rows // global_scale.shape[-1], -1)


def expert_of(linear: ScaledLinear, expert: int) -> ScaledLinear:
    """The same of one expert, without its dimension; the bias stays as it is."""
    of_expert = ("weight", "scale", "zero", "global_scale")
    parts = ((name, getattr(linear, name)) for name in of_expert)
    return linear._replace(**{name: part[expert] for name, part in parts if part is not None})


def _factors(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What scales stand for."""
    return mxfp4.powers(scale, dtype) if scale.dtype == PAIRS else scale.to(dtype)


def quantised_weight(
    weight: Tensor, block: tuple[int, int], dtype: torch.dtype, zero_points: bool = False
) -> ScaledWeight:
    """A weight [E, B, A] in 8 bits; a scale maps the largest magnitude of its block to the largest of `dtype`.

    Of `PAIRS`, MXFP4, a scale is the power of two that comes next to that; of `nvfp4.NUMBERS` each expert has a global
    one as well. Of `INTEGERS`, in 4 bits too, it has the weight's dtype, and with `zero_points` maps what lies between
    the least and the largest. One expert at a time is in float32.
    """
    if dtype == nvfp4.NUMBERS:
        stored, scale, global_scale = _stacked(_in_nvfp4(each, *block) for each in weight)
        return ScaledWeight(stored, scale, block, global_scale=global_scale)
    make = _asymmetric if zero_points else quantised if dtype in DTYPES else _in_pairs
    stored, scale, *zero = _stacked(make(each, *block, dtype) for each in weight)
    return ScaledWeight(stored, scale, block, *zero)


def _stacked(made: Iterable[tuple[Tensor, ...]]) -> Iterator[Tensor]:
    """Of what each expert has: that of all."""
    return map(torch.stack, zip(*made, strict=True))


def _asymmetric(matrix: Tensor, rows: int, columns: int, _: torch.dtype) -> tuple[Tensor, ...]:
    values, places = matrix.float(), (matrix.shape, rows, columns)
    least, largest = -maxima(-values, rows, columns), maxima(values, rows, columns)
    scale, zero = int4.asymmetric(least, largest, matrix.dtype)
    shift = spread(int4.shifts(zero, torch.float32), *places)
    return int4.rounded(values / spread(scale.float(), *places), shift), scale, zero


def _in_nvfp4(matrix: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    values = matrix.float()
    largest = maxima(values.abs(), rows, columns)
    global_scale = nvfp4.global_scale_of(largest)
    scale = nvfp4.scales_of(largest, global_scale)
    divided = values / global_scale / spread(scale.float(), matrix.shape, rows, columns)
    return e2m1.rounded(divided), scale, global_scale


def _in_pairs(matrix: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values, is_mxfp4 = matrix.float(), dtype == PAIRS
    largest = maxima(values.abs(), rows, columns)
    scale = mxfp4.exponents_of(largest) if is_mxfp4 else int4.scales_of(largest, matrix.dtype)
    divided = values / spread(_factors(scale, torch.float32), matrix.shape, rows, columns)
    return (e2m1 if is_mxfp4 else int4).rounded(divided), scale
