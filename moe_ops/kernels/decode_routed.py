"""Decode from logits: the first of the GEMV launches routes as well, so that no launch stands before it.

The first programs, one to a token, write the routes that later launches read. Every other program finds the expert
of its slot itself, by as many maxima of the token's logits as the slot's place: a hundred or two instructions, which
other programs' loads hide, where a launch of its own takes two to three microseconds on an H200.
"""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from moe_ops.kernels.choosing import nth_choice, route_tokens
from moe_ops.kernels.common import mapped
from moe_ops.kernels.decode import multiply_and_activate, multiply_shared, slot_and_column
from moe_ops.kernels.decode_columns import gemv_columns_kernel, multiply_columns, part_and_slot
from moe_ops.kernels.formula import with_formula
from moe_ops.kernels.program import Launch
from moe_ops.types import RoutingConfig

_MOST_EXPERTS = 256  # a warp's maxima of more take longer than what they save


@triton.jit
def _chosen_expert(
    logits_ptr, correction_ptr, map_ptr, slot, num_ids, num_experts, stride_t, stride_e, stride_b, ACC: tl.constexpr,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, SCORE_FIRST: tl.constexpr, NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr, TOP2_SUM: tl.constexpr, GROUP_FILL: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    MEMBERS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The local expert of a slot, `num_experts` where there is none."""
    id = nth_choice(
        logits_ptr, correction_ptr, slot // TOP_K, slot % TOP_K, stride_t, stride_e, stride_b,
        ACC, SCORE, SCORE_FIRST, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM, GROUP_FILL, NUM_EXPERTS, MEMBERS, BLOCK_E, BLOCK_G,
    )  # fmt: skip
    return mapped(id, map_ptr, num_ids, num_experts)


@triton.jit
def routed_gemv_activation_kernel(
    x_ptr, weight_ptr, up_ptr, bias_ptr, up_bias_ptr,
    logits_ptr, correction_ptr, weights_ptr, ids_ptr, map_ptr, out_ptr,
    shared_w13_ptr, shared_up_ptr, shared_out_ptr,
    num_tokens, num_ids, num_experts, features, stride_t, stride_e, stride_b,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    bias_stride_e, bias_stride_n, shared_features, shared_stride_n, shared_stride_k,
    operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    F64: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    TAKE_TURNS: tl.constexpr,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, SCORE_FIRST: tl.constexpr, RENORMALIZE: tl.constexpr,
    RENORM_EPS: tl.constexpr, SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, GROUP_FILL: tl.constexpr, NUM_EXPERTS: tl.constexpr, MEMBERS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K_SLOTS: tl.constexpr,
):  # fmt: skip
    """`topk_routing` and `gemv_activation_kernel` in one."""
    program, beside = tl.program_id(0), num_tokens * tl.cdiv(shared_features, BLOCK_N)
    programs = tl.num_programs(0) - num_tokens - beside
    if shared_w13_ptr is not None:
        if program >= num_tokens + programs:
            multiply_shared(
                program - num_tokens - programs, beside, x_ptr, shared_w13_ptr, shared_up_ptr, shared_out_ptr,
                shared_features, x_stride_m, x_stride_k, shared_stride_n, shared_stride_k,
                NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT, F64, DEPTH, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
    if program < num_tokens:
        route_tokens(
            logits_ptr, correction_ptr, weights_ptr, ids_ptr, num_tokens, stride_t, stride_e, stride_b,
            TOP_K, SCORE, SCORE_FIRST, RENORMALIZE, RENORM_EPS, SCALE, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM,
            GROUP_FILL, NUM_EXPERTS, MEMBERS, 1, BLOCK_E, BLOCK_G, BLOCK_K_SLOTS,
        )  # fmt: skip
    elif program < num_tokens + programs:
        slot, first = slot_and_column(program - num_tokens, programs, features, BLOCK_N, TAKE_TURNS)
        expert = _chosen_expert(
            logits_ptr, correction_ptr, map_ptr, slot, num_ids, num_experts, stride_t, stride_e, stride_b,
            weights_ptr.dtype.element_ty, TOP_K, SCORE, SCORE_FIRST, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM, GROUP_FILL,
            NUM_EXPERTS, MEMBERS, BLOCK_E, BLOCK_G,
        )  # fmt: skip
        if expert < num_experts:
            multiply_and_activate(
                x_ptr, weight_ptr, up_ptr, bias_ptr, up_bias_ptr, out_ptr, slot // TOP_K, slot, expert, first, features,
                x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
                bias_stride_e, bias_stride_n, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
                NAME, GATED, INTERLEAVED, ALPHA, BETA, LINEAR_BETA, LIMIT, F64, DEPTH, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip


@triton.jit
def routed_gemv_columns_kernel(
    x_ptr, weight_ptr, up_ptr, logits_ptr, correction_ptr, weights_ptr, ids_ptr, map_ptr, out_ptr,
    num_tokens, num_slots, num_ids, num_experts, features, stride_t, stride_e, stride_b,
    x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
    F64: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, SCORE_FIRST: tl.constexpr, RENORMALIZE: tl.constexpr,
    RENORM_EPS: tl.constexpr, SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, GROUP_FILL: tl.constexpr, NUM_EXPERTS: tl.constexpr, MEMBERS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K_SLOTS: tl.constexpr,
):  # fmt: skip
    """`topk_routing` and `gemv_columns_kernel` in one."""
    program = tl.program_id(0)
    if program < num_tokens:
        route_tokens(
            logits_ptr, correction_ptr, weights_ptr, ids_ptr, num_tokens, stride_t, stride_e, stride_b,
            TOP_K, SCORE, SCORE_FIRST, RENORMALIZE, RENORM_EPS, SCALE, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM,
            GROUP_FILL, NUM_EXPERTS, MEMBERS, 1, BLOCK_E, BLOCK_G, BLOCK_K_SLOTS,
        )  # fmt: skip
    else:
        part, slot, block = part_and_slot(
            program - num_tokens, num_slots, features, BLOCK_N, up_ptr is not None
        )
        expert = _chosen_expert(
            logits_ptr, correction_ptr, map_ptr, slot, num_ids, num_experts, stride_t, stride_e, stride_b,
            weights_ptr.dtype.element_ty, TOP_K, SCORE, SCORE_FIRST, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM, GROUP_FILL,
            NUM_EXPERTS, MEMBERS, BLOCK_E, BLOCK_G,
        )  # fmt: skip
        multiply_columns(
            x_ptr, weight_ptr, up_ptr, out_ptr, slot // TOP_K, expert, expert < num_experts, part, slot, block,
            num_slots, features, x_stride_m, x_stride_k, weight_stride_e, weight_stride_n, weight_stride_k,
            F64, DEPTH, PART, BLOCK_N, BLOCK_K,
        )  # fmt: skip


def routes_inside(router: Any, up: Launch) -> bool:
    """Whether finding a slot's expert is short enough for every program of `up` to do: within a warp.

    On an H200 layers of one-warp programs then take 0.7 to 1.1 microseconds less, up to eight tokens alike. Two warps
    wait for each other at every maximum: 0.3 less to 6 more for one token of 128 experts, and 31 more for four.
    """
    is_limited = RoutingConfig.from_spec(router.routing).num_groups > 1
    return up.num_warps == 1 and not is_limited and router.router_logits.shape[1] <= _MOST_EXPERTS


def routed(first: Launch, routing: Launch, gate: Any) -> Launch:
    """The launch `first` of the experts that does what `routing` does, too."""
    given = dict(routing.args)
    given["correction_ptr"], given["BLOCK_K_SLOTS"] = given.pop("bias_ptr"), given.pop("BLOCK_K")
    given.update(first.args)
    is_columns = first.kernel is gemv_columns_kernel
    for name in (
        "top_k",
        "ids_stride_t",
        "ids_stride_k",
        "ROWS",
        *(("slots_per_row",) if is_columns else ()),
    ):
        del given[name]
    kernel = with_formula(routed_gemv_activation_kernel, gate)
    grid = (first.grid[0] + given["num_tokens"],)
    return replace(first, kernel=routed_gemv_columns_kernel if is_columns else kernel, grid=grid, args=given)
