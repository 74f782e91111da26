"""Slots of a layer on the CPU: which are taken one by one, and what sorts the others."""

import pytest
import torch

import moe_ops
from moe_ops import _cpu_experts
from moe_ops.arguments import ExpertWeights, FusedExperts, GroupedLinear, PairedLinear, Placement
from tests.cases import Case, make
from tests.helpers import assert_matches_oracle
from tests.ops.test_values import oracle


@pytest.mark.parametrize(
    "expert_map", [None, torch.tensor([1, 2, 1, -1, 2, 3], dtype=torch.int32)], ids=["", "map"]
)
def test_plans_in_lists_are_those_of_torch(expert_map):
    """Of any ids: such as are out of range, and of a map's too."""
    ids = torch.tensor([[0, 7, -1], [2, 1, 1 << 40], [-5, 5, 9], [1, 2, 4]])
    weight = torch.empty(3, 8, 8)
    experts = ExpertWeights(PairedLinear(weight), GroupedLinear(weight))
    args = FusedExperts(
        torch.empty(4, 8), experts, torch.empty(4, 3), ids, Placement(expert_map), None, "silu"
    )
    for listed, sorted_ in zip(_cpu_experts._plan_in_lists(args), _cpu_experts._plan(args), strict=True):
        assert torch.equal(listed, sorted_) and listed.dtype == sorted_.dtype


@pytest.mark.parametrize(
    ("sizes", "one_by_one"),
    [
        ((4, 7, 1), True),
        ((5, 7, 1), False),
        ((1, 7, 6), True),
        ((11, 7, 3), False),
        ((8, 64, 2), True),
        ((8, 63, 2), False),
        ((17, 68, 1), False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_takes_slots_one_by_one(sizes, one_by_one, dtype, monkeypatch):
    """One token, or so few slots that sorting takes longer: 4, or 16 where hardly two share an expert."""
    calls, called = [], _cpu_experts._slot_by_slot
    monkeypatch.setattr(_cpu_experts, "_slot_by_slot", lambda *args: calls.append(1) or called(*args))
    problem = make(Case(*sizes, 8, 6, bias=True), dtype)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    ids[-1, 0] = -1
    out = moe_ops.fused_experts(
        problem.hidden_states, problem.w13, problem.w2, weights, ids, problem.activation, **problem.biases()
    )
    assert bool(calls) == one_by_one
    assert_matches_oracle(out, oracle(problem, weights, ids))
