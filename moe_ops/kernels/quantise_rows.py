"""quantise_rows: the largest magnitude of each block of a row's columns, and the block over it.

Between the products of a layer in 8 bits rows are those of a gate, which then costs no launch and no memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from moe_ops.kernels.activation import NO_GATE, gate_up_columns
from moe_ops.kernels.common import INTERPRETED, apply_activation, cdiv, next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref, TensorMeta
from moe_ops.kernels.tiles import expert_args, has_expert
from moe_ops.types import LEAST_LARGEST, largest_of

_MOST = 8192  # columns at a time
_LEAST = 1024  # elements of a program


@triton.jit
def _places(blocks, inside_block, columns, depth):
    """Columns [BLOCKS, COLUMNS] of a row, and whether a block has them.

    Torch takes what comes out of a helper for an address in whatever went into it: so no pointer does here.
    """
    places = offset(blocks[:, None], columns) + inside_block[None, :]
    return places, (inside_block[None, :] < columns) & (places < depth)


@triton.jit
def _values(
    row_ptr, places, inside, depth, x_stride_k,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCKS, COLUMNS], zeros where a block has no column; what a gate makes is rounded to its dtype first."""
    if NAME is None:
        value = tl.load(row_ptr + offset(places, x_stride_k), mask=inside, other=0.0)
    else:
        gate_columns, up_columns = gate_up_columns(places, depth, GATED, INTERLEAVED)
        gate = tl.load(row_ptr + offset(gate_columns, x_stride_k), mask=inside, other=0.0)
        up = tl.load(row_ptr + offset(up_columns, x_stride_k), mask=inside, other=0.0)
        value = apply_activation(
            gate.to(tl.float32), up.to(tl.float32), NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT
        ).to(gate.dtype)
    return value.to(tl.float32)


@triton.jit
def _rounded(value, TO_INTEGER: tl.constexpr):
    """To the nearest integer, to even between two. The interpreter has no `rint`, but numbers that do it."""
    if TO_INTEGER:
        if INTERPRETED:
            value = (value + 12582912.0) - 12582912.0
        else:
            value = libdevice.rint(value)
    return value


@triton.jit
def with_largest(largest, value):
    """The largest magnitudes so far, NaN where there was one: a maximum drops it."""
    found = tl.max(tl.abs(value), 1)
    is_nan = tl.max((value != value).to(tl.int32), 1) != 0
    return tl.where(is_nan | (largest != largest), float("nan"), tl.maximum(largest, found))


@triton.jit
def _quotient(dividend, divisor, is_zero):
    """As a CPU divides; 1 where the result would be that of a block of zeros."""
    return tl.where(is_zero, 1.0, tl.div_rn(dividend, tl.where(is_zero, 1.0, divisor)))


@triton.jit
def quantised(value, factor, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    """Blocks [N, COLUMNS] in DTYPE, each times its factor [N]. In float8 a NaN stays one, but interpreted."""
    multiplied = _rounded(value * factor[:, None], tl.int8 == DTYPE)
    at_least = tl.maximum(multiplied, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(at_least, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@triton.jit
def factor_of(largest, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """One over the scale of each block [N]."""
    return _quotient(tl.full(largest.shape, LARGEST, tl.float32), largest, largest < LEAST)


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """What each block [N] is divided by."""
    return _quotient(largest, tl.full(largest.shape, LARGEST, tl.float32), largest < LEAST)


@triton.jit
def given_scale(scale_ptr, count, stride, LEAST: tl.constexpr, COUNT: tl.constexpr):
    """The largest of `count` scales [1], and one over it."""
    places = tl.arange(0, COUNT)
    scales = tl.load(scale_ptr + offset(places, stride), mask=places < count, other=0.0).to(tl.float32)
    scale = with_largest(tl.zeros((1,), tl.float32), scales[None, :])
    scale = tl.where(scale < LEAST, 1.0, scale)
    return scale, tl.div_rn(tl.full((1,), 1.0, tl.float32), scale)


@triton.jit
def _store(rows_ptr, value, places, inside, factor, LARGEST: tl.constexpr):
    rows = quantised(value, factor, rows_ptr.dtype.element_ty, LARGEST)
    tl.store(rows_ptr + offset(places, 1), rows, mask=inside)


@triton.jit
def quantise_rows_kernel(
    x_ptr, input_scale_ptr, offsets_ptr, rows_ptr, scale_ptr,
    num_experts, columns, depth, num_blocks, num_scales, x_stride_t, x_stride_k, input_scale_stride,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, ONCE: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of a row; grid (T * programs of a row). ONCE: COLUMNS are all of a block.

    What has a scale before is read once, and then it is known whether a block has a NaN.
    """
    programs = tl.cdiv(num_blocks, BLOCKS)
    row = tl.program_id(0) // programs
    if has_expert(row, offsets_ptr, num_experts):
        blocks = (tl.program_id(0) % programs) * BLOCKS + tl.arange(0, BLOCKS)
        x_row_ptr, row_ptr = x_ptr + offset(row, x_stride_t), rows_ptr + offset(row, depth)
        scale_ptrs, known = scale_ptr + offset(row, num_blocks) + blocks, blocks < num_blocks
        inner = tl.arange(0, COLUMNS)
        largest = tl.zeros((BLOCKS,), tl.float32)
        if input_scale_ptr is not None:
            given, factor = given_scale(input_scale_ptr, num_scales, input_scale_stride, LEAST, SCALES)
            for start in range(0, columns, COLUMNS):
                places, inside = _places(blocks, start + inner, columns, depth)
                value = _values(
                    x_row_ptr, places, inside, depth, x_stride_k,
                    NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT,
                )  # fmt: skip
                largest = with_largest(largest, value)
                _store(row_ptr, value, places, inside, factor, LARGEST)
            scale = tl.where(largest != largest, float("nan"), given)
        elif ONCE:
            places, inside = _places(blocks, inner, columns, depth)
            value = _values(
                x_row_ptr, places, inside, depth, x_stride_k,
                NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT,
            )  # fmt: skip
            largest = with_largest(largest, value)
            _store(row_ptr, value, places, inside, factor_of(largest, LARGEST, LEAST), LARGEST)
            scale = scale_of(largest, LARGEST, LEAST)
        else:
            for start in range(0, columns, COLUMNS):
                places, inside = _places(blocks, start + inner, columns, depth)
                value = _values(
                    x_row_ptr, places, inside, depth, x_stride_k,
                    NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT,
                )  # fmt: skip
                largest = with_largest(largest, value)
            factor = factor_of(largest, LARGEST, LEAST)
            for start in range(0, columns, COLUMNS):
                places, inside = _places(blocks, start + inner, columns, depth)
                value = _values(
                    x_row_ptr, places, inside, depth, x_stride_k,
                    NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT,
                )  # fmt: skip
                _store(row_ptr, value, places, inside, factor, LARGEST)
            scale = scale_of(largest, LARGEST, LEAST)
        tl.store(scale_ptrs, scale, mask=known)


def quantise_rows_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.quantise_rows`."""
    return rows_program(args, args.x.shape[1], NO_GATE)


def rows_program(args: Any, depth: int, gate: dict[str, Any], num_experts: int | None = None) -> Program:
    """That of rows [T, depth] which `gate`, of `activation_args`, makes of `x`.

    With `num_experts` rows past the last of so many are left out, as `expert_offsets` says.
    """
    num_tokens, columns = args.x.shape[0], min(args.columns, depth)
    num_blocks = cdiv(depth, columns)
    width = min(next_power_of_2(columns), _MOST)
    blocks = min(max(_LEAST // width, 1), next_power_of_2(num_blocks))
    rows = Buffer("rows", (num_tokens, depth), args.dtype)
    scale = Buffer("row_scale", (num_tokens, num_blocks), torch.float32)
    given = {
        "x_ptr": Ref("x"),
        **input_scale_args(args.input_scale, "input_scale"),
        **expert_args(num_experts),
        "rows_ptr": Ref(rows.name),
        "scale_ptr": Ref(scale.name),
        "columns": columns,
        "depth": depth,
        "num_blocks": num_blocks,
        "x_stride_t": args.x.strides[0],
        "x_stride_k": args.x.strides[1],
        **gate,
        "LARGEST": largest_of(args.dtype),
        "LEAST": LEAST_LARGEST,
        "ONCE": columns <= width,
        "BLOCKS": blocks,
        "COLUMNS": width,
    }
    warps = min(max(width * blocks // _LEAST, 1), 8)
    launch = Launch(quantise_rows_kernel, (num_tokens * cdiv(num_blocks, blocks),), given, warps, 1)
    return Program((rows, scale), (launch,), (rows.name, scale.name))


def input_scale_args(scale: TensorMeta | None, name: str) -> dict[str, Any]:
    """Arguments of kernels that take scales of rows which are known before, called `name`, or take none."""
    count = 1 if scale is None else scale.shape[0]
    return {
        "input_scale_ptr": None if scale is None else Ref(name),
        "num_scales": count,
        "input_scale_stride": 0 if scale is None else scale.strides[0],
        "SCALES": next_power_of_2(count),
    }
