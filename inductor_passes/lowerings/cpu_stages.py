"""ExpandOnCpu: on a CPU all of a layer but its products becomes ATen, which Inductor turns into C++ loops.

An operator call is a Python function there, and what it does besides products is many small ATen calls. Written out,
routing, dispatch, gathers, gates, weighted sums and their gradients melt into loops; `grouped_gemm` and the gradient to
its weight stay calls, since how many rows an expert has is known at run time only. In training graphs those of few
rows become loops as well; where nothing is trained `ExpandFewSlots` has seen to them. Any number of tokens, also a
symbolic one.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import PassLog, Refusal
from inductor_passes.graph_tools import (
    arguments,
    erase_dead,
    find,
    is_training,
    operator_name,
    pick,
    rewrite_each,
)
from inductor_passes.lowerings import few_rows
from inductor_passes.lowerings.cpu_routing import plan, route, route_and_plan, routing_gradient
from inductor_passes.lowerings.pointwise import (
    MAX_UNROLLED_EXPERTS,
    gather_rows,
    slots_per_token,
    weighted_sum,
)
from inductor_passes.lowerings.written import Written
from moe_ops import records
from moe_ops._checks import compute_dtype
from moe_ops.activation import activate_halves, reference as gated_activation
from moe_ops.arguments import (
    ActGemmCombine,
    BuildDispatch,
    Combine,
    FusedExperts,
    FusedExpertsFormula,
    FusedMoe,
    FusedMoeFormula,
    GatedActivation,
    GatherGemm,
    GatherGemmAct,
    GatherGemmFormula,
    GemmCombine,
    GroupedGemm,
    Permute,
    PermuteBackward,
    TopkRouting,
)
from moe_ops.dense_gemm import reference as dense_gemm
from moe_ops.gate import apply_formula, apply_to_halves
from moe_ops.grouped_gemm import product
from moe_ops.types import RoutingConfig
from moe_ops.weighted_activation import reference as weighted_activation_backward

Formulas = Mapping[str, Callable[[Any], Any]]


class ExpandOnCpu:
    """Routers, dispatches, halves of layers and layers on a CPU become ATen around grouped_gemm."""

    name = "expand_on_cpu"
    requires: tuple[str, ...] = (
        "topk_routing",
        "build_dispatch",
        "grouped_gemm",
        "routing_dispatch",
        "gather_gemm_act",
        "gather_gemm_formula",
        "gemm_combine",
        "fused_experts",
        "fused_experts_formula",
        "fused_moe",
        "fused_moe_formula",
        "gather_gemm",
        "act_gemm_combine",
        "dense_gemm",
        "weighted_activation_backward",
        "topk_routing_backward",
        "permute_backward",
        "grouped_gemm_weight_backward",
    )
    inference_only = False

    def run(self, graph: Graph, log: PassLog) -> None:
        """Writes out every stage and layer on a CPU; products become calls that do nothing besides."""
        pairs = [node for node in _on_cpu(graph, "grouped_gemm") if arguments(node).weight.up is not None]
        rewrite = partial(_rewrite, Written(), {**_FORMULAS, "grouped_gemm": _product_of_parts})
        rewrite_each(graph, [*_on_cpu(graph, *_FORMULAS), *pairs], rewrite, log, log.keep)
        products = _on_cpu(graph, *few_rows.FORMULAS) if is_training(graph) else ()
        few = [node for node in products if few_rows.has_few_rows(node)]
        rewrite_each(graph, few, partial(_rewrite, Written(), few_rows.FORMULAS), log, log.keep)
        for node in () if _compat.is_packaging() else _on_cpu(graph, *few_rows.FORMULAS):
            node.target = getattr(torch.ops.moe, operator_name(node)).compiled


def _on_cpu(graph: Graph, *names: str) -> list[Node]:
    return [node for node in find(graph, *names) if _device(node).type == "cpu"]


def _device(stage: Node) -> torch.device:
    value = stage.meta["val"]
    return (value if isinstance(value, Tensor) else value[0]).device


def _rewrite(written: Written, formulas: Formulas, graph: Graph, stage: Node, log: PassLog) -> None:
    args = arguments(stage)
    top_k = _top_k(args)
    if not isinstance(top_k, int) or top_k > MAX_UNROLLED_EXPERTS:
        raise Refusal(
            stage, f"{top_k} experts per token are too many to write out; it stays an operator call"
        )
    expand(written, graph, stage, args, formulas[operator_name(stage)])
    log.lower("ATen", stage)


def _top_k(args: Any) -> int | torch.SymInt:
    """Experts per token, 1 where they do not matter."""
    if hasattr(args, "router"):
        return RoutingConfig.from_spec(args.router.routing).top_k
    if hasattr(args, "num_tokens"):
        tokens = getattr(args.num_tokens, "meta", {}).get("val", args.num_tokens)
        return slots_per_token(args.sorted_slots.meta["val"].shape[0], tokens)
    return args.topk_weights.meta["val"].shape[1] if hasattr(args, "topk_weights") else 1


def expand(written: Written, graph: Graph, stage: Node, args: Any, formula: Callable[[Any], Any]) -> None:
    """Writes the ATen graph of `formula(args)` in the place of `stage`."""
    nodes = list(dict.fromkeys(leaf for leaf in records.flatten(args) if isinstance(leaf, Node)))

    def expanded(*tensors: Tensor) -> Any:
        values = dict(zip(nodes, tensors, strict=True))
        return formula(records.transform(lambda leaf: values.get(leaf, leaf), args))

    value = stage.meta["val"]
    results = [stage] if isinstance(value, Tensor) else [pick(graph, stage, i) for i in range(len(value))]
    for old, new in zip(results, written.inline(graph, expanded, nodes, stage, results), strict=True):
        old.replace_all_uses_with(new)
    erase_dead(graph, [stage])


def _first_half(args: GatherGemmAct | GatherGemmFormula) -> Tensor:
    rows = gather_rows(Permute(args.hidden_states, args.sorted_slots))
    halves = [product(rows, part, args.expert_offsets) for part in args.w13.parts]
    if isinstance(args, GatherGemmAct):
        return activate_halves(halves, args.activation)
    if args.w13.up is None:
        return apply_formula(halves[0], args.gate, args.expert_offsets)
    return apply_to_halves(halves, args.gate, args.expert_offsets)


def _gathered_product(args: GatherGemm) -> Tensor:
    rows = gather_rows(Permute(args.hidden_states, args.sorted_slots))
    return _product_of_parts(GroupedGemm(rows, args.w13, args.expert_offsets))


def _gathered_gradient(args: PermuteBackward) -> Tensor:
    """[T, H]: the sum of each token's rows, in slot order."""
    grad, slots, num_tokens = args
    rows = torch.arange(slots.shape[0], dtype=slots.dtype)
    inverse = torch.empty_like(slots).scatter(0, slots.long(), rows)
    total = grad.new_zeros((num_tokens, grad.shape[1]), dtype=compute_dtype(grad.dtype))
    for row in inverse.view(num_tokens, slots_per_token(slots.shape[0], num_tokens)).unbind(1):
        total = total + grad.index_select(0, row).to(total.dtype)
    return total.to(grad.dtype)


def _product_of_parts(args: GroupedGemm) -> Tensor:
    """A pair's weights are multiplied with where they are, and the products laid side by side."""
    products = [product(args.x, part, args.expert_offsets) for part in args.weight.parts]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


def _from_gate_up(args: ActGemmCombine) -> Tensor:
    activated = gated_activation(GatedActivation(args.gate_up, args.activation))
    _, w2, offsets, weights, _, inverse, shared, *_ = args
    return _second_half(GemmCombine(activated, w2, offsets, weights, inverse, shared, args.epilogue))


def _second_half(args: GemmCombine) -> Tensor:
    expert_out = product(args.x, args.w2, args.expert_offsets)
    return weighted_sum(Combine(expert_out, args.topk_weights, args.inverse, args.shared, args.epilogue))


def _experts(args: FusedExperts | FusedExpertsFormula) -> Tensor:
    w13, w2 = args.experts
    slots, inverse, offsets = plan(BuildDispatch(args.topk_ids, args.placement, w13.weight.shape[0]))
    activated = _first_half(args.first_half(slots, offsets))
    return _second_half(
        GemmCombine(activated, w2, offsets, args.topk_weights, inverse, args.shared, args.epilogue)
    )


def _layer(args: FusedMoe | FusedMoeFormula) -> Tensor:
    return _experts(args.routed(*route(TopkRouting(args.router))))


_FORMULAS: Formulas = {
    "topk_routing": route,
    "build_dispatch": plan,
    "routing_dispatch": route_and_plan,
    "gather_gemm_act": _first_half,
    "gather_gemm_formula": _first_half,
    "gemm_combine": _second_half,
    "fused_experts": _experts,
    "fused_experts_formula": _experts,
    "fused_moe": _layer,
    "fused_moe_formula": _layer,
    "gather_gemm": _gathered_product,
    "act_gemm_combine": _from_gate_up,
    "dense_gemm": dense_gemm,
    "weighted_activation_backward": weighted_activation_backward,
    "topk_routing_backward": routing_gradient,
    "permute_backward": _gathered_gradient,
}
