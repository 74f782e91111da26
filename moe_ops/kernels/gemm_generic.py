"""Grouped GEMM, any strides, sizes and floating dtype: pointer loads masked on every side.

Takes what TMA cannot: rows that are no multiple of 16 bytes, misaligned bases, float32 (IEEE products, no TF32)
and float64. One CTA per tile; tiles past the last one return at once. Weight gradients live here too.
"""

import triton
import triton.language as tl

from moe_ops.kernels.common import activate, dot, offset, source_row
from moe_ops.kernels.tiles import tile_at


@triton.jit(do_not_specialize=["top_k", "num_tokens"])
def grouped_gemm_generic_kernel(
    x_ptr, slots_ptr, weight_ptr, bias_ptr, out_ptr, tiles_ptr,
    top_k, num_tokens, num_experts, features, depth,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    bias_stride_e, bias_stride_n, out_stride_m, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    F64: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N output columns a tile; a gated tile keeps one accumulator for gates and one for ups."""
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    column_blocks = tl.cdiv(features, BLOCK_N)
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr) * column_blocks:
        expert, row, end, column_block = tile_at(tiles_ptr, tile, column_blocks, BLOCK_M)
        rows = row + tl.arange(0, BLOCK_M)
        # Rows past the last expert (dropped slots) multiply nothing: they are stored as zeros.
        present = rows < tl.where(expert < num_experts, end, 0)
        source = rows
        if slots_ptr is not None:
            source, present = source_row(slots_ptr, rows, present, top_k, num_tokens)
        columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = columns < tl.where(expert < num_experts, features, 0)
        gate_columns = columns * 2 if INTERLEAVED else columns
        up_columns = gate_columns + (1 if INTERLEAVED else features)
        depths = tl.arange(0, BLOCK_K)
        x_row_ptr = x_ptr + offset(source, x_stride_m)[:, None]
        expert_ptr = weight_ptr + offset(expert, weight_stride_e)
        gate_ptr = expert_ptr + offset(gate_columns, weight_stride_n)[None, :]
        up_ptr = expert_ptr + offset(up_columns, weight_stride_n)[None, :]
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
                acc_up = dot(x, tl.load(up_ptr + weight_offsets, mask=weight_mask, other=0.0), acc_up)
        if bias_ptr is not None:
            bias_row_ptr = bias_ptr + offset(expert, bias_stride_e)
            bias_ptrs = bias_row_ptr + offset(gate_columns, bias_stride_n)
            bias = tl.load(bias_ptrs, mask=column_mask, other=0.0)
            acc += bias.to(ACC)[None, :]
            if GATED:
                bias_ptrs = bias_row_ptr + offset(up_columns, bias_stride_n)
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


@triton.jit
def weight_gradient_kernel(
    grad_ptr, x_ptr, offsets_ptr, out_ptr,
    num_rows, features, depth, grad_stride_m, grad_stride_n, x_stride_m, x_stride_k,
    F64: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """out[e] = grad_e^T @ x_e over the rows of expert e: [features, depth], zeros for an expert without rows."""
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    depth_blocks = tl.cdiv(depth, BLOCK_K)
    blocks = tl.cdiv(features, BLOCK_N) * depth_blocks
    expert = tl.program_id(0) // blocks
    local = tl.program_id(0) % blocks
    columns = (local // depth_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    depths = (local % depth_blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
    # Both ends within the rows, whatever the caller's offsets say: a loop's look-ahead must not overflow.
    start = tl.minimum(tl.maximum(tl.load(offsets_ptr + expert), 0), num_rows)
    end = tl.minimum(tl.maximum(tl.load(offsets_ptr + expert + 1), start), num_rows)
    acc = tl.zeros((BLOCK_N, BLOCK_K), ACC)
    for first in range(start, end, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        grad_mask = (columns < features)[:, None] & (rows < end)[None, :]
        grad_offsets = offset(rows, grad_stride_m)[None, :] + offset(columns, grad_stride_n)[:, None]
        x_mask = (rows < end)[:, None] & (depths < depth)[None, :]
        x_offsets = offset(rows, x_stride_m)[:, None] + offset(depths, x_stride_k)[None, :]
        grad = tl.load(grad_ptr + grad_offsets, mask=grad_mask, other=0.0)
        acc = dot(grad, tl.load(x_ptr + x_offsets, mask=x_mask, other=0.0), acc)
    out_row_ptr = out_ptr + (expert.to(tl.int64) * features + columns)[:, None] * depth
    out_mask = (columns < features)[:, None] & (depths < depth)[None, :]
    tl.store(out_row_ptr + depths[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)
