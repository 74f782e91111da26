"""ExpandFewSlots: on a CPU a router, and the experts, of few slots become ATen, which Inductor turns into C++.

An operator call costs a CPU more than the products of a few slots. With a static number of slots the weights of each
chosen expert are read in place, through its index: a reduction `(weight[ids] * x).sum(-1)` copies no weight. More slots
stay an operator, which sorts them by expert and calls ATen's products.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import PassLog, Refusal
from inductor_passes.graph_tools import arguments, erase_dead, find, operator_name, pick, rewrite_each
from inductor_passes.lowerings.pointwise import inline
from moe_ops import records
from moe_ops._checks import compute_dtype
from moe_ops.activation import apply_activation
from moe_ops.arguments import FusedExperts, FusedMoe, GroupedLinear, TopkRouting
from moe_ops.dispatch import local_experts
from moe_ops.routing import reference as topk_routing
from moe_ops.types import Activation, RoutingConfig

_FEW_SLOTS, _MOST_SLOTS, _SLOTS_PER_EXPERT = 16, 64, 2
"""Up to so many, and while slots share few experts up to more, reading an expert for each of its slots costs less than
sorting them: 32 experts of 512 x 512 with 64 slots take 3.6 against 4.3 ms in float32, 2.0 against 3.3 in bfloat16."""


class ExpandFewSlots:
    """topk_routing, fused_experts and fused_moe of few slots on a CPU become ATen."""

    name = "expand_few_slots"
    requires: tuple[str, ...] = ("topk_routing", "fused_experts", "fused_moe")
    inference_only = False

    def run(self, graph: Graph, log: PassLog) -> None:
        """Writes out every router and layer of few slots on a CPU."""
        stages = [node for node in find(graph, *self.requires) if _has_few_slots_on_cpu(node)]
        rewrite_each(graph, stages, _rewrite, log, log.keep)


def _has_few_slots_on_cpu(stage: Node) -> bool:
    value = stage.meta["val"]
    first = value if isinstance(value, Tensor) else value[0]
    top_k, num_experts = _choice(stage)
    slots = first.shape[0] * top_k
    if first.device.type != "cpu" or not isinstance(slots, int) or not isinstance(num_experts, int):
        return False
    return 1 <= slots <= max(_FEW_SLOTS, min(_MOST_SLOTS, _SLOTS_PER_EXPERT * num_experts))


def _choice(stage: Node) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """K, and of how many experts."""
    args = arguments(stage)
    if isinstance(args, FusedExperts):
        return _shape(args.topk_ids)[1], _shape(args.experts.w13.weight)[0]
    return RoutingConfig.from_spec(args.router.routing).top_k, _shape(args.router.router_logits)[1]


def _shape(node: Any) -> torch.Size:
    return node.meta["val"].shape


def _rewrite(graph: Graph, stage: Node, log: PassLog) -> None:
    args, formula = arguments(stage), _FORMULAS[operator_name(stage)]
    for name, leaf in records.named(args).items():
        if name in ("w13", "w2") and leaf.meta["val"].stride(2) != 1:
            raise Refusal(stage, f"{name} is transposed: its rows are not read in order")
    nodes = [leaf for leaf in records.flatten(args) if isinstance(leaf, Node)]

    def written(*tensors: Tensor) -> Any:
        values = dict(zip(nodes, tensors, strict=True))
        return formula(records.transform(lambda leaf: values.get(leaf, leaf), args))

    is_router = isinstance(args, TopkRouting)
    results = [pick(graph, stage, index) for index in (0, 1)] if is_router else [stage]
    for old, new in zip(results, inline(graph, written, nodes, stage, results), strict=True):
        old.replace_all_uses_with(new)
    erase_dead(graph, [stage])
    log.lower("ATen", stage)


def route(args: TopkRouting) -> tuple[Tensor, ...]:
    """`topk_routing`. Clones: a row cut out of a longer one counts as contiguous, and has other strides."""
    return tuple(output.clone(memory_format=torch.contiguous_format) for output in topk_routing(args.router))


def route_and_run(args: FusedMoe) -> Tensor:
    """`fused_moe`."""
    weights, ids = topk_routing(args.router)
    return few_slots(
        FusedExperts(args.hidden_states, args.experts, weights, ids, args.placement, None, args.activation)
    )


def few_slots(args: FusedExperts) -> Tensor:
    """`fused_experts` slot by slot, in the compute dtype to the end."""
    x, (w13, w2), topk_weights, topk_ids, placement, shared, activation = args
    dtype, num_experts = compute_dtype(x.dtype), w13.weight.shape[0]
    expert = local_experts(topk_ids, placement, num_experts)
    known = expert < num_experts
    chosen = expert.masked_fill(~known, 0).flatten()  # [S]
    rows = x.to(dtype).unsqueeze(1).expand(-1, topk_ids.shape[1], -1).flatten(0, 1)  # [S, H]
    activated = apply_activation(_product(rows, w13, chosen), Activation.from_spec(activation))
    expert_out = _product(activated, w2, chosen).unflatten(0, topk_ids.shape)  # [T, K, H]
    total = x.new_zeros(x.shape, dtype=dtype)
    for slot in range(topk_ids.shape[1]):  # in slot order, as every other way to run them
        weighed = expert_out[:, slot] * topk_weights[:, slot, None].to(dtype)
        # `where`, not a multiplication by zero: a dropped slot must not bring in a NaN of the expert read for it.
        total = torch.where(known[:, slot, None], total + weighed, total)
    return (total if shared is None else total + shared).to(x.dtype)


def _product(rows: Tensor, linear: GroupedLinear, expert: Tensor) -> Tensor:
    """[S, B]: each row [S, A] times the weight [B, A] of its expert."""
    product = (linear.weight[expert].to(rows.dtype) * rows.unsqueeze(1)).sum(-1)
    return product if linear.bias is None else product + linear.bias[expert].to(rows.dtype)


_FORMULAS: dict[str, Callable[[Any], Any]] = {
    "topk_routing": route,
    "fused_experts": few_slots,
    "fused_moe": route_and_run,
}
