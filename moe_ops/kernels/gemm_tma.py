"""Grouped GEMM, fast path: persistent CTAs, weights by host TMA descriptor, rows gathered by masked cp.async.

out[r] = activation(x[row(r)] @ weight[e].T + bias[e]). Measured on an H200: masking the copies of absent rows,
expert-major order and one flattened loop over all tiles are what makes it fast; gathering costs next to nothing
against rows sorted beforehand.
"""

import triton
import triton.language as tl

from moe_ops.kernels.common import apply_activation, dot
from moe_ops.kernels.tiles import tile_at


@triton.jit
def _weight_tile(
    weight_desc, expert, column, k, TRANSPOSED: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of one expert; HALVES puts BLOCK_N/2 gate rows before the matching up rows."""
    if TRANSPOSED:
        tile = weight_desc.load([expert, k, column]).reshape(BLOCK_K, BLOCK_N)
    elif HALVES:
        tile = weight_desc.load([expert, 0, column, k]).reshape(BLOCK_N, BLOCK_K).T
    else:
        tile = weight_desc.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K).T
    return tile


@triton.jit
def _add_bias(acc, bias_ptr, expert, columns, features, num_experts, stride_e, stride_n):
    mask = columns < tl.where(expert < num_experts, features, 0)
    bias = tl.load(bias_ptr + expert.to(tl.int64) * stride_e + columns * stride_n, mask=mask, other=0.0)
    return acc + bias.to(acc.dtype)[None, :]


@triton.jit(do_not_specialize=["top_k"])
def grouped_gemm_tma_kernel(
    x_ptr, slots_ptr, weight_desc, bias_ptr, out_ptr, tiles_ptr,
    top_k, num_experts, features, depth, programs,
    x_stride_m, x_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
    NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`features`: output columns. A gated tile multiplies BLOCK_N weight rows and stores BLOCK_N/2 columns."""
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    HALVES: tl.constexpr = GATED and not INTERLEAVED
    # A transposed weight has its gate and up columns too far apart for one box: two loads, two products.
    PAIRED: tl.constexpr = HALVES and TRANSPOSED
    LOAD_N: tl.constexpr = OUT_N if PAIRED else BLOCK_N
    column_blocks = tl.cdiv(features, OUT_N)
    num_tiles = tl.load(tiles_ptr) * column_blocks
    for tile in tl.range(tl.program_id(0), num_tiles, programs, flatten=True):
        expert, row, end, column_block = tile_at(tiles_ptr, tile, column_blocks, BLOCK_M)
        rows = row + tl.arange(0, BLOCK_M)
        # Rows past the last expert (dropped slots) multiply nothing: they are stored as zeros.
        present = rows < tl.where(expert < num_experts, end, 0)
        source = rows
        if slots_ptr is not None:
            source = tl.load(slots_ptr + rows, mask=present, other=0) // top_k
        depths = tl.arange(0, BLOCK_K)
        x_row_ptr = x_ptr + source.to(tl.int64)[:, None] * x_stride_m + depths[None, :] * x_stride_k
        column = column_block * OUT_N
        weight_column = column * 2 if GATED and INTERLEAVED else column
        acc = tl.zeros((BLOCK_M, LOAD_N), tl.float32)
        acc_up = tl.zeros((BLOCK_M, LOAD_N), tl.float32)
        for k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
            mask = present[:, None] if EVEN_K else present[:, None] & (depths[None, :] < depth - k)
            x = tl.load(x_row_ptr + k * x_stride_k, mask=mask, other=0.0)
            weight = _weight_tile(weight_desc, expert, weight_column, k, TRANSPOSED, HALVES, LOAD_N, BLOCK_K)
            acc = dot(x, weight, acc)
            if PAIRED:
                up = _weight_tile(weight_desc, expert, features + column, k, TRANSPOSED, HALVES, LOAD_N, BLOCK_K)
                acc_up = dot(x, up, acc_up)
        columns = column + tl.arange(0, OUT_N)
        if PAIRED:
            gate_value = acc
            up_value = acc_up
        elif HALVES:
            gate_value, up_value = acc.reshape(BLOCK_M, 2, OUT_N).permute(0, 2, 1).split()
        elif GATED:
            gate_value, up_value = acc.reshape(BLOCK_M, OUT_N, 2).split()
        else:
            gate_value = acc
            up_value = acc
        if bias_ptr is not None:
            gate_bias = bias_ptr
            gate_stride = bias_stride_n * 2 if INTERLEAVED else bias_stride_n
            gate_value = _add_bias(
                gate_value, gate_bias, expert, columns, features, num_experts, bias_stride_e, gate_stride
            )
            if GATED:
                up_bias = bias_ptr + (bias_stride_n if INTERLEAVED else features * bias_stride_n)
                up_value = _add_bias(
                    up_value, up_bias, expert, columns, features, num_experts, bias_stride_e, gate_stride
                )
        if NAME is not None:
            gate_value = apply_activation(gate_value, up_value, NAME, ALPHA, LIMIT)
        out_row_ptr = out_ptr + rows.to(tl.int64)[:, None] * out_stride_m
        out_mask = (rows < end)[:, None] & (columns < features)[None, :]
        tl.store(out_row_ptr + columns[None, :], gate_value.to(out_ptr.dtype.element_ty), mask=out_mask)
