"""ExpandPointwise: stages left alone become ATen with the same values; what is symbolic stays a call."""

import pytest
import torch

import moe_ops
from inductor_passes.lowerings import ExpandPointwise
from tests.cases import MORE_ACTIVATIONS
from tests.passes.capture import rewrite
from tests.passes.moe import TOKENS, TOP_K, inputs, routed

PASS = (ExpandPointwise(),)
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "relu2",
    "swiglu_oai",
    "silu;limit=0.5",
    "swiglu_oai;interleaved=True",
    *(activation.spec for activation in MORE_ACTIVATIONS),
)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_values(activation, dtype):
    gate_up = torch.randn(12, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    result = rewrite(lambda x: moe_ops.gated_activation(x, activation), gate_up, passes=PASS)
    assert result.ops() == []
    expected = moe_ops.gated_activation(gate_up, activation)
    torch.testing.assert_close(result.module(gate_up)[0], expected)


def test_gather_values():
    given = inputs()
    slots = routed(given.router_logits)[2].sorted_slots
    result = rewrite(moe_ops.permute, given.hidden_states, slots, passes=PASS)
    assert result.ops() == []
    expected = moe_ops.permute(given.hidden_states, slots)
    torch.testing.assert_close(result.module(given.hidden_states, slots)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("has_shared", [False, True])
def test_sum_values_with_dropped_slots_and_a_nan_row(has_shared):
    weights = torch.rand(TOKENS, TOP_K)
    inverse = torch.randperm(TOKENS * TOP_K).to(torch.int32)
    inverse[3] = -1
    expert_out = torch.randn(TOKENS * TOP_K, 8)
    expert_out[0] = torch.nan  # the row that stands in for a dropped slot's
    shared = torch.randn(TOKENS, 8) if has_shared else None
    given = (expert_out, weights, inverse, *([shared] if has_shared else []))
    result = rewrite(moe_ops.combine, *given, passes=PASS)
    assert result.ops() == []
    expected = moe_ops.combine(expert_out, weights, inverse, shared)
    assert expected.isnan().any(1).sum() <= 1
    torch.testing.assert_close(result.module(*given)[0], expected, equal_nan=True)


def test_symbolic_tokens_expand_too():
    given = inputs(dynamic=True)
    result = rewrite(lambda *args: routed(args[1])[2].inverse, *given, passes=PASS)
    assert result.ops() == ["topk_routing", "build_dispatch"]

    def gathered(hidden, logits):
        return moe_ops.permute(hidden, routed(logits)[2].sorted_slots)

    assert (
        "permute" in rewrite(gathered, *inputs(dynamic=True)[:2], passes=PASS).ops()
    )  # two unrelated symbols
    tied = rewrite(
        lambda hidden: gathered(hidden, hidden[:, :4]), inputs(dynamic=True).hidden_states, passes=PASS
    )
    assert "permute" not in tied.ops()


def test_symbolic_columns_stay_a_call():
    result = rewrite(moe_ops.gated_activation, torch.randn(4, 8), passes=PASS, dynamic=True)
    assert result.ops() == ["gated_activation"] and not result.log.refused
    assert [kept.reason for kept in result.log.kept] == [
        "the number of gate_up columns is symbolic; it stays an operator call"
    ]


def test_columns_that_would_lie_otherwise_stay_a_call():
    """The operator returns rows, elementwise ATen keeps the strides of its input."""
    result = rewrite(lambda x: moe_ops.gated_activation(x.t(), "relu2"), torch.randn(8, 4), passes=PASS)
    assert result.ops() == ["gated_activation"]
    assert "gives torch.float32 [4, 8] strides [1, 4]" in result.log.kept[0].reason


@pytest.mark.parametrize(("top_k", "stays"), [(16, False), (17, True)])
def test_a_sum_over_many_experts_stays_a_call(top_k, stays):
    slots = torch.arange(2 * top_k, dtype=torch.int32)
    result = rewrite(moe_ops.combine, torch.randn(2 * top_k, 4), torch.rand(2, top_k), slots, passes=PASS)
    assert (result.ops() == ["combine"]) is stays
    assert not stays or result.log.kept[0].reason.startswith("17 experts per token are too many")


def test_second_run_finds_nothing():
    result = rewrite(moe_ops.gated_activation, torch.randn(4, 8), passes=PASS + PASS)
    assert len(result.log.lowered) == 1 and not result.log.kept
