"""FuseGatherGemmActivation: rows are gathered, multiplied by w13 and gated without a trip to memory between.

rows    = permute(hidden_states, sorted_slots)
gate_up = grouped_gemm(rows, w13, expert_offsets, bias)
out     = gated_activation(gate_up, activation)
->
out     = gather_gemm_act(hidden_states, w13, bias, sorted_slots, expert_offsets, activation)

On CUDA rows that were changed behind the gather, as where a model weighs them before its experts, take the same kernel:
each is then its own token, `sorted_slots` is 0, 1, 2, …
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import LAYER_KEY, PassLog
from inductor_passes.graph_tools import (
    arguments,
    erase_dead,
    expect_one_plan,
    expect_only_user,
    expect_op,
    find,
    is_op,
    replacement,
    rewrite_each,
    write_out,
)
from moe_ops.arguments import GatedActivation, GatherGemmAct, GroupedGemm, Permute


class FuseGatherGemmActivation:
    """permute -> grouped_gemm -> gated_activation becomes gather_gemm_act."""

    name = "fuse_gather_gemm_activation"
    requires: tuple[str, ...] = ("gated_activation", "permute")
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Fuses at every gated_activation."""
        rewrite_each(graph, find(graph, "gated_activation"), _rewrite, log)


def _rewrite(graph: Graph, gate: Node, log: PassLog) -> None:
    activation: GatedActivation = arguments(gate)
    if LAYER_KEY not in gate.meta and not is_op(activation.gate_up, "grouped_gemm"):
        return  # the gate of a dense layer, such as a shared expert
    gemm = expect_op(activation.gate_up, "grouped_gemm", "gate_up", gate)
    expect_only_user(gemm, gate, "gate_up")
    product: GroupedGemm = arguments(gemm)
    if gate.meta["val"].is_cuda and not is_op(product.x, "permute"):
        rows, old = _in_order(graph, product, gate), [gemm, gate]
    else:
        rows, old = _gathered(gemm, product), [product.x, gemm, gate]
    args = GatherGemmAct(
        rows.hidden_states,
        product.weight,
        rows.sorted_slots,
        product.expert_offsets,
        activation.activation,
    )
    fused = replacement(graph, args, gate)
    log.fuse("gather_gemm_act", gate, old)
    gate.replace_all_uses_with(fused)
    erase_dead(graph, reversed(old))


def _gathered(gemm: Node, product: GroupedGemm) -> Permute:
    gather = expect_op(product.x, "permute", "the input of grouped_gemm", gemm)
    expect_only_user(gather, gemm, "the gathered rows")
    rows: Permute = arguments(gather)
    expect_one_plan(gemm, sorted_slots=rows.sorted_slots, expert_offsets=product.expert_offsets)
    return rows


def _in_order(graph: Graph, product: Any, gate: Node) -> Permute:
    with graph.inserting_before(gate):
        (slots,) = write_out(graph, _numbers, (product.x,), gate)
    return Permute(product.x, slots)  # type: ignore[arg-type]  # a node


def _numbers(rows: Tensor) -> Tensor:
    return torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
