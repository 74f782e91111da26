"""Rows times weights that are both in 8 bits, for experts with many rows.

Rows are the left operand of the tensor cores here. With blocks of columns a thread has to multiply each step's product
by scales and add it up, while the tensor cores wait for it: of two rows it holds that is one multiply-add a number, and
three CTAs on a processor, of 64 rows by 128 features in four warps, fill each other's gaps. On an H200 these take 0.46
to 0.9 of the time of tiles whose left operand is the weight; with one block of columns 0.76 to 1.
"""

from typing import Any

import triton
import triton.language as tl

from moe_ops.kernels.common import INTERPRETED, dot, offset, sources_of_tile
from moe_ops.kernels.gemm_tables import LaunchConfig
from moe_ops.kernels.tiles import tile_at, zero_tail_beside

FEW_ROWS = LaunchConfig(64, 128, 128, 4, 3)
MANY_ROWS = LaunchConfig(128, 128, 128, 4, 3)
WIDE = LaunchConfig(128, 256, 128, 8, 4)
_DEEP = 4096


@triton.jit
def stored_dot(left, right, acc):
    """acc + left @ right; the interpreter multiplies no integers."""
    if INTERPRETED and acc.dtype == tl.int32:
        product = tl.dot(left.to(tl.float32), right.to(tl.float32), acc.to(tl.float32)).to(tl.int32)
    else:
        product = dot(left, right, acc)
    return product


@triton.jit(do_not_specialize=["top_k", "num_tokens"])
def scaled_rows_kernel(
    x_ptr, x_scale_ptr, slots_ptr, weight_desc, scale_ptr, bias_ptr, out_ptr, tiles_ptr,
    top_k, num_tokens, features, depth, block_rows, steps, steps_in_block,
    x_stride_m, x_stride_k, x_scale_stride_m, x_scale_stride_k,
    scale_stride_e, scale_stride_n, scale_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
    ONE_BLOCK: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows by BLOCK_N features a tile, which have one scale for each block of columns unless ONE_BLOCK."""
    PRODUCT: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    feature_blocks = tl.cdiv(features, BLOCK_N)
    tile, num_tiles = tl.program_id(0), tl.load(tiles_ptr) * feature_blocks
    if tile < num_tiles:
        expert, row, end, feature_block = tile_at(tiles_ptr, tile, feature_blocks, BLOCK_M)
        rows = row + tl.arange(0, BLOCK_M)
        source, present = sources_of_tile(rows, end, slots_ptr, top_k, num_tokens)
        first_column = feature_block * BLOCK_N
        columns = first_column + tl.arange(0, BLOCK_N)
        known = columns < features
        x_row_ptr = x_ptr + offset(source, x_stride_m)[:, None]
        x_scale_row_ptr = x_scale_ptr + offset(source, x_scale_stride_m)
        expert_scale_ptr = scale_ptr + offset(expert, scale_stride_e)
        scale_row_ptr = expert_scale_ptr + offset(first_column // block_rows, scale_stride_n)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        product = tl.zeros((BLOCK_M, BLOCK_N), PRODUCT)
        for step in range(steps):
            block, first = step // steps_in_block, step * BLOCK_K
            inner = first + tl.arange(0, BLOCK_K)
            mask = present[:, None]
            if not EVEN:
                mask &= (inner < depth)[None, :]
            x = tl.load(x_row_ptr + offset(inner, x_stride_k)[None, :], mask=mask, other=0.0)
            weight = weight_desc.load([expert, first_column, first]).reshape(BLOCK_N, BLOCK_K)
            if ONE_BLOCK:
                product = stored_dot(x, weight.T, product)
            else:
                part = stored_dot(x, weight.T, tl.zeros((BLOCK_M, BLOCK_N), PRODUCT))
                scale_ptrs = scale_row_ptr + offset(block, scale_stride_k)
                # The mask hides nothing: without one a product took up to 17 % more time (H200).
                scale = tl.load(scale_ptrs, mask=row < end, other=0.0).to(tl.float32)
                x_scale_ptrs = x_scale_row_ptr + offset(block, x_scale_stride_k)
                scale *= tl.load(x_scale_ptrs, mask=present, other=0.0).to(tl.float32)
                acc += part.to(tl.float32) * scale[:, None]
        if ONE_BLOCK:
            scale_ptrs = expert_scale_ptr + offset(columns // block_rows, scale_stride_n)
            scale = tl.load(scale_ptrs, mask=known, other=0.0).to(tl.float32)
            x_scale = tl.load(x_scale_row_ptr, mask=present, other=0.0).to(tl.float32)
            acc = product.to(tl.float32) * scale[None, :] * x_scale[:, None]
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + offset(expert, bias_stride_e) + offset(columns, bias_stride_n)
            acc += tl.load(bias_ptrs, mask=known, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_stride_m + columns[None, :]
        out_mask = (rows < end)[:, None] & (columns < features)[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    if TAIL:
        zero_tail_beside(tiles_ptr, out_ptr, out_stride_m, tile, num_tiles)


def scaled_rows_config(linear: Any, wanted: int) -> LaunchConfig:
    """For tiles of `wanted` rows, by measurement on an H200: wide ones mask rows once for twice as many features.

    Not in int8, whose sums take more registers to turn into float32 at the end: 8 to 20 % slower.
    """
    depth = linear.weight.shape[2]
    if linear.scale.shape[2] > 1 or wanted < MANY_ROWS.block_m:
        return FEW_ROWS
    is_wide = linear.weight.dtype.is_floating_point and (depth >= _DEEP or depth % WIDE.block_k != 0)
    return WIDE if is_wide else MANY_ROWS
