"""A token in float8: the rows of its experts' weights times the token, on no tensor core and with no sort.

A program, of one warp, reads the gate and up rows of some features, or down rows, and scales in float32 what it
multiplies them with: so a scale is met once for all rows of a program. On an H200 a token of gpt-oss-120b takes 43
microseconds so and 56 with tiles, one of Qwen3-30B 24 and 29; two tokens and more, and int8, take longer.
"""

from typing import Any

import triton
import triton.language as tl

from moe_ops.kernels.activation import gate_up_columns
from moe_ops.kernels.common import apply_activation, cdiv, local_expert, next_power_of_2, offset
from moe_ops.kernels.decode_args import route_args
from moe_ops.kernels.gemm import Operand, bias_args
from moe_ops.kernels.program import Buffer, Launch, Ref
from moe_ops.kernels.scaled import stride_args

_STEP = 1024  # of the depth
# Rows of a program, gate and up rows together: more of those that are short, up to so much or with a gate twice that.
_ROWS, _SHORT_ROWS, _SHORT = 4, 8, 1024


@triton.jit
def _scaled_rows(x, scale_row_ptr, block, live, scale_stride_k, ONE_BLOCK: tl.constexpr):
    """x times the scales of the weight's blocks, unless there is one."""
    if not ONE_BLOCK:
        x *= tl.load(scale_row_ptr + offset(block, scale_stride_k), mask=live, other=0.0).to(tl.float32)
    return x


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
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, ids_ptr, map_ptr, out_ptr, inverse_ptr,
    top_k, slots_of_row, num_ids, num_experts, features, block_rows, block_columns, x_blocks,
    ids_stride_t, ids_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    scale_stride_e, scale_stride_n, scale_stride_k, bias_stride_e, bias_stride_n,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    ONE_BLOCK: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[slot] = gate(weight[expert of slot] @ x[slot // slots_of_row]), or without a gate.

    A dropped slot writes nothing. inverse: where each slot's row is, -1 if there is none.
    """
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
        x_row_ptr = x_ptr + offset(slot // slots_of_row, DEPTH)
        x_scale_row_ptr = x_scale_ptr + offset(slot // slots_of_row, x_blocks)
        expert_ptr = weight_ptr + offset(expert, weight_stride_e)
        expert_scale_ptr = scale_ptr + offset(expert, scale_stride_e)
        gate_ptr = expert_ptr + offset(gate_rows, weight_stride_n)[:, None]
        up_ptr = expert_ptr + offset(up_rows, weight_stride_n)[:, None]
        gate_scale_ptr = expert_scale_ptr + offset(gate_block // block_rows, scale_stride_n)
        up_scale_ptr = expert_scale_ptr + offset(up_block // block_rows, scale_stride_n)
        gate, up = tl.zeros((BLOCK_N,), tl.float32), tl.zeros((BLOCK_N,), tl.float32)
        for start in tl.static_range(0, DEPTH, BLOCK_K):
            inner = start + tl.arange(0, BLOCK_K)
            live, block = inner < DEPTH, inner // block_columns
            mask, places = inside[:, None] & live[None, :], offset(inner, weight_stride_k)[None, :]
            weight = tl.load(gate_ptr + places, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                up_weight = tl.load(up_ptr + places, mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_row_ptr + inner, mask=live, other=0.0).to(tl.float32)
            x *= tl.load(x_scale_row_ptr + block, mask=live, other=0.0)
            x = tl.where(live, x, 0.0)
            scaled = _scaled_rows(x, gate_scale_ptr, block, live, scale_stride_k, ONE_BLOCK)
            gate += _sums(weight, scaled, live, start + BLOCK_K > DEPTH)
            if GATED:
                scaled = _scaled_rows(x, up_scale_ptr, block, live, scale_stride_k, ONE_BLOCK)
                up += _sums(up_weight, scaled, live, start + BLOCK_K > DEPTH)
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
    """Whether a layer is for this kernel."""
    is_float8 = args.w13.weight.dtype.is_floating_point
    return args.topk_ids.shape[0] == 1 and is_float8 and args.rows == "quantised"


def scaled_gemv_launch(args: Any, rows: str, name: str, out: Buffer, gate: dict[str, Any]) -> Launch:
    """Of the weight called `name` and rows, of "token" or of "slot", to `out`. gate: of `activation_args`."""
    (num_tokens, top_k), linear = args.topk_ids.shape, getattr(args, name)
    weight, bias, features = linear.weight, linear.bias, out.shape[1]
    block_n = _features(linear, features, gate)
    given = {
        **route_args(args),
        **bias_args(None if bias is None else Operand(f"{name}_bias", bias)),
        **_block_args(linear),
        **gate,
        "x_ptr": Ref(f"{rows}_rows"),
        "x_scale_ptr": Ref(f"{rows}_scale"),
        "weight_ptr": Ref(name),
        "scale_ptr": Ref(f"{name}_scale"),
        "out_ptr": Ref(out.name),
        "inverse_ptr": Ref("inverse") if rows == "token" else None,
        "top_k": top_k,
        "slots_of_row": top_k if rows == "token" else 1,
        "features": features,
        "DEPTH": weight.shape[2],
        "BLOCK_N": block_n,
        "BLOCK_K": min(next_power_of_2(weight.shape[2]), _STEP),
    }
    grid = (num_tokens * top_k * cdiv(features, block_n),)
    return Launch(scaled_gemv_kernel, grid, given, 1, 1)


def _block_args(linear: Any) -> dict[str, Any]:
    return {
        "block_rows": linear.block_rows,
        "block_columns": min(linear.block_columns, linear.weight.shape[2]),
        "x_blocks": linear.scale.shape[2],
        "ONE_BLOCK": linear.scale.shape[2] == 1,
        **stride_args("weight_stride", linear.weight.strides, "enk"),
        **stride_args("scale_stride", linear.scale.strides, "enk"),
    }


def _features(linear: Any, features: int, gate: dict[str, Any]) -> int:
    """Of a program: its rows share scales, unless there is one block of columns."""
    halves, apart = 2 if gate["GATED"] else 1, 2 if gate["INTERLEAVED"] else 1
    block_n = (_SHORT_ROWS if linear.weight.shape[2] <= halves * _SHORT else _ROWS) // halves
    shared = linear.block_rows % (apart * block_n) == 0 and (halves == apart or features % block_n == 0)
    return block_n if shared or linear.scale.shape[2] == 1 else 1
