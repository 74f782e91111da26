"""scaled_grouped_gemm: rows times weights of 8 bits, in 8 bits, or converted to the dtype of the rows.

A weight is the left operand of the tensor cores, out.T = weight @ x.T: so tiles of 16 rows fill them, and weights that
are converted come from registers while rows stay in shared memory. Blocks of columns are gone through in steps that
none of them shares, and each step's product is scaled in float32; with one block the sum is, at the end. For many rows
in 8 bits there is `scaled_rows`, for weights of 4 bits `scaled_pairs`. Products in 8 bits are faster than in 16 on an
H200; converting takes longer than it saves beyond 32 rows an expert, and with many rows weights are copied instead.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.e2m1 import FLOAT8, SCALES
from moe_ops.kernels import tma
from moe_ops.kernels.common import INTERPRETED, cdiv, finished, offset, sources_of_tile
from moe_ops.kernels.gemm import Operand, bias_args
from moe_ops.kernels.gemm_config import is_tuned, loads_rows_in_pieces, rows_per_tile
from moe_ops.kernels.gemm_tables import LaunchConfig
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Descriptor, Launch, Program, Ref
from moe_ops.kernels.scaled_args import global_args, stride_args, zero_args
from moe_ops.kernels.scaled_pairs import PairsConfig, pairs_args, scaled_pairs_config, scaled_pairs_kernel
from moe_ops.kernels.scaled_rows import FEW_ROWS, scaled_rows_config, scaled_rows_kernel, stored_dot
from moe_ops.kernels.tiles import tile_at, tile_capacity, tile_map, zero_tail_beside
from moe_ops.pairs import PAIRS, numbers_in
from moe_ops.slabs import features_at_once

IN_8_BITS = {
    16: LaunchConfig(16, 64, 128, 4, 4),
    32: LaunchConfig(32, 128, 128, 4, 3),
    64: LaunchConfig(64, 128, 128, 4, 3),
    128: LaunchConfig(128, 128, 128, 4, 3),
}
IN_16_BITS = {
    16: LaunchConfig(16, 64, 128, 4, 4),
    32: LaunchConfig(32, 64, 128, 4, 3),
    64: LaunchConfig(64, 64, 128, 4, 3),
    128: LaunchConfig(128, 128, 64, 8, 3),
}
IN_32_BITS = {16: LaunchConfig(16, 64, 32, 4, 2), 32: LaunchConfig(32, 64, 32, 4, 2)}
_TABLES = {1: IN_8_BITS, 2: IN_16_BITS, 4: IN_32_BITS}
_CONVERTS_E4M3 = 89  # compute capability, times ten
_SHORTEST_STEP = {1: 32, 2: 16, 4: 16}  # of depth in a product, by the bytes of a row's element
_SHORT_STEP = 64  # costs little
# Per expert, the most that tiles of 16, 32 and 64 rows are for. A tile that converts takes as long for fewer rows.
_EXACT_ROWS = (8.0, 28.0, 60.0)
_COPIED_ROWS = {1: 448, 2: 256}  # of an expert, by the numbers in an element of its weight
_ROWS_OF_SLABS = {1: 512, 2: 384}  # the same where no whole copy is made
_SLOWER = 1.75  # so many times as many where memory is slow, in which copies are written and read


@triton.jit
def _converted(weight, DTYPE: tl.constexpr):
    """In another dtype; the interpreter turns no 8 bits into 16 or 64."""
    if INTERPRETED and weight.dtype != DTYPE:
        weight = weight.to(tl.float32)
    return weight.to(DTYPE)


@triton.jit(do_not_specialize=["top_k", "num_tokens"])
def scaled_grouped_gemm_kernel(
    x_ptr, x_scale_ptr, slots_ptr, weight_ptr, weight_desc, scale_ptr, bias_ptr, out_ptr, tiles_ptr,
    top_k, num_tokens, features, depth, block_rows, block_columns, steps, steps_in_block,
    x_stride_m, x_stride_k, x_scale_stride_m, x_scale_stride_k,
    weight_stride_e, weight_stride_n, weight_stride_k,
    scale_stride_e, scale_stride_n, scale_stride_k, bias_stride_e, bias_stride_n, out_stride_m,
    ONE_BLOCK: tl.constexpr, EVEN: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows by BLOCK_N features a tile; `steps_in_block` of BLOCK_K go through a block of columns."""
    PRODUCT: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    feature_blocks = tl.cdiv(features, BLOCK_N)
    tile, num_tiles = tl.program_id(0), tl.load(tiles_ptr) * feature_blocks
    if tile < num_tiles:
        expert, row, end, feature_block = tile_at(tiles_ptr, tile, feature_blocks, BLOCK_M)
        rows = row + tl.arange(0, BLOCK_M)
        source, present = sources_of_tile(rows, end, slots_ptr, top_k, num_tokens)
        columns = feature_block * BLOCK_N + tl.arange(0, BLOCK_N)
        known = columns < features
        x_row_ptr = x_ptr + offset(source, x_stride_m)[None, :]
        expert_ptr = weight_ptr + offset(expert, weight_stride_e)
        weight_row_ptr = expert_ptr + offset(columns, weight_stride_n)[:, None]
        expert_scale_ptr = scale_ptr + offset(expert, scale_stride_e)
        scale_row_ptr = expert_scale_ptr + offset(columns // block_rows, scale_stride_n)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        product = tl.zeros((BLOCK_N, BLOCK_M), PRODUCT)
        for step in range(steps):
            block, step_in_block = 0, step  # a division in each step of one block costs 2 to 13 % (H200)
            if not ONE_BLOCK:
                block, step_in_block = step // steps_in_block, step % steps_in_block
            first = block * block_columns + step_in_block * BLOCK_K
            inner = first + tl.arange(0, BLOCK_K)
            inside = inner < tl.minimum(depth, (block + 1) * block_columns)
            weight_mask, x_mask = known[:, None], present[None, :]
            if not EVEN:
                weight_mask, x_mask = weight_mask & inside[None, :], x_mask & inside[:, None]
            x = tl.load(x_row_ptr + offset(inner, x_stride_k)[:, None], mask=x_mask, other=0.0)
            if weight_desc is None:
                stored = tl.load(weight_row_ptr + offset(inner, weight_stride_k)[None, :], mask=weight_mask)
            else:
                stored = weight_desc.load([expert, feature_block * BLOCK_N, first]).reshape(BLOCK_N, BLOCK_K)
            weight = _converted(stored, x.dtype)
            if not EVEN:  # what is not loaded may be NaN; of features past the last nothing is stored
                weight = tl.where(inside[None, :], weight, tl.zeros((1, 1), x.dtype))
            if ONE_BLOCK:
                product = stored_dot(weight, x, product)
                if x.dtype != stored.dtype:
                    product = finished(product)
            else:
                part = stored_dot(weight, x, tl.zeros((BLOCK_N, BLOCK_M), PRODUCT)).to(tl.float32)
                scale = tl.load(scale_row_ptr + offset(block, scale_stride_k), mask=known, other=0.0).to(
                    tl.float32
                )
                part *= scale[:, None]
                if x_scale_ptr is not None:
                    x_scale_ptrs = (
                        x_scale_ptr + offset(source, x_scale_stride_m) + offset(block, x_scale_stride_k)
                    )
                    part *= tl.load(x_scale_ptrs, mask=present, other=0.0).to(tl.float32)[None, :]
                acc += part
        if ONE_BLOCK:
            scale = tl.load(scale_row_ptr, mask=known, other=0.0).to(tl.float32)
            acc = product.to(tl.float32) * scale[:, None]
            if x_scale_ptr is not None:
                x_scale_ptrs = x_scale_ptr + offset(source, x_scale_stride_m)
                acc *= tl.load(x_scale_ptrs, mask=present, other=0.0).to(tl.float32)[None, :]
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + offset(expert, bias_stride_e) + offset(columns, bias_stride_n)
            acc += tl.load(bias_ptrs, mask=known, other=0.0).to(tl.float32)[:, None]
        out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * out_stride_m + columns[:, None]
        out_mask = (rows < end)[None, :] & (columns < features)[:, None]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
    if TAIL:
        zero_tail_beside(tiles_ptr, out_ptr, out_stride_m, tile, num_tiles)


def takes(args: Any, gpu: Gpu) -> bool:
    """Whether the kernel is for such arguments: Triton 3.6 does not compile a float64 product of converted operands."""
    if torch.float64 in (args.x.dtype, args.dtype):
        return False
    is_exact = args.x_scale is None and args.x.dtype == args.dtype
    rows = _num_slots(args) / max(args.weight.weight.shape[0], 1)
    return not (is_exact and copies(args.weight, args.dtype, rows, gpu))


def copies(linear: Any, dtype: torch.dtype, rows: float, gpu: Gpu, halves: int = 1) -> bool:
    """Whether a weight had better be there in the dtype of exact rows for a while, with so many rows an expert.

    On an H200 layers of Mixtral, Qwen3-30B-A3B, OLMoE and gpt-oss-20b then take 0.93 to 0.97 of the time with 256 rows
    in 4 bits, 0.80 to 0.85 with 448 and 0.55 to 0.71 from 1024 on; in 8 bits 0.89 to 0.96 with 448, 0.63 to 0.78 then.
    By slabs those of gpt-oss-120b and DeepSeek-V3 take 0.82 to 0.90 with 512 rows in 4 bits, 0.92 to 0.99 in 8, with
    256 up to 1.26. On an H100 layers of Mixtral and OLMoE take 1.07 to 1.19 with 256 rows in 4 bits, 0.87 to 0.94 with
    448, in 8 bits 1.01 to 1.09 and with 1024 0.83; gpt-oss-120b's by slabs 1.00 to 1.12 with 512, 0.80 to 0.92 then.
    Products with integers in 4 bits are of what a copy holds; else bfloat16 has the range for the scales, not float16.
    """
    is_rounded = linear.weight.dtype == PAIRS and linear.scale.dtype not in SCALES
    fits = dtype == torch.bfloat16 or (dtype == torch.float16 and is_rounded)
    at_once = features_at_once(linear, dtype, halves)
    is_whole = at_once * halves == linear.weight.shape[1]
    least = (_COPIED_ROWS if is_whole else _ROWS_OF_SLABS)[numbers_in(linear.weight.dtype)]
    return fits and rows >= least * (_SLOWER if gpu.has_slow_memory else 1) and at_once > 0


def _num_slots(args: Any) -> int:
    return args.x.shape[0] if args.sorted_slots is None else args.sorted_slots.shape[0]


def scaled_grouped_gemm_program(
    args: Any, gpu: Gpu, num_ids: int | None = None, tail: bool = True
) -> Program:
    """The program of `moe.scaled_grouped_gemm`. Raises ValueError for weights that the GPU cannot multiply in.

    num_ids: None when the slots chose among the experts of the weight; else among so many, of which these are here.
    tail: rows past the last expert are written as zeros (else not at all).
    """
    expect_converted(args.weight, gpu)
    num_slots = _num_slots(args)
    num_experts, features, _ = args.weight.weight.shape
    kernel, config = _kernel_and_config(args, num_slots / (num_ids or num_experts), gpu)
    tiles, map_launch = tile_map(num_slots, num_experts, config.block_m, split=False)
    out = Buffer("product", (num_slots, features), args.dtype)
    given = {
        **_row_args(args, num_slots),
        **_weight_args(args.weight, config.block_n, _step(args, kernel, config.block_k), gpu),
        "out_ptr": Ref(out.name),
        "tiles_ptr": Ref(tiles.name),
        "features": features,
        "out_stride_m": features,
        "TAIL": tail,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }
    if isinstance(config, PairsConfig):
        given |= pairs_args(config, args, given["weight_desc"] is not None)
    given = {name: given[name] for name in kernel.arg_names}
    grid = (tile_capacity(num_slots, num_experts, config.block_m) * cdiv(features, config.block_n),)
    launch = Launch(kernel, grid, given, config.num_warps, config.num_stages)
    return Program((tiles, out), (map_launch, launch), (out.name,))


def _row_args(args: Any, num_slots: int) -> dict[str, Any]:
    x, scale, slots = args.x, args.x_scale, args.sorted_slots
    return {
        "x_ptr": Ref("x"),
        "x_scale_ptr": None if scale is None else Ref("x_scale"),
        "slots_ptr": None if slots is None else Ref("sorted_slots"),
        "top_k": num_slots // max(x.shape[0], 1),
        "num_tokens": x.shape[0],
        **stride_args("x_stride", x.strides, "mk"),
        **stride_args("x_scale_stride", (0, 0) if scale is None else scale.strides, "mk"),
    }


def _weight_args(linear: Any, block_n: int, block_k: int, gpu: Gpu) -> dict[str, Any]:
    """What a kernel needs of weights, scales and bias, and how it goes through the depth."""
    weight, bias, depth = linear.weight, linear.bias, linear.depth
    block_columns = min(linear.block_columns, depth)
    shared = block_columns % block_k != 0
    in_block = cdiv(block_columns, block_k)
    return {
        "weight_ptr": Ref("weight"),
        "weight_desc": _descriptor(linear, (1, block_n, block_k // numbers_in(weight.dtype)), gpu),
        "scale_ptr": Ref("scale"),
        **zero_args("zero", linear.zero),
        **global_args("global_scale", linear),
        **bias_args(None if bias is None else Operand("bias", bias)),
        "depth": depth,
        "block_rows": linear.block_rows,
        "block_columns": block_columns,
        "steps": in_block * linear.scale.shape[2] if shared else cdiv(depth, block_k),
        "steps_in_block": in_block,
        **stride_args("weight_stride", weight.strides, "enk"),
        **stride_args("scale_stride", linear.scale.strides, "enk"),
        "ONE_BLOCK": linear.scale.shape[2] == 1,
        "EVEN": not shared and depth % block_k == 0,
        "BLOCK_K": block_k,
    }


def _descriptor(linear: Any, box: tuple[int, ...], gpu: Gpu) -> Descriptor | None:
    """Of weights that come in boxes, of which some begin where a block does."""
    weight = linear.weight
    first_columns = (0, linear.block_columns) if _has_blocks(linear) else (0,)
    boxed = replace(tma.boxed_weight(weight, False), first_columns=first_columns)
    if tma.is_transposed(weight) or not tma.allows_bytes(gpu, weight, boxed):
        return None
    return Descriptor("weight", boxed.shape, boxed.strides, box)


def is_boxed(linear: Any, gpu: Gpu) -> bool:
    """Whether a weight comes in boxes."""
    return _descriptor(linear, (1, 1, 1), gpu) is not None


def _kernel_and_config(args: Any, rows_per_expert: float, gpu: Gpu) -> tuple[Any, LaunchConfig]:
    """By measurement on an H200.

    In 8 bits tiles of 64 rows are as fast as those of 32, and up to a fifth faster where few experts have most rows. Of
    16 rows they are where steps would be short: up to a third faster with such routing.
    """
    table, linear = _TABLES[args.x.dtype.itemsize], args.weight
    if linear.weight.dtype == PAIRS:
        return scaled_pairs_kernel, scaled_pairs_config(args, rows_per_expert, is_boxed(linear, gpu), gpu)
    if table is not IN_8_BITS:
        return scaled_grouped_gemm_kernel, table[min(rows_per_tile(rows_per_expert, _EXACT_ROWS), max(table))]
    wanted = rows_per_tile(rows_per_expert)
    is_low = wanted == min(table) and linear.depth % table[wanted].block_k == 0
    if not is_low and _can_be_right(args, gpu):
        return scaled_rows_kernel, scaled_rows_config(linear, wanted)
    return scaled_grouped_gemm_kernel, table[min(wanted, _most_rows(args, gpu))]


def _most_rows(args: Any, gpu: Gpu) -> int:
    """Of a tile in 8 bits: partial sums beside a sum take registers, and so do rows that load one by one."""
    most = max(IN_8_BITS) if is_tuned(gpu) else 64
    if not _has_blocks(args.weight):
        return most
    return most // 2 if loads_rows_in_pieces(args.x) else min(IN_8_BITS)


def _can_be_right(args: Any, gpu: Gpu) -> bool:
    """Whether features of a tile share scales and steps divide blocks, and boxes of weights and pieces of rows load.

    Else much would spill, as it does on GPUs after Hopper.
    """
    linear, config = args.weight, FEW_ROWS
    is_shared = linear.block_rows >= linear.weight.shape[1] or linear.block_rows % config.block_n == 0
    is_divided = is_shared and linear.block_columns % _SHORTEST_STEP[args.x.dtype.itemsize] == 0
    is_boxed = _descriptor(linear, (1, config.block_n, config.block_k), gpu) is not None
    loads = is_boxed and loads_rows_in_pieces(args.x)
    return (is_divided or not _has_blocks(linear)) and loads and is_tuned(gpu)


def _has_blocks(linear: Any) -> bool:
    """Whether the depth of a weight has several scales."""
    return linear.scale.shape[2] > 1


def _step(args: Any, kernel: Any, longest: int) -> int:
    """Depth of a step: one that divides a block and the depth, as far as that is not too short for the depth of one.

    Rows on the left are masked instead where only the depth is not divided.
    """
    itemsize, linear = args.x.dtype.itemsize, args.weight
    if kernel is scaled_pairs_kernel:
        return longest
    depth = linear.weight.shape[2]
    block_columns = min(linear.block_columns, depth)
    shortest = _SHORTEST_STEP[itemsize] if block_columns < 8 * _SHORT_STEP else min(_SHORT_STEP, longest)
    divided = [block_columns] if _has_blocks(linear) else []
    if kernel is scaled_grouped_gemm_kernel:
        divided.append(depth)
    while longest > shortest and any(size % longest for size in divided):
        longest //= 2
    return longest


def expect_converted(linear: Any, gpu: Gpu) -> None:
    """Raises ValueError for weights that the GPU cannot convert."""
    if not converts(linear, gpu):
        name, expected = ("scale", PAIRS) if linear.weight.dtype == PAIRS else ("weight", torch.int8)
        raise ValueError(f"{name} has dtype {FLOAT8}: expected {expected} on sm_{gpu.capability}")


def converts(linear: Any, gpu: Gpu) -> bool:
    """Whether the GPU turns a product's weights into other dtypes, and reads its scales."""
    return FLOAT8 not in (linear.weight.dtype, linear.scale.dtype) or gpu.capability >= _CONVERTS_E4M3
