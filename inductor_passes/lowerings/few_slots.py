"""ExpandFewSlots: on a CPU a layer of few slots becomes ATen, which Inductor turns into C++ reductions.

With a static number of slots the weights of each chosen expert are read in place, through its index: a reduction
`(weight[ids] * x).sum(-1)` copies no weight. Slots of one expert come after another, so that its weights come from
memory once. Some hundreds are few where experts are so small that calling a product takes longer than computing it.
More slots are products, see `ExpandOnCpu`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import PassLog
from inductor_passes.graph_tools import arguments, find, operator_name, rewrite_each
from inductor_passes.lowerings.cpu_routing import route, sort_by_expert
from inductor_passes.lowerings.cpu_stages import expand
from inductor_passes.lowerings.pointwise import weighted_sum
from inductor_passes.lowerings.written import Written
from moe_ops import _compat
from moe_ops._checks import compute_dtype
from moe_ops.activation import apply_activation, gate_times_up, split_gate_up
from moe_ops.arguments import (
    BuildDispatch,
    Combine,
    FusedExperts,
    FusedExpertsFormula,
    FusedMoe,
    FusedMoeFormula,
    GroupedLinear,
    PairedLinear,
    TopkRouting,
)
from moe_ops.dispatch import local_experts
from moe_ops.formula import Formula
from moe_ops.types import Activation, RoutingConfig

_FEW_SLOTS, _MOST_SLOTS, _SLOTS_PER_EXPERT = 16, 64, 2
"""Up to so many, and while slots share few experts up to more, reading the weights once for each slot costs less than
products of few rows."""
_MOST_SMALL_SLOTS = 512
_SMALL_LAYER = {
    torch.float32: (1 << 23, 1 << 23),
    torch.bfloat16: (1 << 24, 1 << 22),
    torch.float16: (1 << 24, 1 << 23),
}
"""Multiplications up to which loops cost less than two calls, and so many slots: where the processor multiplies no
bfloat16, and where it does."""


class ExpandFewSlots:
    """fused_experts and fused_moe of few slots on a CPU become ATen, whatever their gate."""

    name = "expand_few_slots"
    requires: tuple[str, ...] = ("fused_experts", "fused_experts_formula", "fused_moe", "fused_moe_formula")
    inference_only = False

    def run(self, graph: Graph, log: PassLog) -> None:
        """Writes out every layer of few slots on a CPU."""
        stages = [node for node in find(graph, *self.requires) if _suits(node)]
        rewrite_each(graph, stages, partial(_rewrite, Written()), log, log.keep)


def _suits(stage: Node) -> bool:
    args, first = arguments(stage), stage.meta["val"]
    w13, w2 = args.experts
    weights = [linear.weight.meta["val"] for linear in (*w13.parts, w2)]
    num_experts, slots = weights[0].shape[0], first.shape[0] * _top_k(args)
    if first.device.type != "cpu" or not isinstance(slots, int) or not isinstance(num_experts, int):
        return False
    is_few = slots <= max(_FEW_SLOTS, min(_MOST_SLOTS, _SLOTS_PER_EXPERT * num_experts))
    if slots == 0 or not (is_few or _is_small(slots, weights)):
        return False
    return all(weight.stride(2) == 1 for weight in weights)  # rows that are read in order


def _is_small(slots: int, weights: Sequence[Tensor]) -> bool:
    multiplications = slots * sum(weight.shape[1] * weight.shape[2] for weight in weights)
    most = _SMALL_LAYER.get(weights[0].dtype, (0, 0))[_compat.has_bfloat16_products()]
    return slots <= _MOST_SMALL_SLOTS and isinstance(multiplications, int) and multiplications <= most


def _top_k(args: Any) -> int | torch.SymInt:
    if hasattr(args, "router"):
        return RoutingConfig.from_spec(args.router.routing).top_k
    return args.topk_ids.meta["val"].shape[1]


def _rewrite(written: Written, graph: Graph, stage: Node, log: PassLog) -> None:
    expand(written, graph, stage, arguments(stage), _FORMULAS[operator_name(stage)])
    log.lower("ATen", stage)


def route_and_run(args: FusedMoe | FusedMoeFormula) -> Tensor:
    """`fused_moe`."""
    return few_slots(args.routed(*route(TopkRouting(args.router))))


def few_slots(args: FusedExperts | FusedExpertsFormula) -> Tensor:
    """`fused_experts` with one row for each slot, in the compute dtype to the end."""
    x, (w13, w2), topk_weights, topk_ids, placement, shared, *_ = args
    num_experts, top_k = w13.weight.shape[0], topk_ids.shape[1]
    expert, slots, inverse = _rows(BuildDispatch(topk_ids, placement, num_experts))
    chosen = expert.masked_fill(expert == num_experts, 0)  # [S]
    rows = x.to(compute_dtype(x.dtype)).index_select(0, slots // top_k)  # [S, H]
    activated = _activated(rows, args, chosen)
    expert_out = _product(activated, w2, chosen)
    return weighted_sum(Combine(expert_out, topk_weights, inverse, shared, args.epilogue)).to(x.dtype)


def _rows(args: BuildDispatch) -> tuple[Tensor, Tensor, Tensor]:
    """As `sort_by_expert`; one token's slots stay as they are, for hardly an expert comes twice."""
    if args.topk_ids.shape[0] > 1:
        return sort_by_expert(args)
    expert = local_experts(args.topk_ids.flatten(), args.placement, args.num_experts)
    slots = torch.arange(expert.shape[0])
    return expert, slots, slots.masked_fill(expert == args.num_experts, -1)


def _activated(rows: Tensor, args: FusedExperts | FusedExpertsFormula, chosen: Tensor) -> Tensor:
    """[S, I]."""
    w13 = args.experts.w13
    if isinstance(args, FusedExpertsFormula):
        formula = Formula.from_spec(args.gate.formula)
        gate, up = _gate_and_up(rows, w13, chosen, formula)
        return formula(gate, up, formula.rows_of(args.gate.operands, chosen, gate))
    activation = Activation.from_spec(args.activation)
    gate, up = _gate_and_up(rows, w13, chosen, activation)
    return gate_times_up(gate, up, activation) if activation.is_gated else apply_activation(gate, activation)


def _gate_and_up(
    rows: Tensor, w13: PairedLinear, chosen: Tensor, gate: Activation | Formula
) -> tuple[Tensor, Tensor]:
    """[S, I] each, in one loop: two sums at a time do not wait for each other's additions. Ungated both are one."""
    if not gate.is_gated:
        product = _product(rows, w13.halves[0], chosen)
        return product, product
    both = [_product(rows, half, chosen) for half in _halves(w13, gate)]
    return both[0], both[1]


def _halves(w13: PairedLinear, gate: Activation | Formula) -> Sequence[GroupedLinear]:
    """Gate and up rows as products of their own."""
    if w13.up is not None:
        return w13.halves
    weights = split_gate_up(w13.weight, gate)
    biases = (None, None) if w13.bias is None else split_gate_up(w13.bias, gate)
    return [GroupedLinear(*linear) for linear in zip(weights, biases, strict=True)]


def _product(rows: Tensor, linear: GroupedLinear, expert: Tensor) -> Tensor:
    """[S, B]: each row [S, A] times the weight [B, A] of its expert."""
    product = (linear.weight[expert].to(rows.dtype) * rows.unsqueeze(1)).sum(-1)
    return product if linear.bias is None else product + linear.bias[expert].to(rows.dtype)


_FORMULAS: dict[str, Callable[[Any], Any]] = {
    "fused_experts": few_slots,
    "fused_experts_formula": few_slots,
    "fused_moe": route_and_run,
    "fused_moe_formula": route_and_run,
}
