"""scaled_grouped_gemm with weights of 4 bits, two in a byte: rows times weights that are unpacked in registers.

The weight is the left operand, as in `scaled`. In tiles of few rows bytes are read four at a time, and rows are put
into the order of columns that comes of it; with more rows that takes longer than it saves.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.e2m1 import FLOAT8, SCALES
from moe_ops.kernels.common import INTERPRETED, cdiv, dot, finished, offset, sources_of_tile
from moe_ops.kernels.gemm_config import is_tuned, rows_per_tile
from moe_ops.kernels.gemm_tables import LaunchConfig
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.pairs_numbers import (
    MISSING,
    beside_words,
    factors,
    shifts,
    unpacked,
    unpacked_by_words,
)
from moe_ops.kernels.program import TensorMeta
from moe_ops.kernels.tiles import tile_at, zero_tail_beside
from moe_ops.pairs import group_of


@dataclass(frozen=True, slots=True)
class PairsConfig(LaunchConfig):
    """is_mixed: whether tiles of half as many rows, and of 16, take what is left of an expert's."""

    is_mixed: bool = False


IN_16_BITS = {16: PairsConfig(16, 128, 64, 4, 3), 128: PairsConfig(128, 128, 64, 8, 3)}
LONG_STEPS = PairsConfig(16, 128, 128, 4, 3)
MIXED = PairsConfig(64, 128, 64, 4, 3, is_mixed=True)
HIGH = PairsConfig(256, 128, 64, 8, 3, is_mixed=True)
ONE_BY_ONE = {16: PairsConfig(16, 64, 64, 4, 3), 32: PairsConfig(32, 64, 64, 4, 3)}
IN_32_BITS = {16: PairsConfig(16, 64, 32, 4, 2), 32: PairsConfig(32, 64, 32, 4, 2)}
# Rows of an expert up to which tiles are low, and mixed. With 12 mixed ones take 0.96 to 1.25 of the time of low ones,
# 0.91 to 1.09 where few experts have most rows; with 80 those of 128 take 0.79 to 0.91 of theirs, then 1.08 to 1.22.
# NVFP4, of which more is made for each tile, takes 0.82 to 0.99 of the time in high ones from 192 rows on, 0.93 to 1.12
# with 128; MXFP4 and integers 1.00 to 1.18.
_LOW_ROWS, _MIXED_ROWS, _HIGH_ROWS = 12.0, 80.0, 160.0
FEW_TILES = 3  # for each multiprocessor
SHORTEST = tl.constexpr(16)
"""Rows of the lowest of mixed tiles; those in the middle have half the rows of the highest."""


@triton.jit
def _scales(
    scale_row_ptr, step, scale_stride_k, known, depth,
    BLOCK_COLUMNS: tl.constexpr, GROUP: tl.constexpr, REPEATS: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[N, K / GROUP] scales, or zero points, of a step's groups. Past the depth zeros, or those of the last step."""
    if TOGETHER:
        scale = _in_one_load(scale_row_ptr, tl.minimum(step, depth // BLOCK_K - 1), known, BLOCK_K // GROUP)
    else:
        scale = _one_by_one(
            scale_row_ptr, step, scale_stride_k, known, depth, BLOCK_COLUMNS, GROUP, REPEATS, BLOCK_K
        )
    return scale


@triton.jit
def _in_one_load(scale_row_ptr, step, known, GROUPS: tl.constexpr):
    """Of a row two or four: where those of all rows are in one bank of the cache, each load takes as long as this."""
    SCALE: tl.constexpr = scale_row_ptr.dtype.element_ty
    BITS: tl.constexpr = SCALE.primitive_bitwidth
    WORD: tl.constexpr = tl.int32 if GROUPS * BITS == 32 else tl.int16
    PART: tl.constexpr = tl.uint8 if BITS == 8 else tl.uint16
    words = tl.load(scale_row_ptr.to(tl.pointer_type(WORD)) + step, mask=known[:, None], other=0)
    parts = words.to(tl.int32) >> (BITS * tl.arange(0, GROUPS))[None, :]
    return parts.to(PART).to(SCALE, bitcast=True)


@triton.jit
def _one_by_one(
    scale_row_ptr, step, scale_stride_k, known, depth,
    BLOCK_COLUMNS: tl.constexpr, GROUP: tl.constexpr, REPEATS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    start, mask = step * BLOCK_K, known[:, None]
    if REPEATS:
        start = tl.minimum(start, depth - BLOCK_K)
    group = start + tl.arange(0, BLOCK_K // GROUP) * GROUP
    if not REPEATS:
        mask &= (group < depth)[None, :]
    scale_ptrs = scale_row_ptr + offset(group // BLOCK_COLUMNS, scale_stride_k)[None, :]
    return tl.load(scale_ptrs, mask=mask, other=0.0)


@triton.jit
def _dot(weight, x, acc):
    """acc + weight @ x. TF32 holds float16 and e2m1 with its scales as they are."""
    if x.dtype == tl.float16 and weight.dtype == tl.float32 and not INTERPRETED:
        product = tl.dot(weight, x.to(tl.float32), acc, input_precision="tf32")
    else:
        product = dot(weight, x.to(weight.dtype), acc)
    return product


@triton.jit
def _multiply_tile(
    expert, row, end, feature_block,
    x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, zero_ptr, global_ptr, bias_ptr, out_ptr,
    top_k, num_tokens, features, depth, block_rows, global_rows,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
    global_stride_e, global_stride_n, bias_stride_e, bias_stride_n, out_stride_m,
    BLOCK_COLUMNS: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr, BY_WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of an expert from `row` on by BLOCK_N features."""
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    IS_E2M1: tl.constexpr = tl.uint8 == SCALE or tl.float8e4nv == SCALE
    GROUP: tl.constexpr = 16 if tl.float8e4nv == SCALE else 32
    IN_FLOAT32: tl.constexpr = INTERPRETED or (IS_E2M1 and x_ptr.dtype.element_ty == tl.float16)
    DTYPE: tl.constexpr = tl.float32 if IN_FLOAT32 else x_ptr.dtype.element_ty
    MOST: tl.constexpr = 64 if IS_E2M1 else 32  # rows, by measurement on an H200
    IS_LOW: tl.constexpr = BY_WORDS and BLOCK_M <= MOST
    IN_WORDS: tl.constexpr = IS_LOW and (INTERPRETED or tl.float32 != DTYPE)
    AHEAD: tl.constexpr = IS_LOW and tl.float32 != SCALE
    ZEROS_AHEAD: tl.constexpr = IS_LOW and not AHEAD
    STEPS: tl.constexpr = 2 if AHEAD else 1
    ZEROS_STEPS: tl.constexpr = 2 if ZEROS_AHEAD else 1
    REPEATS: tl.constexpr = EVEN and IS_LOW  # takes registers that higher tiles have not
    # In tiles of 128 rows it took up to 1.35 of the time.
    IN_ONE_LOAD: tl.constexpr = TOGETHER and BY_WORDS and BLOCK_M <= 64
    rows = row + tl.arange(0, BLOCK_M)
    source, present = sources_of_tile(rows, end, slots_ptr, top_k, num_tokens)
    columns = feature_block * BLOCK_N + tl.arange(0, BLOCK_N)
    known = columns < features
    weight_row_ptr = weight_ptr + offset(expert, weight_stride_e) + offset(columns, weight_stride_n)[:, None]
    scale_row_ptr = scale_ptr + offset(expert, scale_stride_e)
    scale_row_ptr += offset(columns // block_rows, scale_stride_n)[:, None]
    # Bytes are too short for copies that go on beside products, so they are loaded a step ahead. Scales of low tiles
    # are loaded two steps ahead and converted one ahead, where a thread has a few: four that multiply have the same.
    # Zero points took longer so beside scales that are, and less time beside float32, which is not converted.
    scale = _scales(
        scale_row_ptr, 0, scale_stride_k, known, depth, BLOCK_COLUMNS, GROUP, REPEATS, IN_ONE_LOAD, BLOCK_K
    )
    if AHEAD:
        coming_factor = factors(scale, DTYPE)
        scale = _scales(
            scale_row_ptr, 1, scale_stride_k, known, depth, BLOCK_COLUMNS, GROUP, REPEATS, IN_ONE_LOAD, BLOCK_K
        )  # fmt: skip
    if zero_ptr is not None:
        zero_row_ptr = zero_ptr + offset(expert, zero_stride_e)
        zero_row_ptr += offset(columns // block_rows, zero_stride_n)[:, None]
        zero = _scales(
            zero_row_ptr, 0, zero_stride_k, known, depth, BLOCK_COLUMNS, GROUP, REPEATS, False, BLOCK_K
        )
        if ZEROS_AHEAD:
            coming_shift = shifts(zero, DTYPE)
            zero = _scales(
                zero_row_ptr, 1, zero_stride_k, known, depth, BLOCK_COLUMNS, GROUP, REPEATS, False, BLOCK_K
            )
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    steps = tl.cdiv(depth, BLOCK_K)
    for step in tl.range(0, steps, num_stages=STAGES):
        inner = step * BLOCK_K + tl.arange(0, BLOCK_K)
        pair = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        pair_mask = known[:, None]
        if not EVEN:
            pair_mask &= (2 * pair < depth)[None, :]
        if IN_WORDS:
            x_ptrs = x_ptr + offset(source, x_stride_m)[:, None] + offset(inner, x_stride_k)[None, :]
            x_mask = present[:, None]
            if not EVEN:
                x_mask &= (inner < depth)[None, :]
            x = beside_words(tl.load(x_ptrs, mask=x_mask, other=0.0))
        else:
            x_ptrs = x_ptr + offset(source, x_stride_m)[None, :] + offset(inner, x_stride_k)[:, None]
            x_mask = present[None, :]
            if not EVEN:
                x_mask &= (inner < depth)[:, None]
            x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        if weight_desc is None:
            pair_ptrs = weight_row_ptr + offset(pair, weight_stride_k)[None, :]
            pairs = tl.load(pair_ptrs, mask=pair_mask, other=0)
        else:
            box = weight_desc.load([expert, feature_block * BLOCK_N, step * (BLOCK_K // 2)])
            pairs = box.reshape(BLOCK_N, BLOCK_K // 2)
        factor, shift = coming_factor if AHEAD else factors(scale, DTYPE), None
        if AHEAD:
            coming_factor = factors(scale, DTYPE)
        coming = step + STEPS
        scale = _scales(
            scale_row_ptr, coming, scale_stride_k, known, depth, BLOCK_COLUMNS, GROUP, REPEATS, IN_ONE_LOAD, BLOCK_K
        )  # fmt: skip
        if zero_ptr is not None:
            shift = coming_shift if ZEROS_AHEAD else shifts(zero, DTYPE)
            if ZEROS_AHEAD:
                coming_shift = shifts(zero, DTYPE)
            coming = step + ZEROS_STEPS
            zero = _scales(
                zero_row_ptr, coming, zero_stride_k, known, depth, BLOCK_COLUMNS, GROUP, REPEATS, False, BLOCK_K
            )  # fmt: skip
        if IN_WORDS:
            weight = unpacked_by_words(pairs, factor, shift, DTYPE, IS_E2M1)
        else:
            weight = unpacked(pairs, factor, shift, DTYPE, IS_E2M1)
        acc = finished(_dot(weight, x, acc))
    if IS_E2M1:
        acc *= MISSING
    if global_ptr is not None:
        global_ptrs = global_ptr + offset(expert, global_stride_e)
        global_ptrs += offset(columns // global_rows, global_stride_n)
        acc *= tl.load(global_ptrs, mask=known, other=0.0).to(tl.float32)[:, None]
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + offset(expert, bias_stride_e) + offset(columns, bias_stride_n)
        acc += tl.load(bias_ptrs, mask=known, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * out_stride_m + columns[:, None]
    out_mask = (rows < end)[None, :] & (columns < features)[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["top_k", "num_tokens"])
def scaled_pairs_kernel(
    x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, zero_ptr, global_ptr, bias_ptr, out_ptr, tiles_ptr,
    top_k, num_tokens, features, depth, block_rows, global_rows,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
    global_stride_e, global_stride_n, bias_stride_e, bias_stride_n, out_stride_m,
    BLOCK_COLUMNS: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr, BY_WORDS: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows by BLOCK_N features a tile. With MIXED what is left of an expert's rows has lower ones."""
    feature_blocks = tl.cdiv(features, BLOCK_N)
    SHORT: tl.constexpr = BLOCK_M // 2
    tile, num_tiles = tl.program_id(0), tl.load(tiles_ptr) * feature_blocks
    if tile < num_tiles:
        expert, row, end, feature_block = tile_at(tiles_ptr, tile, feature_blocks, BLOCK_M)
        if not MIXED or end - row > SHORT:
            _multiply_tile(
                expert, row, end, feature_block,
                x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, zero_ptr, global_ptr, bias_ptr, out_ptr,
                top_k, num_tokens, features, depth, block_rows, global_rows,
                x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
                scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
                global_stride_e, global_stride_n, bias_stride_e, bias_stride_n, out_stride_m,
                BLOCK_COLUMNS, EVEN, TOGETHER, BY_WORDS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        elif end - row > SHORTEST:
            _multiply_tile(
                expert, row, end, feature_block,
                x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, zero_ptr, global_ptr, bias_ptr, out_ptr,
                top_k, num_tokens, features, depth, block_rows, global_rows,
                x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
                scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
                global_stride_e, global_stride_n, bias_stride_e, bias_stride_n, out_stride_m,
                BLOCK_COLUMNS, EVEN, TOGETHER, BY_WORDS, SHORT, BLOCK_N, BLOCK_K, STAGES + 1,
            )  # fmt: skip
        else:
            _multiply_tile(
                expert, row, end, feature_block,
                x_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, zero_ptr, global_ptr, bias_ptr, out_ptr,
                top_k, num_tokens, features, depth, block_rows, global_rows,
                x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
                scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
                global_stride_e, global_stride_n, bias_stride_e, bias_stride_n, out_stride_m,
                BLOCK_COLUMNS, EVEN, TOGETHER, BY_WORDS, SHORTEST, BLOCK_N, BLOCK_K, STAGES + 2,
            )  # fmt: skip
    if TAIL:
        zero_tail_beside(tiles_ptr, out_ptr, out_stride_m, tile, num_tiles)


def scaled_pairs_config(args: Any, rows_per_expert: float, is_boxed: bool, gpu: Gpu) -> PairsConfig:
    """By measurement on an H200. Weights that come in no boxes take registers.

    Low tiles whose scales come together in steps of 128 columns, those of MXFP4, take 0.82 to 1.00 of the time so. High
    ones spill on GPUs after Hopper.
    """
    linear, in_16_bits = args.weight, is_in_16_bits(args.weight, args.x.dtype)
    if not in_16_bits or not is_boxed:
        table = ONE_BY_ONE if in_16_bits else IN_32_BITS
        return table[min(rows_per_tile(rows_per_expert), max(table))]
    if rows_per_expert > _MIXED_ROWS:
        is_high = linear.scale.dtype == FLOAT8 and rows_per_expert > _HIGH_ROWS and is_tuned(gpu)
        return HIGH if is_high else IN_16_BITS[128]
    if rows_per_expert > _LOW_ROWS or _are_few(linear.weight, gpu):
        return MIXED
    return LONG_STEPS if _come_together(linear, LONG_STEPS.block_k) else IN_16_BITS[16]


def is_in_16_bits(linear: Any, dtype: torch.dtype) -> bool:
    """Whether such weights are unpacked to 16 bits beside rows of that dtype: float16 lacks the range for e2m1's."""
    return dtype == torch.bfloat16 or (dtype == torch.float16 and linear.scale.dtype not in SCALES)


def _are_few(weight: TensorMeta, gpu: Gpu) -> bool:
    """Whether there are so few tiles that steps which load ahead count, of which mixed ones have more.

    Layers of Qwen3-30B-A3B and OLMoE on one of four GPUs then take 0.85 to 0.98 of the time, on one of two up to 1.23.
    """
    return weight.shape[0] * cdiv(weight.shape[1], MIXED.block_n) <= FEW_TILES * gpu.multiprocessors


def pairs_args(config: PairsConfig, args: Any, is_boxed: bool) -> dict[str, Any]:
    """How the kernel goes through a depth, which is that of `args.weight`."""
    linear = args.weight
    return {
        "BLOCK_COLUMNS": max(min(linear.block_columns, linear.depth), 1),
        "EVEN": _is_even(linear, config.block_k),
        "TOGETHER": _come_together(linear, config.block_k),
        "BY_WORDS": is_boxed and args.x.strides[1] == 1,
        "STAGES": config.num_stages,
        "MIXED": config.is_mixed,
    }


def _is_even(linear: Any, block_k: int) -> bool:
    return linear.depth > 0 and linear.depth % block_k == 0


def _come_together(linear: Any, block_k: int) -> bool:
    """Whether the scales of a step are several, which one load takes."""
    scale, group = linear.scale, group_of(linear.scale.dtype)
    groups = block_k // group
    are_several = 1 < groups <= 4 // scale.dtype.itemsize
    if linear.block_columns != group or not are_several or not _is_even(linear, block_k):
        return False
    begins_a_word = scale.aligned and not any(stride % groups for stride in scale.strides[:2])
    return begins_a_word and scale.strides[2] == 1
