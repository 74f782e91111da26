"""ExpandFewSlots: on a CPU a layer of few slots becomes ATen, which Inductor turns into C++ reductions.

With a static number of slots the weights of each chosen expert are read in place, through its index: a reduction
`(weight[ids] * x).sum(-1)` copies no weight. Slots of one expert come after another, so that its weights come from
memory once. More slots are products, see `ExpandOnCpu`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import PassLog
from inductor_passes.graph_tools import arguments, find, operator_name, rewrite_each
from inductor_passes.lowerings.cpu_routing import route, sort_by_expert
from inductor_passes.lowerings.cpu_stages import expand
from inductor_passes.lowerings.pointwise import weighted_sum
from moe_ops._checks import compute_dtype
from moe_ops.activation import apply_activation, gate_times_up, split_gate_up
from moe_ops.arguments import BuildDispatch, Combine, FusedExperts, FusedMoe, GroupedLinear, TopkRouting
from moe_ops.dispatch import local_experts
from moe_ops.types import Activation, RoutingConfig

_FEW_SLOTS, _MOST_SLOTS, _SLOTS_PER_EXPERT = 16, 64, 2
"""Up to so many, and while slots share few experts up to more, reading the weights once for each slot costs less than
products of few rows."""


class ExpandFewSlots:
    """fused_experts and fused_moe of few slots on a CPU become ATen."""

    name = "expand_few_slots"
    requires: tuple[str, ...] = ("fused_experts", "fused_moe")
    inference_only = False

    def run(self, graph: Graph, log: PassLog) -> None:
        """Writes out every layer of few slots on a CPU."""
        stages = [node for node in find(graph, *self.requires) if _suits(node)]
        rewrite_each(graph, stages, _rewrite, log, log.keep)


def _suits(stage: Node) -> bool:
    args, first = arguments(stage), stage.meta["val"]
    weights = [linear.weight.meta["val"] for linear in args.experts]
    num_experts, slots = weights[0].shape[0], first.shape[0] * _top_k(args)
    if first.device.type != "cpu" or not isinstance(slots, int) or not isinstance(num_experts, int):
        return False
    is_few = 1 <= slots <= max(_FEW_SLOTS, min(_MOST_SLOTS, _SLOTS_PER_EXPERT * num_experts))
    return is_few and all(weight.stride(2) == 1 for weight in weights)  # rows that are read in order


def _top_k(args: FusedExperts | FusedMoe) -> int | torch.SymInt:
    if isinstance(args, FusedMoe):
        return RoutingConfig.from_spec(args.router.routing).top_k
    return args.topk_ids.meta["val"].shape[1]  # type: ignore[attr-defined]


def _rewrite(graph: Graph, stage: Node, log: PassLog) -> None:
    expand(graph, stage, arguments(stage), _FORMULAS[operator_name(stage)])
    log.lower("ATen", stage)


def route_and_run(args: FusedMoe) -> Tensor:
    """`fused_moe`."""
    weights, ids = route(TopkRouting(args.router))
    return few_slots(
        FusedExperts(args.hidden_states, args.experts, weights, ids, args.placement, None, args.activation)
    )


def few_slots(args: FusedExperts) -> Tensor:
    """`fused_experts` with one row for each slot, in the compute dtype to the end."""
    x, (w13, w2), topk_weights, topk_ids, placement, shared, activation = args
    num_experts, top_k = w13.weight.shape[0], topk_ids.shape[1]
    expert, slots, inverse = _rows(BuildDispatch(topk_ids, placement, num_experts))
    chosen = expert.masked_fill(expert == num_experts, 0)  # [S]
    rows = x.to(compute_dtype(x.dtype)).index_select(0, slots // top_k)  # [S, H]
    activated = _gate_up(rows, w13, chosen, Activation.from_spec(activation))
    expert_out = _product(activated, w2, chosen)
    return weighted_sum(Combine(expert_out, topk_weights, inverse, shared)).to(x.dtype)


def _rows(args: BuildDispatch) -> tuple[Tensor, Tensor, Tensor]:
    """As `sort_by_expert`; one token's slots stay as they are, for hardly an expert comes twice."""
    if args.topk_ids.shape[0] > 1:
        return sort_by_expert(args)
    expert = local_experts(args.topk_ids.flatten(), args.placement, args.num_experts)
    slots = torch.arange(expert.shape[0])
    return expert, slots, slots.masked_fill(expert == args.num_experts, -1)


def _gate_up(rows: Tensor, w13: GroupedLinear, chosen: Tensor, activation: Activation) -> Tensor:
    """[S, I]. Gate and up in one loop: two sums at a time do not wait for each other's additions."""
    if not activation.is_gated:
        return apply_activation(_product(rows, w13, chosen), activation)
    weights = split_gate_up(w13.weight, activation)
    biases = (None, None) if w13.bias is None else split_gate_up(w13.bias, activation)
    gate, up = (
        _product(rows, GroupedLinear(*linear), chosen) for linear in zip(weights, biases, strict=True)
    )
    return gate_times_up(gate, up, activation)


def _product(rows: Tensor, linear: GroupedLinear, expert: Tensor) -> Tensor:
    """[S, B]: each row [S, A] times the weight [B, A] of its expert."""
    product = (linear.weight[expert].to(rows.dtype) * rows.unsqueeze(1)).sum(-1)
    return product if linear.bias is None else product + linear.bias[expert].to(rows.dtype)


_FORMULAS: dict[str, Callable[[Any], Any]] = {"fused_experts": few_slots, "fused_moe": route_and_run}
