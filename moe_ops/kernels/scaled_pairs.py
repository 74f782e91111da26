"""scaled_grouped_gemm with weights of 4 bits, two in a byte: rows times weights that are unpacked in registers.

The weight is the left operand, as in `scaled`. Of MXFP4 a number's exponent and fraction are put where those of a
bfloat16 end and begin, which makes it 2**126 times as small, also where it has no leading one; its power makes up for
all but 2**63 of that, so that any weight from 2**-63 to 2**64 is exact, and the sum for the rest. Larger ones are NaN.
The code of an integer becomes the end of the fraction of 128 or, in float16, of 1024, which then is taken off with the
zero point; times its scale it is rounded once, to the dtype of rows of 16 bits: they are multiplied with what weights
of it would be.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import INTERPRETED, dot, finished, offset, sources_of_tile
from moe_ops.kernels.gemm_tables import LaunchConfig
from moe_ops.kernels.tiles import tile_at
from moe_ops.pairs import PAIRS


@dataclass(frozen=True, slots=True)
class PairsConfig(LaunchConfig):
    """turn: steps in one of the loop. is_mixed: whether tiles of 32 and 16 rows take what is left of an expert's."""

    turn: int = 1
    is_mixed: bool = False


IN_16_BITS = {16: PairsConfig(16, 128, 64, 4, 3, turn=2), 128: PairsConfig(128, 128, 64, 8, 3)}
MIXED_OF_POWERS = PairsConfig(64, 128, 64, 4, 2, turn=2, is_mixed=True)
MIXED = PairsConfig(64, 128, 64, 4, 3, is_mixed=True)
ONE_BY_ONE = {16: PairsConfig(16, 64, 64, 4, 3), 32: PairsConfig(32, 64, 64, 4, 3)}
IN_32_BITS = {16: PairsConfig(16, 64, 32, 4, 2), 32: PairsConfig(32, 64, 32, 4, 2)}
SHORTEST = tl.constexpr(16)
"""Rows of the lowest of mixed tiles; those in the middle have half the rows of the highest."""

_GROUP = tl.constexpr(32)
_LARGEST = tl.constexpr(191)  # exponent
MISSING = tl.constexpr(2.0**63)
# A byte's numbers to the last bits of both halves of a word; then both are of 16 bits.
_MXFP4 = tl.constexpr("""
{
mul.lo.u32 $0, $1, 0x1001;
and.b32 $0, $0, 0x000F000F;
mul.lo.u32 $0, $0, 0x1040;
and.b32 $0, $0, 0x81C081C0;
}
""")
# Codes at the end of `first`, and `less` of that and 8: as a fused product, for GPUs before Hopper add no bfloat16.
_INTEGERS = """
{{
.reg .b32 one, less;
mov.b32 one, {one};
mov.b32 less, {less};
mul.lo.u32 $0, $1, 0x1001;
lop3.b32 $0, $0, 0x000F000F, {first}, 0xEA;
fma.rn.{kind} $0, $0, one, less;
}}
"""
_BFLOAT16 = {"kind": "bf16x2", "first": "0x43004300", "one": "0x3F803F80"}
_FLOAT16 = {"kind": "f16x2", "first": "0x64006400", "one": "0x3C003C00"}
_IN_BFLOAT16 = tl.constexpr(_INTEGERS.format(**_BFLOAT16, less="0xC308C308"))
_IN_FLOAT16 = tl.constexpr(_INTEGERS.format(**_FLOAT16, less="0xE408E408"))
# The same, less of that and a zero point.
_FROM_ZERO_IN_BFLOAT16 = tl.constexpr(_INTEGERS.format(**_BFLOAT16, less="$2"))
_FROM_ZERO_IN_FLOAT16 = tl.constexpr(_INTEGERS.format(**_FLOAT16, less="$2"))
_PRODUCT = """
{{
.reg .b32 none;
mov.b32 none, 0x80008000;
fma.rn.{kind} $0, $1, $2, none;
}}
"""
_OF_BFLOAT16 = tl.constexpr(_PRODUCT.format(kind="bf16x2"))
_OF_FLOAT16 = tl.constexpr(_PRODUCT.format(kind="f16x2"))


@triton.jit
def _powers(exponents):
    """2**(exponent - 64) in bfloat16."""
    bits = tl.where(exponents > _LARGEST, 0x7FC0, (exponents.to(tl.int16) + 63) << 7)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scales(scale_row_ptr, group, block_columns, scale_stride_k, known, depth):
    """[N, K / 32] scales, or zero points, of groups that begin at these columns; zeros past the depth."""
    scale_ptrs = scale_row_ptr + offset(group // block_columns, scale_stride_k)[None, :]
    return tl.load(scale_ptrs, mask=known[:, None] & (group < depth)[None, :], other=0)


@triton.jit
def spread_scale(scale, COLUMNS: tl.constexpr):
    """[N, K / 32] as [N, COLUMNS]."""
    times: tl.constexpr = COLUMNS // scale.shape[1]
    spread = scale[:, :, None].broadcast_to(scale.shape[0], scale.shape[1], times)
    return spread.reshape(scale.shape[0], COLUMNS)


@triton.jit
def _in_32_bits(pairs, scale, zero):
    """Weights of even columns and of odd ones."""
    codes = pairs.to(tl.int32)
    if scale.dtype == tl.uint8:
        scale = _powers(scale)
        even = (((codes & 0x08) << 28) | ((codes & 0x07) << 22)).to(tl.float32, bitcast=True)
        odd = (((codes & 0x80) << 24) | ((codes & 0x70) << 18)).to(tl.float32, bitcast=True)
    else:
        less = 8 if zero is None else spread_scale(zero.to(tl.int32), pairs.shape[1])
        even, odd = ((codes & 15) - less).to(tl.float32), ((codes >> 4) - less).to(tl.float32)
    spread = spread_scale(scale.to(tl.float32), pairs.shape[1])
    return even * spread, odd * spread


@triton.jit
def _in_16_bits(pairs, scale, zero, DTYPE: tl.constexpr):
    """Weights of even columns and of odd ones, rounded once."""
    IN_BFLOAT16: tl.constexpr = tl.bfloat16 == DTYPE
    if zero is None:
        if scale.dtype == tl.uint8:
            scale = _powers(scale)
            NUMBERS: tl.constexpr = _MXFP4
        else:
            NUMBERS: tl.constexpr = _IN_BFLOAT16 if IN_BFLOAT16 else _IN_FLOAT16
        words = tl.inline_asm_elementwise(
            NUMBERS, "=&r,r", [pairs.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        FROM_ZERO: tl.constexpr = _FROM_ZERO_IN_BFLOAT16 if IN_BFLOAT16 else _FROM_ZERO_IN_FLOAT16
        # Of 128, or 1024, and a zero point the negative, in both halves.
        less = (zero.to(tl.int32) | (0xC300 if IN_BFLOAT16 else 0xE400)) * 0x10001
        words = tl.inline_asm_elementwise(
            FROM_ZERO,
            "=&r,r,r",
            [pairs.to(tl.int32), spread_scale(less, pairs.shape[1])],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    if scale.dtype == DTYPE:
        PRODUCT: tl.constexpr = _OF_BFLOAT16 if IN_BFLOAT16 else _OF_FLOAT16
        twice = (scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001
        words = tl.inline_asm_elementwise(
            PRODUCT,
            "=r,r,r",
            [words, spread_scale(twice, pairs.shape[1])],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    even = words.to(tl.int16).to(DTYPE, bitcast=True)
    odd = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    if scale.dtype != DTYPE:
        spread = spread_scale(scale.to(tl.float32), pairs.shape[1])
        even, odd = (even.to(tl.float32) * spread).to(DTYPE), (odd.to(tl.float32) * spread).to(DTYPE)
    return even, odd


@triton.jit
def unpacked(pairs, scale, zero, DTYPE: tl.constexpr):
    """[N, K / 2] bytes and [N, K / 32] scales and zero points, if any, as [N, K] weights, of MXFP4 times 2**-63."""
    if tl.float32 == DTYPE:
        even, odd = _in_32_bits(pairs, scale, zero)
    else:
        even, odd = _in_16_bits(pairs, scale, zero, DTYPE)
    return tl.join(even, odd).reshape(pairs.shape[0], 2 * pairs.shape[1])


@triton.jit
def _dot(weight, x, acc):
    """acc + weight @ x. TF32 holds float16 and MXFP4 as they are."""
    if x.dtype == tl.float16 and weight.dtype == tl.float32 and not INTERPRETED:
        product = tl.dot(weight, x.to(tl.float32), acc, input_precision="tf32")
    else:
        product = dot(weight, x.to(weight.dtype), acc)
    return product


@triton.jit
def _multiply_tile(
    expert, row, end, feature_block,
    x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    top_k, num_tokens, num_experts, features, depth, block_rows, block_columns,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
    bias_stride_e, bias_stride_n, out_stride_m,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TURN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of an expert from `row` on by BLOCK_N features; TURN steps, one or two, in a turn of the loop."""
    IS_MXFP4: tl.constexpr = scale_ptr.dtype.element_ty == tl.uint8
    IN_FLOAT32: tl.constexpr = INTERPRETED or (IS_MXFP4 and x_ptr.dtype.element_ty == tl.float16)
    DTYPE: tl.constexpr = tl.float32 if IN_FLOAT32 else x_ptr.dtype.element_ty
    rows = row + tl.arange(0, BLOCK_M)
    source, present = sources_of_tile(rows, end, expert, num_experts, slots_ptr, top_k, num_tokens)
    columns = feature_block * BLOCK_N + tl.arange(0, BLOCK_N)
    known = columns < tl.where(expert < num_experts, features, 0)
    x_row_ptr = x_ptr + offset(source, x_stride_m)[None, :]
    weight_row_ptr = weight_ptr + offset(expert, weight_stride_e) + offset(columns, weight_stride_n)[:, None]
    scale_row_ptr = scale_ptr + offset(expert, scale_stride_e)
    scale_row_ptr += offset(columns // block_rows, scale_stride_n)[:, None]
    groups = tl.arange(0, BLOCK_K // _GROUP) * _GROUP
    coming = _scales(scale_row_ptr, groups, block_columns, scale_stride_k, known, depth)
    second = _scales(scale_row_ptr, BLOCK_K + groups, block_columns, scale_stride_k, known, depth)
    if zero_ptr is not None:
        zero_row_ptr = zero_ptr + offset(expert, zero_stride_e)
        zero_row_ptr += offset(columns // block_rows, zero_stride_n)[:, None]
        coming_zero = _scales(zero_row_ptr, groups, block_columns, zero_stride_k, known, depth)
        second_zero = _scales(zero_row_ptr, BLOCK_K + groups, block_columns, zero_stride_k, known, depth)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for turn in tl.range(0, tl.cdiv(depth, TURN * BLOCK_K), num_stages=STAGES):
        for part in tl.static_range(TURN):
            step = turn * TURN + part
            inner = step * BLOCK_K + tl.arange(0, BLOCK_K)
            pair = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
            x_mask, pair_mask = present[None, :], known[:, None]
            if not EVEN:
                x_mask &= (inner < depth)[:, None]
                pair_mask &= (2 * pair < depth)[None, :]
            x = tl.load(x_row_ptr + offset(inner, x_stride_k)[:, None], mask=x_mask, other=0.0)
            if weight_desc is None:
                pair_ptrs = weight_row_ptr + offset(pair, weight_stride_k)[None, :]
                pairs = tl.load(pair_ptrs, mask=pair_mask, other=0)
            else:
                box = weight_desc.load([expert, feature_block * BLOCK_N, step * (BLOCK_K // 2)])
                pairs = box.reshape(BLOCK_N, BLOCK_K // 2)
            # A turn ahead, as bytes are too short for copies that go on beside products.
            group = (step + TURN) * BLOCK_K + groups
            if part == 0:
                scale = coming
                coming = _scales(scale_row_ptr, group, block_columns, scale_stride_k, known, depth)
            else:
                scale = second
                second = _scales(scale_row_ptr, group, block_columns, scale_stride_k, known, depth)
            if zero_ptr is None:
                weight = unpacked(pairs, scale, None, DTYPE)
            else:
                if part == 0:
                    zero = coming_zero
                    coming_zero = _scales(zero_row_ptr, group, block_columns, zero_stride_k, known, depth)
                else:
                    zero = second_zero
                    second_zero = _scales(zero_row_ptr, group, block_columns, zero_stride_k, known, depth)
                weight = unpacked(pairs, scale, zero, DTYPE)
            acc = finished(_dot(weight, x, acc))
    if IS_MXFP4:
        acc *= MISSING
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + offset(expert, bias_stride_e) + offset(columns, bias_stride_n)
        acc += tl.load(bias_ptrs, mask=known, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * out_stride_m + columns[:, None]
    out_mask = (rows < end)[None, :] & (columns < features)[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["top_k", "num_tokens"])
def scaled_pairs_kernel(
    x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, zero_ptr, bias_ptr, out_ptr, tiles_ptr,
    top_k, num_tokens, num_experts, features, depth, block_rows, block_columns,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
    bias_stride_e, bias_stride_n, out_stride_m,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TURN: tl.constexpr, STAGES: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows by BLOCK_N features a tile. With MIXED what is left of an expert's rows has lower ones."""
    feature_blocks = tl.cdiv(features, BLOCK_N)
    SHORT: tl.constexpr = BLOCK_M // 2
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr) * feature_blocks:
        expert, row, end, feature_block = tile_at(tiles_ptr, tile, feature_blocks, BLOCK_M)
        if not MIXED or end - row > SHORT:
            _multiply_tile(
                expert, row, end, feature_block,
                x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, zero_ptr, bias_ptr, out_ptr,
                top_k, num_tokens, num_experts, features, depth, block_rows, block_columns,
                x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
                scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
                bias_stride_e, bias_stride_n, out_stride_m,
                EVEN, BLOCK_M, BLOCK_N, BLOCK_K, TURN, STAGES,
            )  # fmt: skip
        elif end - row > SHORTEST:
            _multiply_tile(
                expert, row, end, feature_block,
                x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, zero_ptr, bias_ptr, out_ptr,
                top_k, num_tokens, num_experts, features, depth, block_rows, block_columns,
                x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
                scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
                bias_stride_e, bias_stride_n, out_stride_m,
                EVEN, SHORT, BLOCK_N, BLOCK_K, TURN, STAGES + 1,
            )  # fmt: skip
        else:
            _multiply_tile(
                expert, row, end, feature_block,
                x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, zero_ptr, bias_ptr, out_ptr,
                top_k, num_tokens, num_experts, features, depth, block_rows, block_columns,
                x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
                scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
                bias_stride_e, bias_stride_n, out_stride_m,
                EVEN, SHORTEST, BLOCK_N, BLOCK_K, TURN, STAGES + 2,
            )  # fmt: skip


def scaled_pairs_config(rows: torch.dtype, scale: torch.dtype, wanted: int, is_boxed: bool) -> PairsConfig:
    """For tiles of `wanted` rows, by measurement on an H200. Weights that come in no boxes take registers."""
    in_16_bits = rows == torch.bfloat16 or (rows == torch.float16 and scale != PAIRS)
    if not in_16_bits or not is_boxed:
        table = ONE_BY_ONE if in_16_bits else IN_32_BITS
        return table[min(wanted, max(table))]
    if min(IN_16_BITS) < wanted < max(IN_16_BITS):
        return MIXED_OF_POWERS if scale == PAIRS else MIXED
    return IN_16_BITS[wanted]


def pairs_args(config: PairsConfig, depth: int) -> dict[str, Any]:
    """How the kernel goes through a depth."""
    return {
        "EVEN": depth % (config.turn * config.block_k) == 0,
        "TURN": config.turn,
        "STAGES": config.num_stages,
        "MIXED": config.is_mixed,
    }
