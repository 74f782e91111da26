"""Grouped GEMM with tiles of three heights: whole row blocks, and shorter tiles for what is left of an expert's rows.

A tile to a CTA: tiles of unlike heights take unlike times, and persistent CTAs with a list of their own would drift
apart until those that share a weight tile find it no more in the L2 cache (up to a quarter slower on an H200). The
hardware instead starts CTAs in order, as others end.
"""

import triton
import triton.language as tl

from moe_ops.kernels.gemm_tma import multiply_tile
from moe_ops.kernels.tiles import tile_in_turn, zero_tail

SHORTEST = tl.constexpr(16)
"""Rows of the lowest tiles, the least of a product; those in the middle have half the rows of the highest."""


@triton.jit(do_not_specialize=["top_k", "num_tokens"])
def grouped_gemm_mixed_kernel(
    x_ptr, slots_ptr, weight_desc, up_desc, bias_ptr, up_bias_ptr, out_ptr, tiles_ptr,
    top_k, num_tokens, features, depth,
    x_stride_m, x_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
    operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    TAIL: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `grouped_gemm_tma_kernel`, of rows that are gathered or loaded as they lie."""
    column_blocks = tl.cdiv(features, BLOCK_N // 2 if GATED else BLOCK_N)
    SHORT: tl.constexpr = BLOCK_M // 2
    MORE_STAGES: tl.constexpr = STAGES + 1  # of lower tiles, for which there is room
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr) * column_blocks:
        expert, row, end, column_block = tile_in_turn(tiles_ptr, tile, column_blocks, BLOCK_M)
        if end - row > SHORT:
            multiply_tile(
                x_ptr, None, slots_ptr, weight_desc, up_desc, bias_ptr, up_bias_ptr, out_ptr,
                expert, row, end, column_block,
                top_k, num_tokens, features, depth,
                x_stride_m, x_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
                operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
                NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT,
                TRANSPOSED, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        elif end - row > SHORTEST:
            multiply_tile(
                x_ptr, None, slots_ptr, weight_desc, up_desc, bias_ptr, up_bias_ptr, out_ptr,
                expert, row, end, column_block,
                top_k, num_tokens, features, depth,
                x_stride_m, x_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
                operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
                NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT,
                TRANSPOSED, EVEN_K, SHORT, BLOCK_N, BLOCK_K, MORE_STAGES,
            )  # fmt: skip
        else:
            multiply_tile(
                x_ptr, None, slots_ptr, weight_desc, up_desc, bias_ptr, up_bias_ptr, out_ptr,
                expert, row, end, column_block,
                top_k, num_tokens, features, depth,
                x_stride_m, x_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
                operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
                NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT,
                TRANSPOSED, EVEN_K, SHORTEST, BLOCK_N, BLOCK_K, MORE_STAGES,
            )  # fmt: skip
    if TAIL:
        zero_tail(tiles_ptr, out_ptr, out_stride_m, tile, tl.num_programs(0))
