"""CollapseMoE: a layer whose halves are fused becomes one operator, which picks its kernels by token count.

    ids  -> build_dispatch   -> gather_gemm_act -> gemm_combine    becomes  fused_experts(..., topk_ids, ...)
    logits -> routing_dispatch -> gather_gemm_act -> gemm_combine  becomes  fused_moe(..., router_logits, ...)

When something else reads the router's weights or ids, or a shared expert is added, the router stays its own
operator and the rest becomes fused_experts.
"""

from typing import Any

from torch.fx import Graph, Node

from inductor_passes.base import PassLog, Refusal
from inductor_passes.graph_tools import (
    arguments,
    call,
    describe,
    erase_dead,
    expect_one_plan,
    expect_only_user,
    expect_op,
    find,
    getitem_source,
    is_op,
    outputs,
    pick,
    replacement,
    rewrite_each,
)
from moe_ops.arguments import (
    ExpertWeights,
    FusedExperts,
    FusedExpertsFormula,
    FusedMoe,
    FusedMoeFormula,
    GatherGemmAct,
    GatherGemmFormula,
    GemmCombine,
    RoutingDispatch,
    TopkRouting,
)

_FirstHalf = GatherGemmAct | GatherGemmFormula
"""Of a layer; what its gate is comes last."""


class CollapseMoE:
    """dispatch -> gather_gemm_act -> gemm_combine becomes fused_experts or fused_moe."""

    name = "collapse_moe"
    requires: tuple[str, ...] = ("gemm_combine",)
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Collapses at every gemm_combine."""
        rewrite_each(graph, find(graph, "gemm_combine"), _rewrite, log)


def _rewrite(graph: Graph, down: Node, log: PassLog) -> None:
    second = arguments(down)
    up: Any = second.x
    if not is_op(up, "gather_gemm_formula"):
        up = expect_op(up, "gather_gemm_act", "the input of gemm_combine", down)
    expect_only_user(up, down, "the activated rows")
    first = arguments(up)
    plan = _plan_of(first, second, down)
    if is_op(plan, "routing_dispatch") and _router_is_private(plan, first, second):
        fused = _as_fused_moe(graph, plan, first, second, down)
    else:
        fused = _as_fused_experts(graph, plan, first, second, down)
    log.fuse(describe(fused), down, (plan, up, down))
    down.replace_all_uses_with(fused)
    erase_dead(graph, (down, up))
    _drop_plan(graph, plan, log)


def _plan_of(first: _FirstHalf, second: GemmCombine, down: Node) -> Node:
    if getitem_source(first.sorted_slots) is None and getitem_source(second.inverse) is not None:
        rows = describe(first.hidden_states)
        raise Refusal(down, f"the rows of gather_gemm_act come from {rows}, not from tokens in expert order")
    plan = expect_one_plan(
        down,
        sorted_slots=first.sorted_slots,
        expert_offsets=second.expert_offsets,
        inverse=second.inverse,
    )
    if not is_op(plan, "build_dispatch", "routing_dispatch"):
        raise Refusal(
            down, f"the dispatch plan comes from {describe(second.inverse)}, not from build_dispatch"
        )
    _expect_roles(plan, first, second, down)
    return plan  # type: ignore[return-value]


def _expect_roles(plan: Node | None, first: _FirstHalf, second: GemmCombine, down: Node) -> None:
    shift = 2 if is_op(plan, "routing_dispatch") else 0
    wanted = (first.sorted_slots, second.inverse, second.expert_offsets)
    for index, tensor in enumerate(wanted):
        if getitem_source(tensor) != (plan, shift + index):
            raise Refusal(down, f"{describe(tensor)} is used in another role than the plan gives it")
    if first.expert_offsets is not second.expert_offsets:
        raise Refusal(down, "the two grouped GEMMs use different expert_offsets")


def _router_is_private(plan: Node, first: _FirstHalf, second: GemmCombine) -> bool:
    """Whether the router serves this layer only, so that its weights and ids need not exist outside."""
    weights_are_ours = getitem_source(second.topk_weights) == (plan, 0)
    readers = {user for index, out in outputs(plan).items() if index < 2 for user in out.users}
    ours = {user for user in readers if is_op(user, "gemm_combine") and arguments(user) == second}
    return weights_are_ours and readers == ours and not any((second.shared, *second.epilogue))


def _as_fused_moe(graph: Graph, plan: Node, first: _FirstHalf, second: GemmCombine, down: Node) -> Node:
    routed: RoutingDispatch = arguments(plan)
    experts = ExpertWeights(first.w13, second.w2)
    given = first.hidden_states, routed.router, experts, routed.placement
    layer = FusedMoe if isinstance(first, GatherGemmAct) else FusedMoeFormula
    return replacement(graph, layer(*given, first[-1]), down)  # type: ignore[arg-type]


def _as_fused_experts(graph: Graph, plan: Node, first: _FirstHalf, second: GemmCombine, down: Node) -> Node:
    given = (
        first.hidden_states,
        ExpertWeights(first.w13, second.w2),
        second.topk_weights,
        _topk_ids(graph, plan),
        arguments(plan).placement,
        second.shared,
    )
    experts = FusedExperts if isinstance(first, GatherGemmAct) else FusedExpertsFormula
    return replacement(graph, experts(*given, first[-1], second.epilogue), down)  # type: ignore[arg-type]


def _topk_ids(graph: Graph, plan: Node) -> Any:
    if is_op(plan, "build_dispatch"):
        return arguments(plan).topk_ids
    return pick(graph, plan, 1)


def _drop_plan(graph: Graph, plan: Node, log: PassLog) -> None:
    """Erases a plan nobody reads; a router whose plan nobody reads goes back to being topk_routing."""
    erase_dead(graph, (plan,))
    if not is_op(plan, "routing_dispatch") or not plan.users or any(index > 1 for index in outputs(plan)):
        return
    log.undo("routing_dispatch", plan)
    with graph.inserting_before(plan):
        router = call(graph, TopkRouting(arguments(plan).router), like=plan)
    for index, getitem in outputs(plan).items():
        getitem.replace_all_uses_with(pick(graph, router, index))
    erase_dead(graph, (plan,))
