"""Grouped GEMM, any strides, sizes and floating dtype: pointer loads masked on every side.

Takes what TMA cannot: rows that are no multiple of 16 bytes, misaligned bases, float32 (IEEE products, no TF32)
and float64. One CTA per tile; tiles past the last one return at once.
"""

import triton
import triton.language as tl

from moe_ops.kernels.common import activate, dot, offset, sources_of_tile
from moe_ops.kernels.tiles import tile_at, zero_tail


@triton.jit(do_not_specialize=["top_k", "num_tokens"])
def grouped_gemm_generic_kernel(
    x_ptr, slots_ptr, weight_ptr, up_ptr, bias_ptr, up_bias_ptr, out_ptr, tiles_ptr,
    top_k, num_tokens, features, depth,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    bias_stride_e, bias_stride_n, out_stride_m, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    TAIL: tl.constexpr, F64: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N output columns a tile; a gated tile keeps one accumulator for gates and one for ups.

    Ups are rows of the weight, or of `up_ptr` if there is one. Without a NAME such a tile stores both.
    """
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    column_blocks = tl.cdiv(features, BLOCK_N)
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr) * column_blocks:
        expert, row, end, column_block = tile_at(tiles_ptr, tile, column_blocks, BLOCK_M)
        rows = row + tl.arange(0, BLOCK_M)
        source, present = sources_of_tile(rows, end, slots_ptr, top_k, num_tokens)
        columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = columns < features
        gate_columns = columns * 2 if INTERLEAVED else columns
        up_columns = gate_columns
        if up_ptr is None:
            up_columns += 1 if INTERLEAVED else features
        depths = tl.arange(0, BLOCK_K)
        x_row_ptr = x_ptr + offset(source, x_stride_m)[:, None]
        expert_ptr = weight_ptr + offset(expert, weight_stride_e)
        gate_ptr = expert_ptr + offset(gate_columns, weight_stride_n)[None, :]
        up_expert_ptr = expert_ptr
        if up_ptr is not None:
            up_expert_ptr = up_ptr + offset(expert, weight_stride_e)
        up_row_ptr = up_expert_ptr + offset(up_columns, weight_stride_n)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        acc_up = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        for k in range(0, depth, BLOCK_K):
            inner = k + depths
            inside = inner < depth
            x_mask = present[:, None] & inside[None, :]
            weight_mask = column_mask[None, :] & inside[:, None]
            x = tl.load(x_row_ptr + offset(inner, x_stride_k)[None, :], mask=x_mask, other=0.0)
            weight_offsets = offset(inner, weight_stride_k)[:, None]
            acc = dot(x, tl.load(gate_ptr + weight_offsets, mask=weight_mask, other=0.0), acc)
            if GATED:
                acc_up = dot(x, tl.load(up_row_ptr + weight_offsets, mask=weight_mask, other=0.0), acc_up)
        if bias_ptr is not None:
            bias_row_ptr = bias_ptr + offset(expert, bias_stride_e)
            bias_ptrs = bias_row_ptr + offset(gate_columns, bias_stride_n)
            bias = tl.load(bias_ptrs, mask=column_mask, other=0.0)
            acc += bias.to(ACC)[None, :]
            if GATED:
                up_bias_row_ptr = bias_row_ptr
                if up_bias_ptr is not None:
                    up_bias_row_ptr = up_bias_ptr + offset(expert, bias_stride_e)
                bias_ptrs = up_bias_row_ptr + offset(up_columns, bias_stride_n)
                bias = tl.load(bias_ptrs, mask=column_mask, other=0.0)
                acc_up += bias.to(ACC)[None, :]
        if NAME is not None:
            acc = activate(
                acc, acc_up, expert, columns[None, :], column_mask[None, :],
                operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
                NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT,
            )  # fmt: skip
        out_row_ptr = out_ptr + rows.to(tl.int64)[:, None] * out_stride_m
        out_mask = (rows < end)[:, None] & (columns < features)[None, :]
        tl.store(out_row_ptr + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
        if GATED and NAME is None:
            up_out_ptr = out_row_ptr + features
            tl.store(up_out_ptr + columns[None, :], acc_up.to(out_ptr.dtype.element_ty), mask=out_mask)
    if TAIL:
        zero_tail(tiles_ptr, out_ptr, out_stride_m, tile, tl.num_programs(0))
