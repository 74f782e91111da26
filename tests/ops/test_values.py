"""Every path of the layer against the float64 oracle, in every dtype."""

import dataclasses
from itertools import product

import pytest
import torch

import moe_ops
from moe_ops import RoutingConfig
from moe_ops.reference import reference_experts, reference_routing
from tests.cases import CASES, ROUTINGS, Case, make
from tests.helpers import assert_matches_oracle

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def oracle(problem, weights, ids, expert_map=None):
    double = [
        t if t is None else t.detach().double() for t in (problem.hidden_states, problem.w13, problem.w2)
    ]
    biases = {name: None if t is None else t.double() for name, t in problem.biases().items()}
    return reference_experts(
        *double, weights.double(), ids, problem.activation, **biases, expert_map=expert_map
    )


@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
def test_fused_moe(case, dtype, emit, poisoned_empty):
    problem = make(case, dtype)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    expected = oracle(problem, weights, ids)
    out = moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit)
    assert out.dtype == dtype
    assert_matches_oracle(out, expected)


@cases
def test_fusion_targets_by_hand(case, poisoned_empty):
    problem = make(case)
    shared = torch.randn_like(problem.hidden_states)
    weights, ids, plan = moe_ops.routing_dispatch(problem.router_logits, problem.routing)
    up = moe_ops.gather_gemm_act(
        problem.hidden_states, problem.w13, plan, problem.activation, problem.w13_bias
    )
    out = moe_ops.gemm_combine(up, problem.w2, weights, plan, problem.w2_bias, shared)
    assert_matches_oracle(out, oracle(problem, weights, ids) + shared)
    gate_up = moe_ops.gather_gemm(problem.hidden_states, problem.w13, plan, problem.w13_bias)
    rest = problem.activation, problem.w2_bias, shared
    out = moe_ops.act_gemm_combine(gate_up, problem.w2, weights, plan, *rest)
    assert_matches_oracle(out, oracle(problem, weights, ids) + shared)


@cases
@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
def test_shared_enters_after_the_routed_sum(case, emit):
    problem = make(case)
    shared = torch.randn_like(problem.hidden_states)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    out = moe_ops.fused_moe(*problem.args(), **problem.biases(), shared=shared, emit=emit)
    assert_matches_oracle(out, oracle(problem, weights, ids) + shared)
    elsewhere = torch.full(problem.router_logits.shape[1:], -1, dtype=torch.int32)
    out = moe_ops.fused_moe(*problem.args(), shared=shared, expert_map=elsewhere, emit=emit)
    assert torch.equal(out, shared)


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.spec)
@pytest.mark.parametrize("shift", [None, 0, -3])
def test_routing(routing, shift):
    """A bias that makes every selection negative lets experts of groups left out win with a group_fill of 0."""
    logits = torch.randn(33, 16, dtype=torch.float64)
    bias = None if shift is None else torch.randn(16) + shift
    weights, ids = moe_ops.topk_routing(logits, routing, bias)
    expected_weights, expected_ids = reference_routing(logits, routing, bias)
    torch.testing.assert_close(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-14)
    assert weights.dtype == torch.float64
    assert moe_ops.topk_routing(logits.bfloat16(), routing, bias)[0].dtype == torch.float32


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.spec)
def test_routing_of_bad_logits(routing):
    """Ties go to the lowest id; what is not finite ranks last with weight 0; ids stay distinct and in range."""
    logits = torch.zeros(6, 16, dtype=torch.float64)
    logits[1, ::3] = float("nan")
    logits[2] = float("nan")
    logits[3, 5] = float("inf")
    logits[4] = float("-inf")
    logits[5, 2:] = float("-inf")
    weights, ids = moe_ops.topk_routing(logits, routing)
    expected_weights, expected_ids = reference_routing(logits, routing)
    torch.testing.assert_close(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-12, atol=1e-14)
    assert weights.isfinite().all()
    assert all(len(set(row)) == routing.top_k and 0 <= min(row) <= max(row) < 16 for row in ids.tolist())


def test_rules_in_which_other_routers_differ():
    """One for each row of the table in docs/REFERENCE.md that no value of another test depends on."""
    nan, groups = float("nan"), {"num_groups": 4, "topk_groups": 2}
    logits = torch.full((2, 8), nan)
    logits[1, 5] = 1.0
    for score_fn, group_score in product(("sigmoid", "sqrtsoftplus"), ("max", "top2_sum")):
        routing = RoutingConfig(3, score_fn, scale=2.5, group_score=group_score, **groups)
        weights, ids = moe_ops.topk_routing(logits, routing)
        assert ids[0].tolist() == [0, 1, 2] and weights[0].tolist() == [0.0, 0.0, 0.0]
        if group_score == "max":
            assert ids[1].tolist() == [5, 0, 1] and weights[1].tolist() == [2.5, 0.0, 0.0]
        rounded = torch.randn(4, 8).bfloat16()
        exact = moe_ops.topk_routing(rounded.float(), routing)
        assert all(map(torch.equal, moe_ops.topk_routing(rounded, routing), exact))
    logits = torch.randn(3, 8)
    plain, one_each = RoutingConfig(2, "sigmoid"), RoutingConfig(2, "sigmoid", num_groups=8, topk_groups=2)
    assert all(map(torch.equal, *(moe_ops.topk_routing(logits, routing) for routing in (plain, one_each))))


def test_zero_sum_divides_by_one():
    logits = torch.full((1, 4), -1000.0, dtype=torch.float64)
    weights, _ = moe_ops.topk_routing(logits, RoutingConfig(top_k=2, score_fn="sigmoid"))
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dispatch_is_stable_and_drops(dtype):
    ids = torch.tensor([[2, 0], [7, 2], [0, -1], [3, 2]], dtype=dtype)
    plan = moe_ops.build_dispatch(ids, 4)
    assert plan.expert_offsets.tolist() == [0, 2, 2, 5, 6]
    assert plan.sorted_slots.tolist() == [1, 4, 0, 3, 7, 6, 2, 5]
    assert plan.inverse.tolist() == [2, 0, -1, 3, 1, -1, 5, 4]
    assert {t.dtype for t in plan} == {torch.int32}


def test_dispatch_checks_ids_before_narrowing():
    ids = torch.tensor([[2**32, 2**32 + 1], [0, -(2**40)]])
    assert moe_ops.build_dispatch(ids, 2).inverse.tolist() == [-1, -1, 0, -1]


@pytest.mark.parametrize("size", [20, 10])
@pytest.mark.parametrize("tokens", [3, 40])
def test_expert_map(tokens, size):
    """Global ids through a map: remote experts (-1), map values and ids out of range drop the slot.

    Also ids that only a map of more experts would have, though they are ids of local experts.
    """
    case = dataclasses.replace(CASES[2], tokens=tokens)
    problem = make(case)
    expert_map = torch.full((20,), -1, dtype=torch.int32)
    expert_map[[0, *range(4, 16)]] = torch.randperm(13).int()
    expert_map[18] = 99
    expert_map = expert_map[:size]
    ids = torch.randint(-2, 22, (case.tokens, case.top_k))
    weights = torch.rand(case.tokens, case.top_k, dtype=torch.float64)
    expected = oracle(problem, weights, ids, expert_map)
    for emit in ("fused", "stages"):
        out = moe_ops.fused_experts(
            problem.hidden_states,
            problem.w13,
            problem.w2,
            weights,
            ids,
            problem.activation,
            **problem.biases(),
            expert_map=expert_map,
            emit=emit,
        )
        assert_matches_oracle(out, expected)


@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_all_slots_dropped_gives_exact_zero(emit, tokens, poisoned_empty):
    x, w13, w2 = torch.randn(tokens, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    ids = torch.full((tokens, 2), -1)
    out = moe_ops.fused_experts(x, w13, w2, torch.ones(tokens, 2), ids, emit=emit)
    assert torch.equal(out, torch.zeros_like(x))


@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
def test_a_nan_token_changes_no_other_bits(emit):
    problem = make(CASES[3], torch.float32)
    clean = moe_ops.fused_moe(*problem.args(), emit=emit)
    problem.hidden_states[5] = float("nan")
    dirty = moe_ops.fused_moe(*problem.args(), emit=emit)
    others = torch.arange(33) != 5
    assert torch.equal(clean[others], dirty[others])
    assert dirty[5].isnan().all()


def test_weight_on_input():
    problem = make(CASES[4])
    weights, ids = moe_ops.topk_routing(problem.router_logits, RoutingConfig(top_k=1, renormalize=False))
    weighted = dataclasses.replace(problem, hidden_states=problem.hidden_states * weights)
    expected = oracle(weighted, torch.ones_like(weights), ids)
    for emit in ("fused", "stages"):
        out = moe_ops.fused_experts(
            problem.hidden_states,
            problem.w13,
            problem.w2,
            weights,
            ids,
            problem.activation,
            apply_router_weight_on_input=True,
            emit=emit,
        )
        assert_matches_oracle(out, expected)


@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
def test_transposed_weights_are_taken_as_they_are(emit):
    problem = make(CASES[6])
    w13 = problem.w13.transpose(1, 2).contiguous().transpose(1, 2)
    w2 = problem.w2.transpose(1, 2).contiguous().transpose(1, 2)
    expected = moe_ops.fused_moe(*problem.args(), **problem.biases())
    out = moe_ops.fused_moe(
        problem.hidden_states,
        problem.router_logits,
        w13,
        w2,
        problem.routing,
        problem.activation,
        **problem.biases(),
        emit=emit,
    )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


def test_grouped_gemm_zeroes_the_tail(poisoned_empty):
    x = torch.full((5, 4), float("nan"))
    x[:3] = 1.0
    out = moe_ops.grouped_gemm(
        x, torch.ones(2, 6, 4), torch.tensor([0, 1, 3], dtype=torch.int32), torch.ones(2, 6)
    )
    assert torch.equal(out, torch.tensor([[5.0] * 6] * 3 + [[0.0] * 6] * 2))


@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
@pytest.mark.parametrize("tokens", [0, 3, 20])
@pytest.mark.parametrize("hidden, intermediate", [(0, 5), (8, 0), (0, 0)])
def test_sizes_of_zero(hidden, intermediate, tokens, emit):
    problem = make(Case(tokens, 4, 2, hidden, intermediate, bias=True), torch.float32)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    out = moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit)
    expected = torch.einsum("tk,tkh->th", weights, problem.w2_bias[ids.long()]) if not intermediate else out
    torch.testing.assert_close(out, expected)
    assert out.shape == (tokens, hidden)


@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
def test_repeated_runs_agree_bit_for_bit(emit):
    problem = make(CASES[6], torch.bfloat16)
    first = moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit)
    assert all(
        torch.equal(first, moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit))
        for _ in range(3)
    )


@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
@pytest.mark.parametrize("tokens", [1, 3, 33])
def test_inference_mode_and_a_default_device(emit, tokens):
    problem = make(Case(tokens, 8, 4, 16, 12, bias=True), torch.float32)
    expected = moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit)
    with torch.inference_mode(), torch.device("meta"):
        out = moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit)
    assert out.device.type == "cpu"
    assert torch.equal(out, expected)
