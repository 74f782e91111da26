"""FuseFormula: rows are gathered, multiplied by w13 and put through any elementwise gate without a trip to memory.

rows      = permute(hidden_states, sorted_slots)
gate_up   = grouped_gemm(rows, w13, expert_offsets, bias)
activated = anything elementwise over gate and up
out       = grouped_gemm(activated, w2, expert_offsets)
->
activated = gather_gemm_formula(hidden_states, w13, bias, sorted_slots, expert_offsets, operands, formula)
out       = grouped_gemm(activated, w2, expert_offsets)
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

import moe_ops
from inductor_passes import _compat
from inductor_passes.base import PassLog, Refusal
from inductor_passes.capture_gate import capture
from inductor_passes.graph_tools import (
    arguments,
    describe,
    expect_one_plan,
    expect_only_user,
    find,
    inherit_meta,
    is_op,
    outputs,
    replacement,
    rewrite_each,
)
from inductor_passes.raising.evaluation import concrete, cut, evaluate
from inductor_passes.raising.views_of_rows import rank, readers
from inductor_passes.raising.writing import erase_unread
from moe_ops.arguments import Gate, GatherGemmFormula, GroupedGemm, Permute
from moe_ops.formula import MAX_OPERANDS


class FuseFormula:
    """permute -> grouped_gemm -> elementwise -> grouped_gemm becomes gather_gemm_formula -> grouped_gemm."""

    name = "fuse_formula"
    requires: tuple[str, ...] = ("grouped_gemm",)
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Fuses at every gathered GEMM that no gate with a name reads."""
        rewrite_each(
            graph, [node for node in find(graph, "grouped_gemm") if _has_other_gate(node)], _rewrite, log
        )


def _has_other_gate(gemm: Node) -> bool:
    is_read_by_name = any(is_op(user, "gated_activation") for user in gemm.users)
    return is_op(arguments(gemm).x, "permute") and not is_read_by_name


def _rewrite(graph: Graph, gemm: Node, log: PassLog) -> None:
    product: GroupedGemm = arguments(gemm)
    gather: Any = product.x
    activated, between = _between(graph, gemm, product)
    rows: Permute = arguments(gather)
    expect_only_user(gather, gemm, "the gathered rows")
    plan = expect_one_plan(gemm, sorted_slots=rows.sorted_slots, expert_offsets=product.expert_offsets)
    experts = partial(_are_experts, plan, product)
    formula, operands = capture(gemm, activated, experts)
    padded = (*operands, *(None,) * (MAX_OPERANDS - len(operands)))
    gate = Gate(*padded, formula.spec)  # type: ignore[arg-type]
    args = GatherGemmFormula(
        rows.hidden_states, product.weight, rows.sorted_slots, product.expert_offsets, gate
    )
    fused = replacement(graph, args, activated)
    inherit_meta(fused, gemm)  # the layer that it is of
    log.fuse("gather_gemm_formula", gemm, (gather, gemm, *between))
    log.capture(formula.spec, gemm, between)
    activated.replace_all_uses_with(fused)
    erase_unread(graph, activated)


def _between(graph: Graph, gemm: Node, product: GroupedGemm) -> tuple[Node, tuple[Node, ...]]:
    """What the second product of the plan multiplies, and all nodes from `gemm` to there."""
    for second in find(graph, "grouped_gemm"):
        other: Any = arguments(second)
        if second is gemm or other.expert_offsets is not product.expert_offsets:
            continue
        back = cut([other.x], lambda node: node is gemm or is_op(node, "grouped_gemm", "permute"))
        if gemm in back.leaves:
            nodes = _reached(gemm, back.nodes)
            _expect_private(nodes, other.x, second)
            return other.x, nodes
    users = ", ".join(describe(user) for user in gemm.users)
    raise Refusal(gemm, f"gate_up is read by {users}, not by gated_activation")


def _reached(start: Node, nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Those of `nodes`, in order, that depend on `start`."""
    found = {start: None}
    for node in nodes:
        if not found.keys().isdisjoint(node.all_input_nodes):
            found[node] = None
    return tuple(found)[1:]


def _expect_private(nodes: tuple[Node, ...], activated: Node, second: Node) -> None:
    inside = {*nodes, second}
    for node in nodes:
        for user in readers(node):
            if user not in inside or (user is second and node is not activated):
                raise Refusal(node, f"{describe(node)} of the gate is also read by {describe(user)}")


def _are_experts(plan: Node | None, product: GroupedGemm, index: Node) -> bool:
    """Whether `index` [S] is the expert of each row of the plan, tried on plans of real numbers."""
    known: Any = product
    sizes = map(concrete, (known.x.meta["val"].shape[0], known.weight.weight.meta["val"].shape[0]))
    num_slots, num_experts = sizes
    if plan is None or num_slots is None or num_experts is None:
        return False
    with _compat.real_tensors():
        return all(_are_experts_of(plan, index, *_sample(num_slots, num_experts, seed)) for seed in range(2))


def _sample(num_slots: int, num_experts: int, seed: int) -> tuple[Tensor, moe_ops.DispatchPlan]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, num_experts, (num_slots, 1), generator=generator)
    return ids.flatten(), moe_ops.build_dispatch(ids, num_experts)


def _are_experts_of(plan: Node, index: Node, ids: Tensor, sample: moe_ops.DispatchPlan) -> bool:
    values = _values(plan, sample)
    found = cut([index], lambda node: node in values)
    values |= {leaf: concrete(leaf.meta["val"]) for leaf in found.leaves if rank(leaf) < 0}
    if not values.keys() >= set(found.leaves) or any(value is None for value in values.values()):
        return False
    try:
        result = evaluate(found.nodes, values)[index]
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
    ):  # computed of something else, or for other sizes
        return False
    kept = sample.sorted_slots[: int(sample.expert_offsets[-1])].long()
    return result.shape == ids.shape and torch.equal(result[: len(kept)].long(), ids[kept])


def _values(plan: Node, sample: moe_ops.DispatchPlan) -> dict[Node, Any]:
    """The outputs of a plan, had it been made of the sample."""
    first = len(plan.meta["val"]) - len(sample)
    return {node: sample[index - first] for index, node in outputs(plan).items() if index >= first}
