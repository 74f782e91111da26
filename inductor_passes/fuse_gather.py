"""FuseGatherGemmActivation: rows are gathered, multiplied by w13 and gated without a trip to memory between.

rows    = permute(hidden_states, sorted_slots)
gate_up = grouped_gemm(rows, w13, expert_offsets, bias)
out     = gated_activation(gate_up, activation)
->
out     = gather_gemm_act(hidden_states, w13, sorted_slots, expert_offsets, bias, activation)
"""

from torch.fx import Graph, Node

from inductor_passes.base import LAYER_KEY, PassLog, Refusal
from inductor_passes.graph_tools import (
    arguments,
    describe,
    erase_dead,
    expect_one_plan,
    expect_only_user,
    expect_op,
    find,
    is_op,
    replacement,
    rewrite_each,
)


class FuseGatherGemmActivation:
    """permute -> grouped_gemm -> gated_activation becomes gather_gemm_act."""

    name = "fuse_gather_gemm_activation"
    requires: tuple[str, ...] = ("gated_activation", "permute")
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Fuses at every gated_activation, then reports gathered GEMMs whose gate is something else."""
        rewrite_each(graph, find(graph, "gated_activation"), _rewrite, log)
        rewrite_each(graph, find(graph, "grouped_gemm"), _refuse_other_gate, log)


def _rewrite(graph: Graph, gate: Node, log: PassLog) -> None:
    gate_up = arguments(gate)["gate_up"]
    if LAYER_KEY not in gate.meta and not is_op(gate_up, "grouped_gemm"):
        return  # the gate of a dense layer, such as a shared expert
    gemm = expect_op(gate_up, "grouped_gemm", "gate_up", gate)
    product = arguments(gemm)
    gather = expect_op(product["x"], "permute", "the input of grouped_gemm", gemm)
    expect_only_user(gemm, gate, "gate_up")
    expect_only_user(gather, gemm, "the gathered rows")
    rows = arguments(gather)
    slots, offsets = rows["sorted_slots"], product["expert_offsets"]
    expect_one_plan(gemm, sorted_slots=slots, expert_offsets=offsets)
    args = (
        rows["hidden_states"],
        product["weight"],
        slots,
        offsets,
        product["bias"],
        arguments(gate)["activation"],
    )
    fused = replacement(graph, "gather_gemm_act", args, gate)
    log.fuse("gather_gemm_act", gate, (gather, gemm, gate))
    gate.replace_all_uses_with(fused)
    erase_dead(graph, (gate, gemm, gather))


def _refuse_other_gate(graph: Graph, gemm: Node, log: PassLog) -> None:
    if not is_op(arguments(gemm)["x"], "permute") or any(
        is_op(user, "gated_activation") for user in gemm.users
    ):
        return
    readers = ", ".join(describe(user) for user in gemm.users)
    raise Refusal(gemm, f"gate_up is read by {readers}, not by gated_activation")
