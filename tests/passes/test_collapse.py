"""CollapseMoE: whole layers, and the cases where the router or a half stays on its own."""

import expecttest
import pytest
import torch

import moe_ops
from tests.passes.capture import rewrite
from tests.passes.moe import EXPERTS, HIDDEN, ROUTING, inputs, layer, routed, up


def _staged(hidden, logits, w13, w2):
    """All stages by hand: nothing but the stages themselves ties the token counts of hidden and logits."""
    weights, _, plan = routed(logits)
    rows = moe_ops.gated_activation(up(hidden, w13, plan))
    return moe_ops.combine(moe_ops.grouped_gemm(rows, w2, plan.expert_offsets), weights, plan.inverse)


class TestGolden(expecttest.TestCase):
    def test_whole_layer_before_and_after(self):
        def gated(hidden, gate, w13, w2):
            return layer(hidden, hidden @ gate, w13, w2)

        given = inputs(dynamic=True)
        result = rewrite(gated, given.hidden_states, torch.randn(HIDDEN, EXPERTS), given.w13, given.w2)
        self.assertExpectedInline(
            result.before,
            """\
%0 = input() : float32[T0, 16]
%1 = input() : float32[16, 4]
%2 = aten.mm.default(%0, %1) : float32[T0, 4]
%3 = moe.topk_routing.default(%2, None, 'top_k=2') : 2 tensors
%4 = getitem(%3, 0) : float32[T0, 2]
%5 = getitem(%3, 1) : int32[T0, 2]
%6 = moe.build_dispatch.default(%5, None, 4) : 3 tensors
%7 = getitem(%6, 0) : int32[2*T0]
%8 = getitem(%6, 1) : int32[2*T0]
%9 = getitem(%6, 2) : int32[5]
%10 = moe.permute.default(%0, %7) : float32[2*T0, 16]
%11 = input() : float32[4, 16, 16]
%12 = moe.grouped_gemm.default(%10, %11, %9, None, None, None) : float32[2*T0, 16]
%13 = moe.gated_activation.default(%12, 'silu') : float32[2*T0, 8]
%14 = input() : float32[4, 16, 8]
%15 = moe.grouped_gemm.default(%13, %14, %9, None, None, None) : float32[2*T0, 16]
%16 = moe.combine.default(%15, %4, %8, None, None, None) : float32[T0, 16]
return [%16]""",
        )
        self.assertExpectedInline(
            result.after,
            """\
%0 = input() : float32[T0, 16]
%1 = input() : float32[16, 4]
%2 = aten.mm.default(%0, %1) : float32[T0, 4]
%3 = input() : float32[4, 16, 16]
%4 = input() : float32[4, 16, 8]
%5 = moe.fused_moe.default(%0, %2, %3, %4, None, None, None, None, None, None, 'top_k=2', 'silu') : float32[T0, 16]
return [%5]""",
        )


def test_token_counts_of_hidden_states_and_logits_are_tied_together():
    result = rewrite(_staged, *inputs(dynamic=True))
    fused = next(node for node in result.graph.nodes if "fused_moe" in str(node.target))
    sizes = [arg.meta["val"].shape[0] for arg in fused.args[:2]]
    assert not isinstance(sizes[0], int)
    assert sizes[0].node.expr == sizes[1].node.expr  # one symbol: comparing the sizes here would tie them


def test_refuses_a_static_against_a_symbolic_token_count():
    given = inputs()
    torch._dynamo.mark_dynamic(given.hidden_states, 0)
    result = rewrite(_staged, *given)
    assert result.ops() == ["routing_dispatch", "gather_gemm_act", "gemm_combine"]
    assert "fused_moe gives" in result.reasons[0]


def test_counts_of_every_step():
    assert rewrite(layer, *inputs()).log.counts() == {
        "routing_dispatch": 1,
        "gather_gemm_act": 1,
        "gemm_combine": 1,
        "fused_moe": 1,
    }


def test_from_ids_it_is_fused_experts():
    def experts(hidden, w13, w2, weights, ids):
        return moe_ops.fused_experts(hidden, w13, w2, weights, ids)

    given = inputs()
    weights, ids = moe_ops.topk_routing(given.router_logits, ROUTING)
    result = rewrite(experts, given.hidden_states, given.w13, given.w2, weights, ids)
    assert result.ops() == ["fused_experts"]


@pytest.mark.parametrize("kind", ["shared", "ids read", "weights read"])
def test_a_router_that_others_read_stays(kind):
    def model(hidden, logits, w13, w2):
        weights, ids = moe_ops.topk_routing(logits, ROUTING)
        shared = hidden * 2 if kind == "shared" else None
        out = moe_ops.fused_experts(hidden, w13, w2, weights, ids, shared=shared)
        return out, ids + 1 if kind == "ids read" else weights + 1 if kind == "weights read" else out

    result = rewrite(model, *inputs())
    assert result.ops() == ["topk_routing", "fused_experts"]
    assert result.log.counts() == {"gather_gemm_act": 1, "gemm_combine": 1, "fused_experts": 1}
    torch.testing.assert_close(_run(result), model(*inputs())[0])


def test_a_router_that_stays_takes_no_other_layers_fusion_back():
    def model(hidden, logits, w13, w2):
        weights, ids = moe_ops.topk_routing(-logits, ROUTING)
        return layer(moe_ops.fused_experts(hidden, w13, w2, weights, ids), logits, w13, w2), ids + 1

    result = rewrite(model, *inputs())
    assert sorted(result.ops()) == ["fused_experts", "fused_moe", "topk_routing"]
    assert result.log.counts()["routing_dispatch"] == 1


def _run(result):
    """Runs the rewritten graph: its inputs are in the order Dynamo chose, found by shape."""
    by_shape = {tensor.shape: tensor for tensor in inputs()}
    placeholders = [node for node in result.graph.nodes if node.op == "placeholder"]
    return result.module(*(by_shape[node.meta["val"].shape] for node in placeholders))[0]


def test_values_of_the_collapsed_graph():
    torch.testing.assert_close(_run(rewrite(layer, *inputs())), layer(*inputs()))


def test_changed_weights_keep_the_router_apart():
    def damped(hidden, logits, w13, w2):
        weights, ids = moe_ops.topk_routing(logits, ROUTING)
        return moe_ops.fused_experts(hidden, w13, w2, weights * 0.5, ids)

    result = rewrite(damped, *inputs())
    assert result.ops() == ["topk_routing", "fused_experts"]


def test_biases_map_and_correction_go_along():
    def everything(hidden, logits, w13, w2, b13, b2, correction, expert_map):
        extras = {"w2_bias": b2, "correction_bias": correction, "expert_map": expert_map}
        pair, biases = w13.chunk(2, 1), b13.chunk(2, 1)
        return moe_ops.fused_moe(hidden, logits, pair, w2, ROUTING, "gelu_tanh", w13_bias=biases, **extras)

    given = inputs()
    biases = torch.randn(given.w13.shape[:2]), torch.randn(EXPERTS, HIDDEN)
    extras = *biases, torch.randn(EXPERTS), torch.arange(EXPERTS, dtype=torch.int32)
    result = rewrite(everything, *given, *extras)
    assert result.ops() == ["fused_moe"]
    (fused,) = [node for node in result.graph.nodes if "fused_moe" in str(node.target)]
    assert all(arg is not None for arg in fused.args) and fused.args[10:] == (ROUTING.spec, "gelu_tanh")


def test_twelve_layers_collapse_apart():
    def deep(hidden, logits, w13, w2):
        for number in range(1, 13):
            hidden = hidden + layer(hidden, logits * number, w13, w2)
        return hidden

    result = rewrite(deep, *inputs())
    assert result.ops() == ["fused_moe"] * 12 and not result.reasons
    assert len({fusion.layer for fusion in result.log.fused}) == 12


def test_second_run_finds_nothing():
    from inductor_passes.pipeline import FUSIONS

    result = rewrite(layer, *inputs(), passes=FUSIONS + FUSIONS)
    assert result.log.counts()["fused_moe"] == 1 and not result.reasons


def test_refuses_halves_with_something_between():
    def adapted(hidden, logits, w13, w2):
        weights, _, plan = routed(logits)
        rows = moe_ops.gated_activation(up(hidden, w13, plan)) * 1.5
        return moe_ops.combine(moe_ops.grouped_gemm(rows, w2, plan.expert_offsets), weights, plan.inverse)

    result = rewrite(adapted, *inputs())
    assert result.ops() == ["routing_dispatch", "gather_gemm_act", "gemm_combine"]
    assert result.reasons == [
        "the input of gemm_combine comes from aten.mul.Tensor, not from gather_gemm_act"
    ]


def test_refuses_halves_of_different_plans():
    def mixed(hidden, logits, w13, w2):
        weights, _, plan = routed(logits)
        other = routed(-logits)[2]
        rows = moe_ops.gated_activation(up(hidden, w13, plan))
        return moe_ops.combine(moe_ops.grouped_gemm(rows, w2, other.expert_offsets), weights, other.inverse)

    result = rewrite(mixed, *inputs())
    assert "fused_moe" not in result.ops() and "fused_experts" not in result.ops()
    assert result.reasons == [
        "sorted_slots and expert_offsets and inverse come from different dispatch plans"
    ]


def test_refuses_a_plan_given_from_outside():
    def planned(hidden, w13, w2, weights, slots, inverse, offsets):
        plan = moe_ops.DispatchPlan(slots, inverse, offsets)
        rows = moe_ops.gather_gemm_act(hidden, w13, plan)
        return moe_ops.gemm_combine(rows, w2, weights, plan)

    given = inputs()
    weights, _, plan = routed(given.router_logits)
    result = rewrite(planned, given.hidden_states, given.w13, given.w2, weights, *plan)
    assert result.reasons[0].startswith("the dispatch plan comes from the graph input")


def test_halves_fused_by_hand_collapse_too():
    def by_hand(hidden, logits, w13, w2):
        weights, _, plan = routed(logits)
        return moe_ops.gemm_combine(moe_ops.gather_gemm_act(hidden, w13, plan), w2, weights, plan)

    assert rewrite(by_hand, *inputs()).ops() == ["fused_moe"]
