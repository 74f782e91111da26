"""Few tokens and weights of 8 bits: the rows of their experts' weights times each token, with no sort.

A program, of one warp, reads the gate and up rows of some features, or down rows, and scales in float32 what it
multiplies them with: so a scale is met once for all rows of a program. Short rows are quantised by each program that
multiplies with them, to the same bits, which spares a launch; exact ones are multiplied as they are. On an H200 a token
of gpt-oss-120b takes 41 microseconds so and 50 with tiles, one of Qwen3-30B 20 and 29, four of these 50 and 54; int8
takes longer. Exact ones take 38 and 69, 20 and 37, 49 and 71, for no weight is converted to 16 bits; int8 too.
"""

import math
from typing import Any

import triton
import triton.language as tl

from moe_ops.kernels.activation import gate_up_columns
from moe_ops.kernels.common import INTERPRETED, apply_activation, cdiv, local_expert, next_power_of_2, offset
from moe_ops.kernels.decode_args import route_args
from moe_ops.kernels.gemm import Operand, bias_args
from moe_ops.kernels.program import Buffer, Launch, Ref, TensorMeta
from moe_ops.kernels.quantise_rows import (
    factor_of,
    given_scale,
    input_scale_args,
    quantised,
    scale_of,
    with_largest,
)
from moe_ops.kernels.scaled_args import stride_args
from moe_ops.pairs import PAIRS
from moe_ops.types import LEAST_LARGEST, largest_of

_STEP, _WHOLE = 1024, 2048  # of the depth; up to so much exact rows have one step
# Rows of a program, gate and up rows together: more of those that are short, up to so much or with a gate twice that.
_ROWS, _SHORT_ROWS, _SHORT = 4, 8, 1024
# Columns of a row that programs quantise: a token's, if it has one scale, and a slot's. Beyond it a launch does.
_MOST_OF_TOKEN, _MOST_OF_SLOT = 2048, 1024
# Of more than one: each of their slots reads weights of its own, all together up to so much.
_MOST_TOKENS, _MOST_BYTES = 4, 200e6
_MOST_EXACT_TOKENS = {True: 8, False: 4}  # by whether weights are in float8


@triton.jit
def _largest_of_row(x_row_ptr, x_stride_k, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    largest = tl.zeros((1,), tl.float32)
    for start in tl.static_range(0, DEPTH, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_row_ptr + offset(inner, x_stride_k), mask=inner < DEPTH, other=0.0)
        largest = with_largest(largest, x.to(tl.float32)[None, :])
    return largest


@triton.jit
def _as_quantised(x, scale, factor, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    """What the row is once it has been quantised, with its scale [1] and one over it; a NaN stays one."""
    blocks = tl.reshape(x, (1, x.shape[0]))
    rounded = quantised(blocks, factor, DTYPE, LARGEST).to(tl.float32) * scale[:, None]
    if INTERPRETED:  # whose float8 has none; a GPU would wait for it
        rounded = tl.where(blocks != blocks, blocks, rounded)
    return tl.reshape(rounded, x.shape)


@triton.jit
def _as_quantised_by_blocks(
    x, DTYPE: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, COUNT: tl.constexpr
):
    """The same of COUNT blocks that have each their scale."""
    blocks = tl.reshape(x, (COUNT, x.shape[0] // COUNT))
    largest = with_largest(tl.zeros((COUNT,), tl.float32), blocks)
    rounded = quantised(blocks, factor_of(largest, LARGEST, LEAST), DTYPE, LARGEST).to(tl.float32)
    return tl.reshape(rounded * scale_of(largest, LARGEST, LEAST)[:, None], x.shape)


@triton.jit
def _times_scales(
    x, scale_ptr, start, stride, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr
):
    """x, the columns from `start` on, times the scales of the blocks of COLUMNS that they are in.

    COUNT: so many parts of x have each a scale.
    """
    PART: tl.constexpr = x.shape[0] // COUNT
    blocks = (start + PART * tl.arange(0, COUNT)) // COLUMNS
    scale = tl.load(scale_ptr + offset(blocks, stride), mask=blocks * COLUMNS < DEPTH, other=0.0)
    return tl.reshape(tl.reshape(x, (COUNT, PART)) * scale.to(tl.float32)[:, None], x.shape)


@triton.jit
def _sums(weight, x, live, IS_CUT: tl.constexpr):
    """weight @ x. On a GPU what is not loaded of float8 may be NaN."""
    weight = weight.to(tl.float32)
    if IS_CUT:
        weight = tl.where(live[None, :], weight, 0.0)
    return tl.sum(weight * x[None, :], 1)


@triton.jit
def _finished(
    sums, rows, inside, expert, scale_ptr, bias_ptr, block_rows, scale_stride_n, bias_stride_e, bias_stride_n,
    ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """What products come to, once the one block's scales and the bias have joined."""
    if ONE_BLOCK:
        scale_ptrs = scale_ptr + offset(rows // block_rows, scale_stride_n)
        sums *= tl.load(scale_ptrs, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + offset(expert, bias_stride_e) + offset(rows, bias_stride_n)
        sums += tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)
    return sums


@triton.jit
def scaled_gemv_kernel(
    x_ptr, x_scale_ptr, input_scale_ptr, weight_ptr, scale_ptr, bias_ptr, ids_ptr, map_ptr, out_ptr, inverse_ptr,
    top_k, slots_of_row, num_ids, num_experts, features, block_rows, x_blocks, num_scales, input_scale_stride,
    x_stride_m, x_stride_k, ids_stride_t, ids_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    scale_stride_e, scale_stride_n, scale_stride_k, bias_stride_e, bias_stride_n,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr,
    EXACT: tl.constexpr, ONE_BLOCK: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """out[slot] = gate(weight[expert of slot] @ x[slot // slots_of_row]), or without a gate.

    Rows without scales are quantised first, by each program its row, unless EXACT. A dropped slot writes nothing.
    inverse: where each slot's row is, -1 if there is none.
    """
    DTYPE: tl.constexpr = weight_ptr.dtype.element_ty
    blocks = tl.cdiv(features, BLOCK_N)
    slot, first = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BLOCK_N
    expert = local_expert(
        ids_ptr, map_ptr, slot, slot >= 0, top_k, ids_stride_t, ids_stride_k, num_ids, num_experts
    )
    if inverse_ptr is not None:
        tl.store(inverse_ptr + slot, tl.where(expert < num_experts, slot, -1), mask=first == 0)
    if expert < num_experts:
        columns = first + tl.arange(0, BLOCK_N)
        inside = columns < features
        gate_rows, up_rows = gate_up_columns(columns, features, GATED, INTERLEAVED)
        gate_block, up_block = gate_up_columns(first, features, GATED, INTERLEAVED)
        x_row_ptr = x_ptr + offset(slot // slots_of_row, x_stride_m)
        expert_ptr = weight_ptr + offset(expert, weight_stride_e)
        expert_scale_ptr = scale_ptr + offset(expert, scale_stride_e)
        gate_ptr = expert_ptr + offset(gate_rows, weight_stride_n)[:, None]
        up_ptr = expert_ptr + offset(up_rows, weight_stride_n)[:, None]
        gate_scale_ptr = expert_scale_ptr + offset(gate_block // block_rows, scale_stride_n)
        up_scale_ptr = expert_scale_ptr + offset(up_block // block_rows, scale_stride_n)
        QUANTISES: tl.constexpr = x_scale_ptr is None and not EXACT
        ONE_SCALE: tl.constexpr = QUANTISES and (ONE_BLOCK or input_scale_ptr is not None)
        if input_scale_ptr is not None:
            row_scale, row_factor = given_scale(
                input_scale_ptr, num_scales, input_scale_stride, LEAST, SCALES
            )
        elif ONE_SCALE:
            largest = _largest_of_row(x_row_ptr, x_stride_k, DEPTH, BLOCK_K)
            row_scale, row_factor = scale_of(largest, LARGEST, LEAST), factor_of(largest, LARGEST, LEAST)
        gate, up = tl.zeros((BLOCK_N,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
        for start in tl.static_range(0, DEPTH, BLOCK_K):
            inner = start + tl.arange(0, BLOCK_K)
            live = inner < DEPTH
            mask, places = inside[:, None] & live[None, :], offset(inner, weight_stride_k)[None, :]
            weight = tl.load(gate_ptr + places, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                up_weight = tl.load(up_ptr + places, mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_row_ptr + offset(inner, x_stride_k), mask=live, other=0.0).to(tl.float32)
            if ONE_SCALE:
                x = _as_quantised(x, row_scale, row_factor, DTYPE, LARGEST)
            elif QUANTISES:
                x = _as_quantised_by_blocks(x, DTYPE, LARGEST, LEAST, COUNT)
            elif not EXACT:
                x_scale_row_ptr = x_scale_ptr + offset(slot // slots_of_row, x_blocks)
                x = _times_scales(x, x_scale_row_ptr, start, 1, DEPTH, COLUMNS, COUNT)
            x = tl.where(live, x, 0.0)
            scaled, up_scaled = x, x
            if not ONE_BLOCK:
                scaled = _times_scales(x, gate_scale_ptr, start, scale_stride_k, DEPTH, COLUMNS, COUNT)
            gate += _sums(weight, scaled, live, start + BLOCK_K > DEPTH)
            if GATED:
                if not ONE_BLOCK:
                    up_scaled = _times_scales(x, up_scale_ptr, start, scale_stride_k, DEPTH, COLUMNS, COUNT)
                up += _sums(up_weight, up_scaled, live, start + BLOCK_K > DEPTH)
        gate = _finished(
            gate, gate_rows, inside, expert, expert_scale_ptr, bias_ptr, block_rows, scale_stride_n,
            bias_stride_e, bias_stride_n, ONE_BLOCK,
        )  # fmt: skip
        if GATED:
            up = _finished(
                up, up_rows, inside, expert, expert_scale_ptr, bias_ptr, block_rows, scale_stride_n,
                bias_stride_e, bias_stride_n, ONE_BLOCK,
            )  # fmt: skip
        if NAME is not None:
            gate = apply_activation(gate, up, NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT)
        out_ptrs = out_ptr + offset(slot, features) + columns
        tl.store(out_ptrs, gate.to(out_ptr.dtype.element_ty), mask=inside)


def multiplies_rows(args: Any) -> bool:
    """Whether a layer is for this kernel: a token, or a few whose experts are all here, small or mostly different."""
    if args.rows == "exact":
        return _multiplies_exact_rows(args)
    w13, w2 = args.w13.weight, args.w2.weight
    num_tokens, num_slots = args.topk_ids.shape[0], math.prod(args.topk_ids.shape)
    num_bytes = num_slots * (math.prod(w13.shape[1:]) + math.prod(w2.shape[1:]))
    small = num_slots <= w13.shape[0] == args.placement.num_ids(w13.shape[0]) and num_bytes <= _MOST_BYTES
    few = num_tokens == 1 or (num_tokens <= _MOST_TOKENS and small)
    return few and w13.dtype.is_floating_point


def _multiplies_exact_rows(args: Any) -> bool:
    """By measurement on an H200: each slot reads its expert's weights, those that slots share as well.

    With up to half as many slots as experts layers of seven models take 0.48 to 0.98 of the time of tiles in float8, up
    to four tokens 0.58 to 1.00 in int8; where features have scales of groups of their own, a token 0.62 to 1.02.
    """
    (num_tokens, top_k), num_experts = args.topk_ids.shape, args.w13.weight.shape[0]
    linears = (args.w13, args.w2)
    if any(each.weight.dtype == PAIRS or each.weight.strides[2] != 1 for each in linears):
        return False
    are_apart = 2 * num_tokens * top_k <= num_experts == args.placement.num_ids(num_experts)
    most = min(_most_exact_tokens(each) for each in linears)
    return num_tokens == 1 or (num_tokens <= most and are_apart)


def _most_exact_tokens(linear: Any) -> int:
    has_groups = linear.block_rows == 1 and not _is_one_block(linear)
    return 1 if has_groups else _MOST_EXACT_TOKENS[linear.weight.dtype.is_floating_point]


def reads_plain_rows(args: Any, name: str) -> bool:
    """Whether nothing quantises the rows for the weight of that name: exact ones, or such as the kernel quantises."""
    linear, is_given = getattr(args, name), getattr(args, f"{name}_input_scale") is not None
    depth = linear.weight.shape[2]
    if args.rows == "exact":
        return True
    if name == "w13":
        return depth <= _MOST_OF_TOKEN and (is_given or _is_one_block(linear))
    step = _step(linear, args.rows)
    return depth <= _MOST_OF_SLOT and (is_given or _scales_of(step, linear) < step)


def scaled_gemv_launch(
    args: Any, rows: tuple[str, TensorMeta], name: str, out: Buffer, gate: dict[str, Any]
) -> Launch:
    """Of the weight called `name` and rows, of tokens or of slots, to `out`. gate: of `activation_args`.

    rows: `name` and metadata; quantised ones have scales, called `name` and _scale.
    """
    (num_tokens, top_k), linear, (x, x_meta) = args.topk_ids.shape, getattr(args, name), rows
    weight, bias, features = linear.weight, linear.bias, out.shape[1]
    block_n, step = _features(args, linear, features, gate), _step(linear, args.rows)
    from_tokens, input_scale = name == "w13", f"{name}_input_scale"
    given = {
        **route_args(args),
        **bias_args(None if bias is None else Operand(f"{name}_bias", bias)),
        **_block_args(linear, step),
        **input_scale_args(getattr(args, input_scale), input_scale),
        **gate,
        "x_ptr": Ref(x),
        "x_scale_ptr": None if reads_plain_rows(args, name) else Ref(f"{x}_scale"),
        **stride_args("x_stride", x_meta.strides, "mk"),
        "weight_ptr": Ref(name),
        "scale_ptr": Ref(f"{name}_scale"),
        "out_ptr": Ref(out.name),
        "inverse_ptr": Ref("inverse") if from_tokens else None,
        "top_k": top_k,
        "slots_of_row": top_k if from_tokens else 1,
        "features": features,
        "EXACT": args.rows == "exact",
        "DEPTH": weight.shape[2],
        "BLOCK_N": block_n,
        "BLOCK_K": step,
    }
    grid = (num_tokens * top_k * cdiv(features, block_n),)
    return Launch(scaled_gemv_kernel, grid, given, 1, 1)


def _step(linear: Any, rows: str) -> int:
    whole = next_power_of_2(linear.weight.shape[2])
    return whole if rows == "exact" and whole <= _WHOLE else min(whole, _STEP)


def _is_one_block(linear: Any) -> bool:
    return linear.scale.shape[2] == 1


def _scales_of(step: int, linear: Any) -> int:
    """How many scales a step reads for a weight's row: one for each column where blocks end within it."""
    if _is_one_block(linear):
        return 1
    return step if step % linear.block_columns else step // linear.block_columns


def _block_args(linear: Any, step: int) -> dict[str, Any]:
    return {
        "block_rows": linear.block_rows,
        "x_blocks": linear.scale.shape[2],
        "LARGEST": largest_of(linear.weight.dtype),
        "LEAST": LEAST_LARGEST,
        "COLUMNS": min(linear.block_columns, linear.weight.shape[2]),
        "COUNT": _scales_of(step, linear),
        "ONE_BLOCK": _is_one_block(linear),
        **stride_args("weight_stride", linear.weight.strides, "enk"),
        **stride_args("scale_stride", linear.scale.strides, "enk"),
    }


def _features(args: Any, linear: Any, features: int, gate: dict[str, Any]) -> int:
    """Of a program: its rows share scales, unless there is one block of columns. Many share what quantising takes."""
    halves, apart = 2 if gate["GATED"] else 1, 2 if gate["INTERLEAVED"] else 1
    are_many = args.rows == "quantised" and linear.weight.shape[2] <= halves * _SHORT
    block_n = (_SHORT_ROWS if are_many else _ROWS) // halves
    shared = linear.block_rows % (apart * block_n) == 0 and (halves == apart or features % block_n == 0)
    return block_n if shared or _is_one_block(linear) else 1
