"""Grouped GEMM, fast path: persistent CTAs, weights by host TMA descriptor, rows by TMA or gathered by masked cp.async.

out[r] = activation(x[row(r)] @ weight[e].T + bias[e]). Measured on an H200: masking the copies of absent rows,
expert-major order and one flattened loop over all tiles are what makes it fast; gathering costs next to nothing
against rows sorted beforehand.
"""

import triton
import triton.language as tl

from moe_ops.kernels.common import activate, dot, offset, sources_of_tile
from moe_ops.kernels.tiles import tile_at, zero_tail


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


@triton.constexpr_function
def _is_paired(gated, interleaved, transposed, apart):
    """Whether gate and up columns, or tensors, are too far apart for one box: two loads, two products."""
    return gated and not interleaved and (transposed or apart)


@triton.jit
def _add_bias(acc, bias_ptr, rows, inside, stride_n):
    return acc + tl.load(bias_ptr + offset(rows, stride_n), mask=inside, other=0.0).to(acc.dtype)[None, :]


@triton.jit
def _store(value, out_ptr, rows, end, column, features, stride_m):
    columns = column + tl.arange(0, value.shape[1])
    mask = (rows < end)[:, None] & (columns < features)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_m + columns[None, :]
    tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_pair(
    gate, up, bias_ptr, up_bias_ptr, out_ptr, rows, end, column, features, bias_stride_n,
    out_stride_m, expert, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Gate and up products of the output columns from `column` on: bias, activation, store; without a NAME both."""
    columns = column + tl.arange(0, gate.shape[1])
    if bias_ptr is not None:
        gate = _add_bias(gate, bias_ptr, columns, columns < features, bias_stride_n)
        up = _add_bias(up, up_bias_ptr, columns, columns < features, bias_stride_n)
    value = gate
    if NAME is None:
        _store(up, out_ptr + features, rows, end, column, features, out_stride_m)
    else:
        value = activate(
            gate, up, expert, columns[None, :], (columns < features)[None, :],
            operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
            NAME, True, ALPHA, BETA, LINEAR_BETA, LIMIT,
        )  # fmt: skip
    _store(value, out_ptr, rows, end, column, features, out_stride_m)


@triton.jit
def _store_interleaved(
    acc, bias_ptr, out_ptr, rows, end, column, features, bias_stride_n, out_stride_m,
    expert, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The same for alternating gate and up columns."""
    if bias_ptr is not None:
        weight_rows = column * 2 + tl.arange(0, acc.shape[1])
        acc = _add_bias(acc, bias_ptr, weight_rows, weight_rows < features * 2, bias_stride_n)
    gate, up = acc.reshape(acc.shape[0], acc.shape[1] // 2, 2).split()
    columns = column + tl.arange(0, gate.shape[1])
    value = activate(
        gate, up, expert, columns[None, :], (columns < features)[None, :],
        operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
        NAME, True, ALPHA, BETA, LINEAR_BETA, LIMIT,
    )  # fmt: skip
    _store(value, out_ptr, rows, end, column, features, out_stride_m)


@triton.jit
def multiply_tile(
    x_ptr, x_desc, slots_ptr, weight_desc, up_desc, bias_ptr, up_bias_ptr, out_ptr,
    expert, row, end, column_block,
    top_k, num_tokens, features, depth,
    x_stride_m, x_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
    operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile: BLOCK_M rows from `row` on, those before `end`, by one block of output columns."""
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    HALVES: tl.constexpr = GATED and not INTERLEAVED
    PAIRED: tl.constexpr = _is_paired(GATED, INTERLEAVED, TRANSPOSED, up_desc is not None)
    LOAD_N: tl.constexpr = OUT_N if PAIRED else BLOCK_N
    # Not from a function that is given slots_ptr: torch would take what is stored at them for a write through it.
    rows = row + tl.arange(0, BLOCK_M)
    source, present = sources_of_tile(rows, end, slots_ptr, top_k, num_tokens)
    depths = tl.arange(0, BLOCK_K)
    x_row_ptr = x_ptr + offset(source, x_stride_m)[:, None] + offset(depths, x_stride_k)[None, :]
    column = column_block * OUT_N
    weight_column = column * 2 if GATED and INTERLEAVED else column
    acc = tl.zeros((BLOCK_M, LOAD_N), tl.float32)
    acc_up = tl.zeros((BLOCK_M, LOAD_N), tl.float32)
    for k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        if x_desc is not None:  # rows of the next expert come along; they are not stored
            x = x_desc.load([row, k])
        else:
            mask = present[:, None] if EVEN_K else present[:, None] & (depths[None, :] < depth - k)
            x = tl.load(x_row_ptr + offset(k, x_stride_k), mask=mask, other=0.0)
        weight = _weight_tile(
            weight_desc, expert, weight_column, k, TRANSPOSED, HALVES and not PAIRED, LOAD_N, BLOCK_K
        )
        if PAIRED:
            if up_desc is None:
                up = _weight_tile(weight_desc, expert, features + column, k, True, False, LOAD_N, BLOCK_K)
            else:
                up = _weight_tile(up_desc, expert, column, k, TRANSPOSED, False, LOAD_N, BLOCK_K)
            acc = dot(x, weight, acc)
            acc_up = dot(x, up, acc_up)
        else:
            acc = dot(x, weight, acc)
    bias_row_ptr = bias_ptr
    up_bias_row_ptr = up_bias_ptr
    if bias_ptr is not None:
        bias_row_ptr = bias_ptr + offset(expert, bias_stride_e)
        if up_bias_ptr is None:
            up_bias_row_ptr = bias_row_ptr + offset(features, bias_stride_n)
        else:
            up_bias_row_ptr = up_bias_ptr + offset(expert, bias_stride_e)
    if PAIRED:
        _store_pair(
            acc, acc_up, bias_row_ptr, up_bias_row_ptr, out_ptr, rows, end, column, features, bias_stride_n,
            out_stride_m, expert, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
            NAME, ALPHA, BETA, LINEAR_BETA, LIMIT,
        )  # fmt: skip
    elif HALVES:
        gate, up = acc.reshape(BLOCK_M, 2, OUT_N).permute(0, 2, 1).split()
        _store_pair(
            gate, up, bias_row_ptr, up_bias_row_ptr, out_ptr, rows, end, column, features, bias_stride_n,
            out_stride_m, expert, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
            NAME, ALPHA, BETA, LINEAR_BETA, LIMIT,
        )  # fmt: skip
    elif GATED:
        # Two halves in turn: the whole tile at once needs more registers than there are.
        first, second = acc.reshape(BLOCK_M, 2, OUT_N).permute(0, 2, 1).split()
        _store_interleaved(
            first, bias_row_ptr, out_ptr, rows, end, column, features, bias_stride_n,
            out_stride_m, expert, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
            NAME, ALPHA, BETA, LINEAR_BETA, LIMIT,
        )  # fmt: skip
        _store_interleaved(
            second, bias_row_ptr, out_ptr, rows, end, column + OUT_N // 2, features, bias_stride_n,
            out_stride_m, expert, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
            NAME, ALPHA, BETA, LINEAR_BETA, LIMIT,
        )  # fmt: skip
    else:
        columns = column + tl.arange(0, OUT_N)
        if bias_ptr is not None:
            acc = _add_bias(acc, bias_row_ptr, columns, columns < features, bias_stride_n)
        if NAME is not None:
            acc = activate(
                acc, acc, expert, columns[None, :], (columns < features)[None, :],
                operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
                NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT,
            )  # fmt: skip
        _store(acc, out_ptr, rows, end, column, features, out_stride_m)


@triton.jit(do_not_specialize=["top_k", "num_tokens", "programs"])
def grouped_gemm_tma_kernel(
    x_ptr, x_desc, slots_ptr, weight_desc, up_desc, bias_ptr, up_bias_ptr, out_ptr, tiles_ptr,
    top_k, num_tokens, features, depth, programs,
    x_stride_m, x_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
    operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    TAIL: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`features`: output columns. A gated tile multiplies BLOCK_N weight rows and stores BLOCK_N/2 columns."""
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    column_blocks = tl.cdiv(features, OUT_N)
    num_tiles = tl.load(tiles_ptr) * column_blocks
    # In a flattened loop two accumulators make ptxas wait for each wgmma, which cost a fifth of a product.
    ASYNC: tl.constexpr = BLOCK_M < 64 or not _is_paired(GATED, INTERLEAVED, TRANSPOSED, up_desc is not None)
    for tile in tl.range(tl.program_id(0), num_tiles, programs, flatten=ASYNC):
        expert, row, end, column_block = tile_at(tiles_ptr, tile, column_blocks, BLOCK_M)
        multiply_tile(
            x_ptr, x_desc, slots_ptr, weight_desc, up_desc, bias_ptr, up_bias_ptr, out_ptr,
            expert, row, end, column_block,
            top_k, num_tokens, features, depth,
            x_stride_m, x_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
            operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
            NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT,
            TRANSPOSED, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    if TAIL:
        zero_tail(tiles_ptr, out_ptr, out_stride_m, tl.program_id(0), tl.num_programs(0))
