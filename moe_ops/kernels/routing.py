"""topk_routing: scores, group limits and K passes of "largest remaining, lowest id first", one warp per few tokens.

The definition is `moe_ops.routing.reference`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.choosing import is_finite, route_tokens, score_of, slope_of
from moe_ops.kernels.common import cdiv, compute_dtype, next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref
from moe_ops.types import RoutingConfig

# Rows of fewer than so many logits share a warp: so many of them, or with so many logits in all. Measured on an H200.
_WARP_LOGITS, _MOST_ROWS, _ELEMENTS = 64, 8, 128
_LONG_ROW = 512  # more take four warps


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_routing_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr,
    num_tokens, stride_t, stride_e, stride_b,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, SCORE_FIRST: tl.constexpr, RENORMALIZE: tl.constexpr,
    RENORM_EPS: tl.constexpr, SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, GROUP_FILL: tl.constexpr, NUM_EXPERTS: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    route_tokens(
        logits_ptr, bias_ptr, weights_ptr, ids_ptr, num_tokens, stride_t, stride_e, stride_b,
        TOP_K, SCORE, SCORE_FIRST, RENORMALIZE, RENORM_EPS, SCALE, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM, GROUP_FILL,
        NUM_EXPERTS, MEMBERS, ROWS, BLOCK_E, BLOCK_G, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_routing_backward_kernel(
    grad_ptr, logits_ptr, weights_ptr, ids_ptr, out_ptr,
    num_tokens, grad_stride_t, grad_stride_k, stride_t, stride_e, weight_stride_t, weight_stride_k,
    ids_stride_t, ids_stride_k,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SCORE: tl.constexpr, SCORE_FIRST: tl.constexpr,
    RENORMALIZE: tl.constexpr, RENORM_EPS: tl.constexpr, SCALE: tl.constexpr,
    F64: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = (tokens < num_tokens)[:, None]
    tokens = tokens.to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    mask = present & (columns < TOP_K)
    id_ptrs = ids_ptr + offset(tokens, ids_stride_t) + offset(columns, ids_stride_k)
    ids = tl.load(id_ptrs, mask=mask, other=-1)
    mask = mask & (ids >= 0) & (ids < NUM_EXPERTS)
    row_ptr = logits_ptr + offset(tokens, stride_t)
    picked = tl.load(row_ptr + offset(ids, stride_e), mask=mask, other=0.0).to(ACC)
    grad_ptrs = grad_ptr + offset(tokens, grad_stride_t) + offset(columns, grad_stride_k)
    grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(ACC)
    # A weight of zero: the selection was not finite, so the slot is constant; or the score underflowed, so it is flat.
    weight_ptrs = weights_ptr + offset(tokens, weight_stride_t) + offset(columns, weight_stride_k)
    valid = mask & (tl.load(weight_ptrs, mask=mask, other=0.0) != 0)
    picked = tl.where(valid, picked, 0.0)
    experts = tl.arange(0, BLOCK_E)[None, :]
    expert_mask = present & (experts < NUM_EXPERTS)
    score = tl.zeros((ROWS, BLOCK_E), ACC)
    if SCORE == "softmax" and SCORE_FIRST:
        logits = tl.load(row_ptr + offset(experts, stride_e), mask=expert_mask, other=0.0).to(ACC)
        logits = tl.where(experts < NUM_EXPERTS, logits, -float("inf"))
        largest = tl.max(logits, 1)[:, None]
        exps = tl.exp(logits - largest)
        total = tl.sum(exps, 1)[:, None]
        score = tl.where(is_finite(exps / total), exps / total, 0.0)
        chosen = tl.where(valid, tl.exp(picked - largest) / total, 0.0)
    else:
        chosen = score_of(picked, valid, SCORE)
    grad = grad * SCALE
    if RENORMALIZE:
        total_weight = tl.sum(chosen, 1) + RENORM_EPS
        divisor = tl.where(total_weight == 0, 1.0, total_weight)[:, None]
        through = tl.where((total_weight == 0)[:, None], 0.0, tl.sum(grad * chosen, 1)[:, None] / divisor)
        grad = (grad - through) / divisor
    grad = tl.where(valid, grad, 0.0)
    if SCORE != "softmax":
        grad = grad * slope_of(picked, chosen, SCORE)
    elif not SCORE_FIRST:
        grad = chosen * (grad - tl.sum(grad * chosen, 1)[:, None])
    dense = tl.zeros((ROWS, BLOCK_E), ACC)
    for k in range(TOP_K):
        id_k = tl.sum(tl.where(columns == k, ids, 0), 1)[:, None]
        dense += tl.where(experts == id_k, tl.sum(tl.where(columns == k, grad, 0.0), 1)[:, None], 0.0)
    if SCORE == "softmax" and SCORE_FIRST:
        dense = score * (dense - tl.sum(grad * chosen, 1)[:, None])
    tl.store(out_ptr + tokens * NUM_EXPERTS + experts, dense.to(out_ptr.dtype.element_ty), mask=expert_mask)


def routing_launches(router: Any) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    """Buffers and launches that turn `router_logits` [T, E] into `topk_weights` and `topk_ids` [T, K]."""
    router_logits, correction_bias, spec = router
    routing = RoutingConfig.from_spec(spec)
    num_tokens, num_experts = router_logits.shape
    blocks = {
        "BLOCK_E": next_power_of_2(num_experts),
        "BLOCK_G": next_power_of_2(routing.num_groups),
        "BLOCK_K": next_power_of_2(routing.top_k),
    }
    rows, programs, num_warps = _tile(num_tokens, blocks["BLOCK_E"])
    args = {
        "logits_ptr": Ref("router_logits"),
        "bias_ptr": None if correction_bias is None else Ref("correction_bias"),
        "weights_ptr": Ref("topk_weights"),
        "ids_ptr": Ref("topk_ids"),
        "num_tokens": num_tokens,
        "stride_t": router_logits.strides[0],
        "stride_e": router_logits.strides[1],
        "stride_b": 1 if correction_bias is None else correction_bias.strides[0],
        **_formula_args(routing),
        "NUM_GROUPS": routing.num_groups,
        "TOPK_GROUPS": routing.topk_groups,
        "TOP2_SUM": routing.group_score == "top2_sum",
        "GROUP_FILL": None if routing.group_fill == float("-inf") else routing.group_fill,
        "NUM_EXPERTS": num_experts,
        "MEMBERS": num_experts // routing.num_groups,
        "ROWS": rows,
        **blocks,
    }
    shape = (num_tokens, routing.top_k)
    weights = Buffer("topk_weights", shape, compute_dtype(router_logits.dtype))
    buffers = (weights, Buffer("topk_ids", shape, torch.int32))
    return buffers, (Launch(_topk_routing_kernel, (programs,), args, num_warps, 1),)


def _tile(num_tokens: int, block_e: int) -> tuple[int, int, int]:
    """(rows, programs, warps): short rows share a warp, and none spans several unless it is long."""
    rows = min(_ELEMENTS // block_e, _MOST_ROWS) if block_e < _WARP_LOGITS else 1
    return rows, cdiv(num_tokens, rows), 1 if block_e <= _LONG_ROW else 4


def _formula_args(routing: RoutingConfig) -> dict:
    return {
        "TOP_K": routing.top_k,
        "SCORE": routing.score_fn,
        "SCORE_FIRST": routing.order == "score_then_topk",
        "RENORMALIZE": routing.renormalize,
        "RENORM_EPS": routing.renorm_eps,
        "SCALE": routing.scale,
    }


def topk_routing_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.topk_routing`."""
    buffers, launches = routing_launches(args.router)
    return Program(buffers, launches, ("topk_weights", "topk_ids"))


def topk_routing_backward_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.topk_routing_backward`."""
    grad_weights, router_logits, topk_weights, topk_ids, spec = args
    routing = RoutingConfig.from_spec(spec)
    num_tokens, num_experts = router_logits.shape
    block_e = next_power_of_2(num_experts)
    rows, programs, num_warps = _tile(num_tokens, block_e)
    given = {
        "grad_ptr": Ref("grad_weights"),
        "logits_ptr": Ref("router_logits"),
        "weights_ptr": Ref("topk_weights"),
        "ids_ptr": Ref("topk_ids"),
        "out_ptr": Ref("grad_logits"),
        "num_tokens": num_tokens,
        "grad_stride_t": grad_weights.strides[0],
        "grad_stride_k": grad_weights.strides[1],
        "stride_t": router_logits.strides[0],
        "stride_e": router_logits.strides[1],
        "weight_stride_t": topk_weights.strides[0],
        "weight_stride_k": topk_weights.strides[1],
        "ids_stride_t": topk_ids.strides[0],
        "ids_stride_k": topk_ids.strides[1],
        "NUM_EXPERTS": num_experts,
        **_formula_args(routing),
        "F64": router_logits.dtype == torch.float64,
        "ROWS": rows,
        "BLOCK_E": block_e,
        "BLOCK_K": next_power_of_2(routing.top_k),
    }
    buffer = Buffer("grad_logits", (num_tokens, num_experts), router_logits.dtype)
    launch = Launch(_topk_routing_backward_kernel, (programs,), given, num_warps, 1)
    return Program((buffer,), (launch,), ("grad_logits",))
