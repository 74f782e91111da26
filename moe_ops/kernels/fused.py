"""Programs of the fused operators, composed of the stages' launches. Each picks its kernels from shapes alone.

`fused_experts` has two forms: decode (two GEMV launches, no sort) and grouped (dispatch, tile map, gathered GEMM with
the activation in its epilogue, GEMM, combine).
"""

import math
from dataclasses import replace
from typing import Any

from moe_ops.arguments import FusedExperts, PairedLinear
from moe_ops.kernels.activation import gated_activation_program
from moe_ops.kernels.combine import combine_launch
from moe_ops.kernels.decode_plan import (
    first_launch,
    gemv_launches,
    joins_shared,
    prefers_gemv,
)
from moe_ops.kernels.decode_routed import routed, routes_inside
from moe_ops.kernels.dispatch import dispatch_launches
from moe_ops.kernels.formula import gate_of
from moe_ops.kernels.gemm import Gemm, Operand, operands
from moe_ops.kernels.gemm_config import INVARIANT_ROWS, sorts_rows_first
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.grouped_gemm import plan, plan_all
from moe_ops.kernels.permute import permute_launch
from moe_ops.kernels.program import Buffer, Launch, Program
from moe_ops.kernels.routing import routing_launches
from moe_ops.kernels.tma import is_transposed
from moe_ops.values import Router, SharedExpert

_Plan = tuple[tuple[Buffer, ...], tuple[Launch, ...]]
# Of weights read. From there on another stream's reads cost what they save, and tiles read columns that lie together as
# fast as programs that multiply one row (H200).
_MOST_BYTES_BESIDE, _MOST_BYTES_IN_COLUMNS = 1.5e9, 1.3e9
# Slots whose experts are elsewhere, of which programs that multiply one row come and go for nothing: from so many on,
# and so many bytes' worth of them more, tiles are faster (H200, five layers in 2, 4 and 8 parts, 1 to 8 tokens).
_MOST_ELSEWHERE, _BYTES_ELSEWHERE = 3.5, 1.5e8


def up_gemm(args: Any, w13: Any, num_slots: int, gpu: Gpu) -> Gemm:
    """The first product, of gathered rows, with its activation."""
    top_k, linear = num_slots // max(args.hidden_states.shape[0], 1), operands("w13", w13)
    x = Operand("hidden_states", args.hidden_states)
    return Gemm(x, linear, "activated", num_slots, gpu, top_k, gate_of(args))


def down_gemm(x: Operand, w2: Any, gpu: Gpu) -> Gemm:
    """The second product."""
    return Gemm(x, PairedLinear(*operands("w2", w2)), "expert_out", x.meta.shape[0], gpu)


def routing_dispatch_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.routing_dispatch`."""
    buffers, launches = routing_launches(args.router)
    more_buffers, more_launches = dispatch_launches(buffers[1].meta, args.placement, args.num_experts)
    outputs = ("topk_weights", "topk_ids", "sorted_slots", "inverse", "expert_offsets")
    return Program(buffers + more_buffers, launches + more_launches, outputs)


def gather_gemm_act_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.gather_gemm_act` and `moe.gather_gemm_formula`."""
    num_slots = args.sorted_slots.shape[0]
    gemm = up_gemm(args, args.w13, num_slots, gpu)
    return Program(*plan(replace(gemm, tail=True)), ("activated",))


def gather_gemm_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.gather_gemm`."""
    return Program(*plan(gathered_gemm(args, gpu)), ("gate_up",))


def gathered_gemm(args: Any, gpu: Gpu) -> Gemm:
    """The product of `moe.gather_gemm`."""
    x, num_slots = Operand("hidden_states", args.hidden_states), args.sorted_slots.shape[0]
    top_k, w13 = num_slots // max(args.hidden_states.shape[0], 1), operands("w13", args.w13)
    return Gemm(x, w13, "gate_up", num_slots, gpu, top_k, tail=True)


def act_gemm_combine_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.act_gemm_combine`."""
    gate = gated_activation_program(args, gpu, args.w2.weight.shape[0])
    (activated,) = gate.buffers
    gemm = down_gemm(Operand(activated.name, activated.meta), args.w2, gpu)
    buffers, launches = plan(gemm)
    buffer, launch = combine_launch(gemm.out_meta, args)
    return Program((activated, *buffers, buffer), (*gate.launches, *launches, launch), (buffer.name,))


def gemm_combine_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.gemm_combine`."""
    gemm = down_gemm(Operand("x", args.x), args.w2, gpu)
    buffers, launches = plan(gemm)
    buffer, launch = combine_launch(gemm.out_meta, args)
    return Program((*buffers, buffer), (*launches, launch), (buffer.name,))


def fused_experts_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.fused_experts` and `moe.fused_experts_formula`."""
    return Program(*_experts_launches(args, gpu), ("combined",))


def fused_moe_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.fused_moe` and `moe.fused_moe_formula`."""
    buffers, _ = routing_launches(args.router)
    topk_weights, topk_ids = (buffer.meta for buffer in buffers)
    return layer_program(args.routed(topk_weights, topk_ids), args.router, gpu)


def fused_experts_with_shared_program(args: Any, gpu: Gpu) -> Program:
    """The program of a `moe.fused_experts_with_shared` whose `has_shared_inside`."""
    return layer_program(args.routed, None, gpu, args.shared)


def has_shared_inside(args: Any, gpu: Gpu) -> bool:
    """Whether the launches of a `moe.fused_experts_with_shared` are those of its routed experts."""
    return takes_shared(args.routed, args.shared)


def takes_shared(experts: Any, shared: SharedExpert) -> bool:
    """Whether the launches of a `moe.fused_experts` can be those of a shared expert as well, and had better be."""
    return is_gemv(experts) and joins_shared(experts, shared)


def layer_program(
    experts: Any, router: Router | None, gpu: Gpu, shared: SharedExpert | None = None
) -> Program:
    """The program of a router, what `moe.fused_experts` is given with its choices, and a shared expert."""
    buffers, launches = _experts_launches(experts, gpu, shared)
    if router is not None:
        more_buffers, routing = routing_launches(router)
        if decodes_from_logits(experts, router, gpu):
            first, *rest = launches
            routing, launches = (routed(first, *routing, gate_of(experts)),), tuple(rest)
        buffers, launches = more_buffers + buffers, routing + launches
    return Program(buffers, launches, ("combined",))


def decodes_from_logits(experts: Any, router: Any, gpu: Gpu) -> bool:
    """Whether a launch of the experts routes as well."""
    return is_gemv(experts) and routes_inside(router, first_launch(experts, gpu))


def leaves_room(args: FusedExperts) -> bool:
    """Whether another stream's kernels get in between those of these experts.

    Programs of the GEMV kernels come and go. Persistent ones wait for each multiprocessor that they must share.
    """
    return is_gemv(args) and _bytes_read(args) <= _MOST_BYTES_BESIDE


def _bytes_read(args: Any) -> int:
    """Of weights, if no two slots share an expert and all of these are here."""
    return math.prod(args.topk_ids.shape) * _bytes_of_an_expert(args.experts)


def _bytes_of_an_expert(experts: Any) -> int:
    (w13, _, up, _), (w2, _) = experts
    elements = sum(math.prod(weight.shape[1:]) for weight in (w13, up, w2) if weight is not None)
    return elements * w13.dtype.itemsize


def is_gemv(args: Any) -> bool:
    """Whether the layer runs in the form for few tokens."""
    w13, slots = args.experts.w13.weight, args.topk_ids.shape
    num_ids = args.placement.num_ids(w13.shape[0])
    if not prefers_gemv(*slots, num_ids):
        return False
    elsewhere = math.prod(slots) * (1.0 - w13.shape[0] / max(num_ids, 1))  # if all experts are chosen alike
    if elsewhere > _MOST_ELSEWHERE + _BYTES_ELSEWHERE / max(_bytes_of_an_expert(args.experts), 1):
        return False
    in_columns = is_transposed(w13) and slots[0] > 1
    return not in_columns or _bytes_read(args) <= _MOST_BYTES_IN_COLUMNS


def batch_invariant_experts_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.batch_invariant_experts`: the grouped form, with one configuration for any T."""
    return Program(*_grouped_experts(args, gpu, INVARIANT_ROWS), ("combined",))


def _experts_launches(args: Any, gpu: Gpu, shared: SharedExpert | None = None) -> _Plan:
    if shared is not None or is_gemv(args):
        return gemv_launches(args, gpu, shared)
    return _grouped_experts(args, gpu, None)


def grouped_products(args: Any, gpu: Gpu, rows_per_tile: int | None = None) -> tuple[Gemm, Gemm]:
    """The two products of a layer's grouped form; the first may be one of rows copied into expert order."""
    (num_tokens, top_k), (w13, w2) = args.topk_ids.shape, args.experts
    num_slots = num_tokens * top_k
    chosen = {"rows_per_tile": rows_per_tile, "num_ids": args.placement.num_ids(w13.weight.shape[0])}
    up = replace(up_gemm(args, w13, num_slots, gpu), **chosen)
    if sorts_rows_first(up):
        rows, _ = permute_launch(args.hidden_states, num_slots)
        up = replace(up, x=Operand(rows.name, rows.meta), top_k=None)
    down = down_gemm(Operand(up.out, up.out_meta), w2, gpu)
    return up, replace(down, **chosen)


def _grouped_experts(args: Any, gpu: Gpu, rows_per_tile: int | None) -> _Plan:
    up, down = grouped_products(args, gpu, rows_per_tile)
    num_experts = args.experts.w13.weight.shape[0]
    buffers, launches = dispatch_launches(args.topk_ids, args.placement, num_experts)
    if up.top_k is None:
        rows, permute = permute_launch(args.hidden_states, up.num_slots, num_experts)
        buffers, launches = (*buffers, rows), (*launches, permute)
    gemm_buffers, gemm_launches = plan_all((up, down))
    buffer, launch = combine_launch(down.out_meta, args)
    return (*buffers, *gemm_buffers, buffer), (*launches, *gemm_launches, launch)
