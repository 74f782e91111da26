"""FuseForBackward: stages that were raised before autograd become the halves that save least for a backward.

gate_up   = grouped_gemm(permute(hidden_states, sorted_slots), w13, expert_offsets)
activated = gated_activation(gate_up, activation)
out       = combine(grouped_gemm(activated, w2, expert_offsets), topk_weights, inverse, shared)
->
gate_up   = gather_gemm(hidden_states, w13, sorted_slots, expert_offsets)
out       = act_gemm_combine(gate_up, w2, expert_offsets, topk_weights, sorted_slots, inverse, shared, activation)
"""

from torch.fx import Graph, Node

from inductor_passes.base import PassLog, Refusal
from inductor_passes.graph_tools import (
    arguments,
    describe,
    erase_dead,
    expect_one_plan,
    expect_one_weight,
    expect_only_user,
    expect_op,
    find,
    is_op,
    pick,
    replacement,
    rewrite_each,
)
from moe_ops.arguments import (
    ActGemmCombine,
    Combine,
    GatedActivation,
    GatherGemm,
    GroupedGemm,
    Permute,
)


class FuseForBackward:
    """permute -> grouped_gemm becomes gather_gemm; gated_activation -> grouped_gemm -> combine act_gemm_combine."""

    name = "fuse_for_backward"
    requires: tuple[str, ...] = ("permute", "combine")
    inference_only = False

    def run(self, graph: Graph, log: PassLog) -> None:
        """Fuses at every combine, then at every gather."""
        rewrite_each(graph, find(graph, "combine"), _second_half, log)
        rewrite_each(graph, find(graph, "permute"), _first_half, log)


def _first_half(graph: Graph, gather: Node, log: PassLog) -> None:
    rows: Permute = arguments(gather)
    for gemm in list(gather.users):
        expect_op(gemm, "grouped_gemm", "what reads the gathered rows", gather)
        product: GroupedGemm = arguments(gemm)
        if product.x is not gather:
            raise Refusal(gather, f"the gathered rows are no rows of {describe(gemm)}")
        expect_one_plan(gemm, sorted_slots=rows.sorted_slots, expert_offsets=product.expert_offsets)
        args = GatherGemm(rows.hidden_states, product.weight, rows.sorted_slots, product.expert_offsets)
        fused = replacement(graph, args, gemm)
        log.fuse("gather_gemm", gemm, (gather, gemm))
        gemm.replace_all_uses_with(fused)
        erase_dead(graph, (gemm,))
    erase_dead(graph, (gather,))


def _second_half(graph: Graph, combine: Node, log: PassLog) -> None:
    total: Combine = arguments(combine)
    gemm = expect_op(total.expert_out, "grouped_gemm", "expert_out", combine)
    expect_only_user(gemm, combine, "expert_out")
    product: GroupedGemm = arguments(gemm)
    gate = expect_op(product.x, "gated_activation", "the input of grouped_gemm", gemm)
    expect_only_user(gate, gemm, "the activated rows")
    plan = expect_one_plan(combine, expert_offsets=product.expert_offsets, inverse=total.inverse)
    if plan is None or not is_op(plan, "build_dispatch"):
        raise Refusal(
            combine, f"the dispatch plan comes from {describe(total.inverse)}, not from build_dispatch"
        )
    gated: GatedActivation = arguments(gate)
    args = ActGemmCombine(
        gated.gate_up,
        expect_one_weight(product, combine),
        product.expert_offsets,
        total.topk_weights,
        pick(graph, plan, 0),  # type: ignore[arg-type]  # a node
        total.inverse,
        total.shared,
        gated.activation,
        total.epilogue,
    )
    fused = replacement(graph, args, combine)
    log.fuse("act_gemm_combine", combine, (gate, gemm, combine))
    combine.replace_all_uses_with(fused)
    erase_dead(graph, (combine, gemm, gate))
