"""Decode with weights whose columns lie together in memory: partial products of a slot, then their sum.

Neighbouring columns of one slot are then what a program should read, and a short part of their depth, all at once: one
that goes through the whole depth waits for each step before it loads the next. What the parts give is added up by
launches of their own, in order: of gate and up columns where the activation is applied, and of all slots of a token.
"""

import triton
import triton.language as tl

from moe_ops.kernels.common import joined, local_expert, offset
from moe_ops.kernels.decode import activate_and_store, bias_of, weight_rows


@triton.jit
def part_and_slot(program, num_slots, features, BLOCK_N: tl.constexpr, APART: tl.constexpr):
    """(part of the depth, slot, block of columns) of a program; those of a second weight come behind the first's."""
    blocks = tl.cdiv(features, BLOCK_N)
    if APART:
        blocks *= 2
    row = program // blocks
    return row // num_slots, row % num_slots, program % blocks


@triton.jit
def multiply_columns(
    x_ptr, weight_ptr, up_ptr, out_ptr, x_row, expert, is_kept, part, slot, block, num_slots, features,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    F64: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[part, slot] = weight[expert] @ x[x_row] over the part of the depth, for a block of columns.

    Zeros for a slot that is not kept, so that who adds up need not wait for its expert.
    """
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    width, before = features, 0
    if up_ptr is not None:
        blocks = tl.cdiv(features, BLOCK_N)
        weight_ptr = tl.where(block < blocks, weight_ptr, up_ptr)
        before = tl.where(block < blocks, 0, features)
        width, block = 2 * features, block % blocks
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < features
    column_ptr = weight_ptr + offset(expert, weight_stride_e) + offset(columns, weight_stride_n)
    x_row_ptr = x_ptr + offset(x_row, x_stride_m)
    start, inner = part * PART, tl.arange(0, BLOCK_K)
    end = tl.where(is_kept, tl.minimum(start + PART, DEPTH), start)
    total = tl.zeros((BLOCK_N,), ACC)
    # One step at a time: a step fills the registers, and other programs of the multiprocessor load meanwhile.
    for k in tl.range(start, end, BLOCK_K, num_stages=1):
        mask = inner < DEPTH - k
        weight_ptrs = column_ptr[:, None] + offset(k + inner, weight_stride_k)[None, :]
        weight = tl.load(
            weight_ptrs, mask=inside[:, None] & mask[None, :], other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_row_ptr + offset(k + inner, x_stride_k), mask=mask, other=0.0)
        total += tl.sum(weight.to(ACC) * x.to(ACC)[None, :], 1)
    row = part * num_slots + slot
    tl.store(out_ptr + offset(row, width) + before + columns, total, mask=inside)


@triton.jit
def gemv_columns_kernel(
    x_ptr, weight_ptr, up_ptr, ids_ptr, map_ptr, out_ptr,
    top_k, slots_per_row, num_slots, num_ids, num_experts, features,
    ids_stride_t, ids_stride_k, x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    F64: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[p, slot] = weight[expert of slot] @ x[slot // slots_per_row] over the p-th PART of the depth.

    Zeros for a dropped slot.
    """
    part, slot, block = part_and_slot(tl.program_id(0), num_slots, features, BLOCK_N, up_ptr is not None)
    expert = local_expert(
        ids_ptr, map_ptr, slot, slot >= 0, top_k, ids_stride_t, ids_stride_k, num_ids, num_experts
    )
    multiply_columns(
        x_ptr, weight_ptr, up_ptr, out_ptr, slot // slots_per_row, expert, expert < num_experts, part, slot, block,
        num_slots, features, x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
        F64, DEPTH, PART, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def gemv_gate_kernel(
    partial_ptr, bias_ptr, up_bias_ptr, ids_ptr, map_ptr, out_ptr,
    top_k, num_slots, num_ids, num_experts, features,
    ids_stride_t, ids_stride_k, bias_stride_e, bias_stride_n, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    F64: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[slot] = activation(partial[:, slot] added up + bias[expert of slot]), of a dropped slot without a bias."""
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    blocks = tl.cdiv(features, BLOCK_N)
    slot, first = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BLOCK_N
    expert = local_expert(
        ids_ptr, map_ptr, slot, slot >= 0, top_k, ids_stride_t, ids_stride_k, num_ids, num_experts
    )
    kept = tl.where(expert < num_experts, features, 0)  # columns that have a bias, and operands of a formula
    column, row = weight_rows(first, features, BLOCK_N, GATED, INTERLEAVED, False)
    part, inside = tl.arange(0, BLOCK_P), column < features
    partial_rows = offset(part * num_slots + slot, 2 * features if GATED else features)
    partial_ptrs = partial_ptr + partial_rows[:, None] + row[None, :]
    total = tl.sum(tl.load(partial_ptrs, mask=(part < PARTS)[:, None] & inside[None, :], other=0.0), 0)
    _, bias_row = weight_rows(first, features, BLOCK_N, GATED, INTERLEAVED, up_bias_ptr is not None)
    total += bias_of(
        bias_ptr, up_bias_ptr, expert, bias_row, column < kept, bias_stride_e, bias_stride_n, ROWS, ACC
    )
    activate_and_store(
        total, out_ptr, slot, expert, first, kept, features, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
        NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT, BLOCK_N,
    )  # fmt: skip


@triton.jit
def gemv_sum_kernel(
    partial_ptr, bias_ptr, ids_ptr, map_ptr, weights_ptr,
    shared_ptr, shared_gate_ptr, residual_ptr, out_ptr,
    num_slots, num_ids, num_experts, features,
    ids_stride_t, ids_stride_k, route_stride_t, route_stride_k, bias_stride_e, bias_stride_n,
    shared_stride_t, shared_stride_h, gate_stride_t, residual_stride_t, residual_stride_h,
    TOP_K: tl.constexpr, F64: tl.constexpr, PARTS: tl.constexpr, ROUTES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k of topk_weights[t, k] * (partial[:, t * TOP_K + k] added up + bias[expert]) + shared[t]."""
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    blocks = tl.cdiv(features, BLOCK_N)
    token = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < features
    part, route = tl.arange(0, BLOCK_P), tl.arange(0, ROUTES)
    slot = token * TOP_K + route
    expert = local_expert(
        ids_ptr, map_ptr, slot, route < TOP_K, TOP_K, ids_stride_t, ids_stride_k, num_ids, num_experts
    )
    kept = expert < num_experts
    mask = kept[:, None] & inside[None, :]
    rows = offset(part[:, None] * num_slots + slot[None, :], features)
    partial_ptrs = partial_ptr + rows[:, :, None] + columns[None, None, :]
    there = ((part < PARTS)[:, None] & (route < TOP_K)[None, :])[:, :, None] & inside[None, None, :]
    value = tl.sum(tl.load(partial_ptrs, mask=there, other=0.0), 0)
    route_ptr = weights_ptr + offset(token, route_stride_t) + offset(route, route_stride_k)
    route_weight = tl.load(route_ptr, mask=route < TOP_K, other=0.0).to(ACC)
    if bias_ptr is not None:
        bias_ptrs = (
            bias_ptr + offset(expert, bias_stride_e)[:, None] + offset(columns, bias_stride_n)[None, :]
        )
        value += tl.load(bias_ptrs, mask=mask, other=0.0).to(ACC)
    total = tl.sum(tl.where(mask, value * route_weight[:, None], 0.0), 0)
    total += joined(
        shared_ptr, shared_gate_ptr, residual_ptr, token, columns, inside,
        shared_stride_t, shared_stride_h, gate_stride_t, residual_stride_t, residual_stride_h, ACC,
    )  # fmt: skip
    tl.store(out_ptr + offset(token, features) + columns, total.to(out_ptr.dtype.element_ty), mask=inside)
