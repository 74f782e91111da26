"""dequantise_weight: blocks of weights, each number times its scale, rounded once to the dtype that is wanted."""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import INTERPRETED, cdiv, next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.pairs_numbers import MISSING, factors, shifts, spread_scale, unpacked
from moe_ops.kernels.program import Buffer, Launch, Program, Ref
from moe_ops.kernels.scaled import converts
from moe_ops.kernels.scaled_args import global_args, stride_args, zero_args
from moe_ops.pairs import GROUP

_ROWS, _COLUMNS = 16, 256  # of a program; by measurement on an H200, 3.9 TB/s


@triton.jit
def dequantise_weight_kernel(
    weight_ptr, scale_ptr, zero_ptr, global_ptr, out_ptr, features, depth, block_rows, block_columns, global_rows,
    weight_stride_e, weight_stride_n, weight_stride_k, scale_stride_e, scale_stride_n, scale_stride_k,
    zero_stride_e, zero_stride_n, zero_stride_k, global_stride_e, global_stride_n,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows by BLOCK_K columns of an expert's, of which BLOCK_K / GROUPS share a scale."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    NUMBERS: tl.constexpr = 2 if weight_ptr.dtype.element_ty == tl.uint8 else 1
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    IS_E2M1: tl.constexpr = tl.uint8 == SCALE or tl.float8e4nv == SCALE
    STORED: tl.constexpr = BLOCK_K // NUMBERS
    depth_blocks, feature_blocks = tl.cdiv(depth, BLOCK_K), tl.cdiv(features, BLOCK_N)
    depth_block, rest = tl.program_id(0) % depth_blocks, tl.program_id(0) // depth_blocks
    expert = rest // feature_blocks
    rows = (rest % feature_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = depth_block * BLOCK_K + tl.arange(0, BLOCK_K)
    stored_columns = depth_block * STORED + tl.arange(0, STORED)
    groups = depth_block * BLOCK_K + tl.arange(0, GROUPS) * (BLOCK_K // GROUPS)
    known = (rows < features)[:, None]
    weight_ptrs = weight_ptr + offset(expert, weight_stride_e) + offset(rows, weight_stride_n)[:, None]
    weight_ptrs += offset(stored_columns, weight_stride_k)[None, :]
    stored = tl.load(weight_ptrs, mask=known & (stored_columns < depth // NUMBERS)[None, :])
    scale_ptrs = scale_ptr + offset(expert, scale_stride_e)
    scale_ptrs += offset(rows // block_rows, scale_stride_n)[:, None]
    scale_ptrs += offset(groups // block_columns, scale_stride_k)[None, :]
    scale = tl.load(scale_ptrs, mask=known & (groups < depth)[None, :], other=0.0)
    zero = None
    if zero_ptr is not None:
        zero_ptrs = zero_ptr + offset(expert, zero_stride_e)
        zero_ptrs += offset(rows // block_rows, zero_stride_n)[:, None]
        zero_ptrs += offset(groups // block_columns, zero_stride_k)[None, :]
        zero = tl.load(zero_ptrs, mask=known & (groups < depth)[None, :], other=0)
    if NUMBERS == 1:
        numbers = stored.to(tl.float32) * spread_scale(scale.to(tl.float32), BLOCK_K)
    else:
        IN_FLOAT32: tl.constexpr = INTERPRETED or (IS_E2M1 and tl.float16 == DTYPE)
        WIDE: tl.constexpr = tl.float32 if IN_FLOAT32 else DTYPE
        shift = None if zero is None else shifts(zero, WIDE)
        numbers = unpacked(stored, factors(scale, WIDE), shift, WIDE, IS_E2M1)
        if IS_E2M1:
            numbers = numbers.to(tl.float32) * MISSING
        if global_ptr is not None:
            global_ptrs = global_ptr + offset(expert, global_stride_e)
            global_ptrs += offset(rows // global_rows, global_stride_n)
            numbers *= tl.load(global_ptrs, mask=rows < features, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + offset(expert.to(tl.int64) * features + rows, depth)[:, None] + columns[None, :]
    tl.store(out_ptrs, numbers.to(DTYPE), mask=known & (columns < depth)[None, :])


def takes(args: Any, gpu: Gpu) -> bool:
    """Whether the kernel is for such arguments: it computes in float32 at the most."""
    return args.dtype != torch.float64 and converts(args.linear, gpu)


def dequantise_weight_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.dequantise_weight`."""
    (num_experts, features, _), depth = args.weight.shape, args.linear.depth
    block_k = min(_COLUMNS, max(next_power_of_2(depth), GROUP))
    block_columns = min(args.block_columns, depth)
    copy = Buffer("dequantised", (num_experts, features, depth), args.dtype)
    given = {
        "weight_ptr": Ref("weight"),
        "scale_ptr": Ref("scale"),
        **zero_args("zero", args.zero),
        **global_args("global_scale", args.linear),
        "out_ptr": Ref(copy.name),
        "features": features,
        "depth": depth,
        "block_rows": args.block_rows,
        "block_columns": block_columns,
        **stride_args("weight_stride", args.weight.strides, "enk"),
        **stride_args("scale_stride", args.scale.strides, "enk"),
        "GROUPS": 1 if block_columns == depth else block_k // _shared_columns(block_columns, block_k),
        "BLOCK_N": _ROWS,
        "BLOCK_K": block_k,
    }
    grid = (num_experts * cdiv(features, _ROWS) * cdiv(depth, block_k),)
    return Program((copy,), (Launch(dequantise_weight_kernel, grid, given, 4, 1),), (copy.name,))


def _shared_columns(block_columns: int, most: int) -> int:
    """How many columns next to each other share a scale wherever a program begins."""
    while block_columns % most:
        most //= 2
    return most
