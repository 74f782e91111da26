"""scaled_grouped_gemm with weights of 4 bits, MXFP4, two in a byte: rows times weights that are unpacked in registers.

The weight is the left operand, as in `scaled`. A number's exponent and fraction are put where those of a bfloat16 end
and begin, which makes it 2**126 times as small, also where it has no leading one; its power makes up for all but 2**63
of that, so that any weight from 2**-63 to 2**64 is exact, and the sum for the rest. Larger ones are NaN.
"""

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import INTERPRETED, dot, offset, sources_of_tile
from moe_ops.kernels.gemm_tables import LaunchConfig
from moe_ops.kernels.tiles import tile_at

IN_16_BITS = {
    16: LaunchConfig(16, 128, 128, 4, 3),
    32: LaunchConfig(32, 128, 64, 4, 4),
    64: LaunchConfig(64, 128, 64, 4, 4),
    128: LaunchConfig(128, 128, 64, 8, 3),
}
ONE_BY_ONE = {16: LaunchConfig(16, 64, 64, 4, 3), 32: LaunchConfig(32, 64, 64, 4, 3)}
IN_32_BITS = {16: LaunchConfig(16, 64, 32, 4, 2), 32: LaunchConfig(32, 64, 32, 4, 2)}
_GROUP = tl.constexpr(32)
_LARGEST = tl.constexpr(191)  # exponent
_MISSING = tl.constexpr(2.0**63)


@triton.jit
def _powers(exponents):
    """2**(exponent - 64) in bfloat16."""
    bits = tl.where(exponents > _LARGEST, 0x7FC0, (exponents.to(tl.int16) + 63) << 7)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _in_bfloat16(pairs, powers):
    """Both numbers of a byte, times 2**-126 and a power that is there twice, as one word each."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 both, none;
        mul.lo.u32 both, $1, 0x1001;
        and.b32 both, both, 0x000F000F;
        mul.lo.u32 both, both, 0x1040;
        and.b32 both, both, 0x81C081C0;
        mov.b32 none, 0x80008000;
        fma.rn.bf16x2 $0, both, $2, none;
        }
        """,
        "=r,r,r",
        [pairs.to(tl.int32), powers],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _scales(scale_row_ptr, group, block_columns, scale_stride_k, known, depth):
    """[N, K / 32] exponents of groups that begin at these columns; zeros past the depth."""
    scale_ptrs = scale_row_ptr + offset(group // block_columns, scale_stride_k)[None, :]
    return tl.load(scale_ptrs, mask=known[:, None] & (group < depth)[None, :], other=0)


@triton.jit
def _spread(powers, COLUMNS: tl.constexpr):
    """[N, K / 32] as [N, COLUMNS]."""
    times: tl.constexpr = COLUMNS // powers.shape[1]
    spread = powers[:, :, None].broadcast_to(powers.shape[0], powers.shape[1], times)
    return spread.reshape(powers.shape[0], COLUMNS)


@triton.jit
def _unpacked(pairs, powers, DTYPE: tl.constexpr):
    """[N, K / 2] bytes and [N, K / 32] powers as [N, K] weights, times 2**-63."""
    half: tl.constexpr = pairs.shape[1]
    if tl.bfloat16 == DTYPE:
        twice = (powers.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001
        words = _in_bfloat16(pairs, _spread(twice, half))
        even = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
        odd = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        codes, spread = pairs.to(tl.int32), _spread(powers.to(DTYPE), half)
        even = (((codes & 0x08) << 28) | ((codes & 0x07) << 22)).to(tl.float32, bitcast=True) * spread
        odd = (((codes & 0x80) << 24) | ((codes & 0x70) << 18)).to(tl.float32, bitcast=True) * spread
    return tl.join(even, odd).reshape(pairs.shape[0], 2 * half)


@triton.jit
def _dot(weight, x, acc):
    """acc + weight @ x. TF32 holds float16 and weights of 4 bits as they are."""
    if x.dtype == tl.float16 and not INTERPRETED:
        product = tl.dot(weight, x.to(tl.float32), acc, input_precision="tf32")
    else:
        product = dot(weight, x.to(weight.dtype), acc)
    return product


@triton.jit(do_not_specialize=["top_k", "num_tokens"])
def scaled_pairs_kernel(
    x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, bias_ptr, out_ptr, tiles_ptr,
    top_k, num_tokens, num_experts, features, depth, block_rows, block_columns, steps,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    scale_stride_e, scale_stride_n, scale_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows by BLOCK_N features a tile, BLOCK_K of the depth a step."""
    IN_BFLOAT16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not INTERPRETED
    DTYPE: tl.constexpr = tl.bfloat16 if IN_BFLOAT16 else tl.float32
    feature_blocks = tl.cdiv(features, BLOCK_N)
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr) * feature_blocks:
        expert, row, end, feature_block = tile_at(tiles_ptr, tile, feature_blocks, BLOCK_M)
        rows = row + tl.arange(0, BLOCK_M)
        source, present = sources_of_tile(rows, end, expert, num_experts, slots_ptr, top_k, num_tokens)
        columns = feature_block * BLOCK_N + tl.arange(0, BLOCK_N)
        known = columns < tl.where(expert < num_experts, features, 0)
        x_row_ptr = x_ptr + offset(source, x_stride_m)[None, :]
        weight_row_ptr = (
            weight_ptr + offset(expert, weight_stride_e) + offset(columns, weight_stride_n)[:, None]
        )
        scale_row_ptr = scale_ptr + offset(expert, scale_stride_e)
        scale_row_ptr += offset(columns // block_rows, scale_stride_n)[:, None]
        groups = tl.arange(0, BLOCK_K // _GROUP) * _GROUP
        coming = _scales(scale_row_ptr, groups, block_columns, scale_stride_k, known, depth)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for step in range(steps):
            inner = step * BLOCK_K + tl.arange(0, BLOCK_K)
            pair = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
            x_mask, pair_mask = present[None, :], known[:, None]
            if not EVEN:
                x_mask &= (inner < depth)[:, None]
                pair_mask &= (2 * pair < depth)[None, :]
            x = tl.load(x_row_ptr + offset(inner, x_stride_k)[:, None], mask=x_mask, other=0.0)
            if weight_desc is None:
                pairs = tl.load(
                    weight_row_ptr + offset(pair, weight_stride_k)[None, :], mask=pair_mask, other=0
                )
            else:
                box = weight_desc.load([expert, feature_block * BLOCK_N, step * (BLOCK_K // 2)])
                pairs = box.reshape(BLOCK_N, BLOCK_K // 2)
            powers = _powers(coming)
            # A step ahead, as bytes are too short for copies that go on beside products.
            group = (step + 1) * BLOCK_K + groups
            coming = _scales(scale_row_ptr, group, block_columns, scale_stride_k, known, depth)
            acc = _dot(_unpacked(pairs, powers, DTYPE), x, acc)
        acc *= _MISSING
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + offset(expert, bias_stride_e) + offset(columns, bias_stride_n)
            acc += tl.load(bias_ptrs, mask=known, other=0.0).to(tl.float32)[:, None]
        out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * out_stride_m + columns[:, None]
        out_mask = (rows < end)[None, :] & (columns < features)[:, None]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


def scaled_pairs_config(rows: torch.dtype, wanted: int, is_boxed: bool) -> LaunchConfig:
    """For tiles of `wanted` rows, by measurement on an H200. Weights that come in no boxes take registers."""
    table = (IN_16_BITS if is_boxed else ONE_BY_ONE) if rows == torch.bfloat16 else IN_32_BITS
    return table[min(wanted, max(table))]
