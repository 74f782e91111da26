"""Decode with a down projection whose columns lie together in memory: a partial product per slot, and their sum.

Neighbouring columns are then what a program should read: many of them for one slot, where `gemv_combine_kernel` reads
few for all slots of its token. Parts of the depth are programs of their own where there are too few to fill a GPU.
"""

import triton
import triton.language as tl

from moe_ops.kernels.common import joined, local_expert, offset


@triton.jit
def gemv_columns_kernel(
    x_ptr, weight_ptr, ids_ptr, map_ptr, out_ptr,
    top_k, num_slots, num_ids, num_experts, features,
    ids_stride_t, ids_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    F64: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[p, slot] = weight[expert of slot] @ x[slot] over the p-th PART of the depth, a multiple of BLOCK_K.

    A dropped slot writes nothing.
    """
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    blocks = tl.cdiv(features, BLOCK_N)
    row = tl.program_id(0) // blocks
    slot = row % num_slots
    start = row // num_slots * PART
    expert = local_expert(
        ids_ptr, map_ptr, slot, slot >= 0, top_k, ids_stride_t, ids_stride_k, num_ids, num_experts
    )
    if expert < num_experts:
        columns = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < features
        column_ptr = weight_ptr + offset(expert, weight_stride_e) + offset(columns, weight_stride_n)
        x_row_ptr = x_ptr + offset(slot, DEPTH)
        inner = tl.arange(0, BLOCK_K)
        total = tl.zeros((BLOCK_N,), ACC)
        # One step at a time: a step fills the registers, and other programs of the multiprocessor load meanwhile.
        for k in tl.range(start, tl.minimum(start + PART, DEPTH), BLOCK_K, num_stages=1):
            mask = inner < DEPTH - k
            weight_ptrs = column_ptr[:, None] + offset(k + inner, weight_stride_k)[None, :]
            weight = tl.load(weight_ptrs, mask=inside[:, None] & mask[None, :], other=0.0)
            x = tl.load(x_row_ptr + k + inner, mask=mask, other=0.0)
            total += tl.sum(weight.to(ACC) * x.to(ACC)[None, :], 1)
        tl.store(out_ptr + offset(row, features) + columns, total, mask=inside)


@triton.jit
def gemv_sum_kernel(
    partial_ptr, bias_ptr, ids_ptr, map_ptr, weights_ptr,
    shared_ptr, shared_gate_ptr, residual_ptr, out_ptr,
    num_slots, num_ids, num_experts, features,
    ids_stride_t, ids_stride_k, route_stride_t, route_stride_k, bias_stride_e, bias_stride_n,
    shared_stride_t, shared_stride_h, gate_stride_t, residual_stride_t, residual_stride_h,
    TOP_K: tl.constexpr, F64: tl.constexpr, PARTS: tl.constexpr, ROUTES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k of topk_weights[t, k] * (partial[:, t * TOP_K + k] added up + bias[expert]) + shared[t]."""
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    blocks = tl.cdiv(features, BLOCK_N)
    token = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < features
    route = tl.arange(0, ROUTES)
    slot = token * TOP_K + route
    expert = local_expert(
        ids_ptr, map_ptr, slot, route < TOP_K, TOP_K, ids_stride_t, ids_stride_k, num_ids, num_experts
    )
    kept = expert < num_experts
    mask = kept[:, None] & inside[None, :]
    route_ptr = weights_ptr + offset(token, route_stride_t) + offset(route, route_stride_k)
    route_weight = tl.load(route_ptr, mask=kept, other=0.0).to(ACC)
    value = tl.zeros((ROUTES, BLOCK_N), ACC)
    if bias_ptr is not None:
        bias_ptrs = (
            bias_ptr + offset(expert, bias_stride_e)[:, None] + offset(columns, bias_stride_n)[None, :]
        )
        value += tl.load(bias_ptrs, mask=mask, other=0.0).to(ACC)
    for part in tl.static_range(PARTS):
        partial_ptrs = partial_ptr + offset(part * num_slots + slot, features)[:, None] + columns[None, :]
        value += tl.load(partial_ptrs, mask=mask, other=0.0)
    total = tl.sum(tl.where(mask, value * route_weight[:, None], 0.0), 0)
    total += joined(
        shared_ptr, shared_gate_ptr, residual_ptr, token, columns, inside,
        shared_stride_t, shared_stride_h, gate_stride_t, residual_stride_t, residual_stride_h, ACC,
    )  # fmt: skip
    tl.store(out_ptr + offset(token, features) + columns, total.to(out_ptr.dtype.element_ty), mask=inside)
