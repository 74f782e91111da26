"""topk_routing: scores, group limits and K passes of "largest remaining, lowest id first", one warp per few tokens.

The definition is `moe_ops.routing.reference`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import cdiv, compute_dtype, next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref
from moe_ops.types import RoutingConfig

_NO_EXPERT = tl.constexpr(1 << 30)
_LOWEST = tl.constexpr(-36.0)  # below it log(1 + e^x) is e^x, to the last bit of float64
# Rows of fewer than so many logits share a warp: so many of them, or with so many logits in all. Measured on an H200.
_WARP_LOGITS, _MOST_ROWS, _ELEMENTS = 64, 8, 128
_LONG_ROW = 512  # more take four warps


@triton.jit
def _is_finite(value):
    return tl.abs(value) < float("inf")


@triton.jit
def _keys(values):
    """Integers in the order of floating values, 0 and -0 alike: a warp finds its largest in one instruction."""
    values = tl.where(values == 0, 0.0, values)
    if values.dtype == tl.float64:
        bits = values.to(tl.int64, bitcast=True)
        keys = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        bits = values.to(tl.int32, bitcast=True)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return keys


@triton.jit
def _taken(keys, gone):
    """Keys, below all others where they are `gone`."""
    lowest = -(1 << 63) if keys.dtype == tl.int64 else -(1 << 31)
    return tl.where(gone, tl.full(keys.shape, lowest, keys.dtype), keys)


@triton.jit
def _first_best(keys, numbers):
    """(key, number) per row of the largest; the lowest number among equals."""
    best = tl.max(keys, 1)
    return best, tl.min(tl.where(keys == best[:, None], numbers, _NO_EXPERT), 1)


@triton.jit
def _group_scores(
    selection,
    experts,
    NUM_GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TOP2_SUM: tl.constexpr,
):
    """[rows, groups] of selections [rows, experts], a group at a time.

    As [rows, groups, members] it would be one reduction, but Triton 3.6 reduces a reshaped block over the wrong lanes:
    on an H200 tokens got each other's experts.
    """
    groups = tl.arange(0, BLOCK_G)[None, :]
    scores = tl.full((selection.shape[0], BLOCK_G), -float("inf"), selection.dtype)
    for group in range(NUM_GROUPS):
        inside = experts // MEMBERS == group
        values = tl.where(inside, selection, -float("inf"))
        best = tl.max(values, 1)
        if TOP2_SUM:
            first = tl.min(tl.where(inside & (values == best[:, None]), experts, _NO_EXPERT), 1)
            best += tl.max(tl.where(experts == first[:, None], -float("inf"), values), 1)
        scores = tl.where(groups == group, best[:, None], scores)
    return scores


@triton.jit
def _root_and_decay(logits):
    """sqrt(log(1 + e^x)) as two factors, the root down to x = -36 and e^(x/2) from there on; see the definition."""
    near = tl.where(logits < _LOWEST, _LOWEST, logits)
    small = tl.exp(-tl.abs(near))
    one_more = 1.0 + small
    # log1p: the quotient makes good for what the sum has rounded away.
    divisor = tl.where(one_more == 1.0, 1.0, one_more - 1.0)
    log1p = tl.where(one_more == 1.0, small, tl.log(one_more) * (small / divisor))
    root = tl.sqrt(tl.where(near > 0, near, 0.0) + log1p)
    return root, tl.exp(0.5 * tl.where(logits < _LOWEST, logits - _LOWEST, 0.0))


@triton.jit
def _score(logits, there, SCORE: tl.constexpr):
    """Scores of rows of logits, among those that are there; 0 elsewhere."""
    if SCORE == "softmax":
        logits = tl.where(there, logits, -float("inf"))
        exps = tl.exp(logits - tl.max(logits, 1)[:, None])
        score = exps / tl.sum(exps, 1)[:, None]
    elif SCORE == "sigmoid":
        score = tl.sigmoid(logits)
    else:
        tl.static_assert(SCORE == "sqrtsoftplus")
        root, decay = _root_and_decay(logits)
        score = root * decay
    return tl.where(there, score, 0.0)


@triton.jit
def _slope(logits, score, SCORE: tl.constexpr):
    """The derivative of an elementwise score."""
    if SCORE == "sigmoid":
        slope = score * (1.0 - score)
    else:
        root, decay = _root_and_decay(logits)
        slope = tl.sigmoid(tl.where(logits < _LOWEST, _LOWEST, logits)) * decay / (2.0 * root)
    return slope


@triton.jit
def route_tokens(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr,
    num_tokens, stride_t, stride_e, stride_b,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, SCORE_FIRST: tl.constexpr, RENORMALIZE: tl.constexpr,
    RENORM_EPS: tl.constexpr, SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, GROUP_FILL: tl.constexpr, NUM_EXPERTS: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Routes ROWS tokens; returns their slots [ROWS, BLOCK_K], their experts, and which of these exist."""
    ACC: tl.constexpr = weights_ptr.dtype.element_ty
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = tokens < num_tokens
    experts = tl.arange(0, BLOCK_E)[None, :]
    there = experts < NUM_EXPERTS
    logits_ptrs = logits_ptr + offset(tokens, stride_t)[:, None] + offset(experts, stride_e)
    logits = tl.load(logits_ptrs, mask=present[:, None] & there, other=0.0).to(ACC)
    score = _score(logits, there, SCORE) if SCORE_FIRST else logits
    selection = score
    if bias_ptr is not None:
        selection += tl.load(bias_ptr + offset(experts, stride_b), mask=there, other=0.0).to(ACC)
    selection = tl.where(there & _is_finite(selection), selection, -float("inf"))
    if NUM_GROUPS > 1:
        groups = tl.arange(0, BLOCK_G)
        group_score = _group_scores(selection, experts, NUM_GROUPS, MEMBERS, BLOCK_G, TOP2_SUM)
        group_keys = _taken(_keys(group_score), groups[None, :] >= NUM_GROUPS)
        kept = tl.full((ROWS, BLOCK_E), False, tl.int1)
        for _ in range(TOPK_GROUPS):
            _, group = _first_best(group_keys, groups[None, :])
            kept = kept | (experts // MEMBERS == group[:, None])
            group_keys = _taken(group_keys, groups[None, :] == group[:, None])
        # A finite GROUP_FILL must not make an unusable score usable.
        fill = -float("inf") if GROUP_FILL is None else GROUP_FILL
        selection = tl.where(kept | (selection == -float("inf")), selection, fill)
    score = tl.where(there & _is_finite(score), score, 0.0)
    keys = _taken(_keys(selection), tl.broadcast_to(experts >= NUM_EXPERTS, (ROWS, BLOCK_E)))
    bits = score.to(keys.dtype, bitcast=True)
    columns = tl.arange(0, BLOCK_K)[None, :]
    chosen_keys = _keys(tl.full((ROWS, BLOCK_K), -float("inf"), ACC))
    unusable = chosen_keys
    chosen_bits = tl.zeros((ROWS, BLOCK_K), keys.dtype)
    ids = tl.zeros((ROWS, BLOCK_K), tl.int32)
    for k in range(TOP_K):
        best, pick = _first_best(keys, experts)
        hit = experts == pick[:, None]
        keys = _taken(keys, hit)
        chosen_bits = tl.where(columns == k, tl.sum(tl.where(hit, bits, 0), 1)[:, None], chosen_bits)
        chosen_keys = tl.where(columns == k, best[:, None], chosen_keys)
        ids = tl.where(columns == k, pick[:, None], ids)
    valid = chosen_keys > unusable
    chosen = chosen_bits.to(ACC, bitcast=True)
    chosen = tl.where(valid, chosen, 0.0) if SCORE_FIRST else _score(chosen, valid, SCORE)
    if RENORMALIZE:
        total = tl.sum(chosen, 1) + RENORM_EPS
        chosen = chosen / tl.where(total == 0, 1.0, total)[:, None]
    slots = tokens.to(tl.int64)[:, None] * TOP_K + columns
    inside = present[:, None] & (columns < TOP_K)
    tl.store(weights_ptr + slots, chosen * SCALE, mask=inside)
    tl.store(ids_ptr + slots, ids, mask=inside)
    return slots, ids, inside


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
        score = tl.where(_is_finite(exps / total), exps / total, 0.0)
        chosen = tl.where(valid, tl.exp(picked - largest) / total, 0.0)
    else:
        chosen = _score(picked, valid, SCORE)
    grad = grad * SCALE
    if RENORMALIZE:
        total_weight = tl.sum(chosen, 1) + RENORM_EPS
        divisor = tl.where(total_weight == 0, 1.0, total_weight)[:, None]
        through = tl.where((total_weight == 0)[:, None], 0.0, tl.sum(grad * chosen, 1)[:, None] / divisor)
        grad = (grad - through) / divisor
    grad = tl.where(valid, grad, 0.0)
    if SCORE != "softmax":
        grad = grad * _slope(picked, chosen, SCORE)
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
