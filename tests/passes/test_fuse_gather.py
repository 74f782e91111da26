"""FuseGatherGemmActivation: what it fuses, what it refuses and why."""

import expecttest
import torch

import moe_ops
from inductor_passes.fuse_formula import FuseFormula
from inductor_passes.fuse_gather import FuseGatherGemmActivation
from tests.passes.capture import rewrite
from tests.passes.moe import inputs, routed, up

PASS = (FuseFormula(), FuseGatherGemmActivation())


def _gated(hidden, logits, w13, w2):
    return moe_ops.gated_activation(up(hidden, w13, routed(logits)[2]), "silu")


class TestGolden(expecttest.TestCase):
    def test_before_and_after(self):
        result = rewrite(_gated, *inputs(dynamic=True), passes=PASS)
        self.assertExpectedInline(
            result.before,
            """\
%0 = input() : float32[T0, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2') : 2 tensors
%2 = getitem(%1, 1) : int32[T0, 2]
%3 = moe.build_dispatch.default(%2, None, 4) : 3 tensors
%4 = getitem(%3, 0) : int32[2*T0]
%5 = getitem(%3, 2) : int32[5]
%6 = input() : float32[T1, 16]
%7 = moe.permute.default(%6, %4) : float32[2*T0, 16]
%8 = input() : float32[4, 16, 16]
%9 = moe.grouped_gemm.default(%7, %8, %5, None, None, None) : float32[2*T0, 16]
%10 = moe.gated_activation.default(%9, 'silu') : float32[2*T0, 8]
return [%10]""",
        )
        self.assertExpectedInline(
            result.after,
            """\
%0 = input() : float32[T0, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2') : 2 tensors
%2 = getitem(%1, 1) : int32[T0, 2]
%3 = moe.build_dispatch.default(%2, None, 4) : 3 tensors
%4 = getitem(%3, 0) : int32[2*T0]
%5 = getitem(%3, 2) : int32[5]
%6 = input() : float32[T1, 16]
%7 = input() : float32[4, 16, 16]
%8 = moe.gather_gemm_act.default(%6, %7, %4, %5, None, None, None, 'silu') : float32[2*T0, 8]
return [%8]""",
        )
        assert result.log.counts() == {"gather_gemm_act": 1}


def test_value_bias_and_every_activation():
    def biased(hidden, logits, w13, bias):
        plan = routed(logits)[2]
        rows = moe_ops.permute(hidden, plan.sorted_slots)
        gate_up = moe_ops.grouped_gemm(rows, w13, plan.expert_offsets, bias)
        return moe_ops.gated_activation(gate_up, moe_ops.Activation("swiglu_oai", interleaved=True))

    given = inputs()
    bias = torch.randn(given.w13.shape[:2])
    result = rewrite(biased, *given[:3], bias, passes=PASS)
    assert "gather_gemm_act" in result.ops() and "permute" not in result.ops()


def test_second_run_finds_nothing():
    result = rewrite(_gated, *inputs(), passes=PASS + PASS)
    assert result.log.counts() == {"gather_gemm_act": 1} and not result.reasons


def _refused(function, *args):
    result = rewrite(function, *args, passes=PASS)
    assert not result.log.fused and "grouped_gemm" in result.ops()
    return result.reasons


def test_refuses_another_user_of_gate_up():
    def observed(hidden, logits, w13, w2):
        gate_up = up(hidden, w13, routed(logits)[2])
        return moe_ops.gated_activation(gate_up), gate_up.abs().amax()

    assert _refused(observed, *inputs()) == ["gate_up has another user: aten.abs"]


def test_refuses_another_user_of_the_rows():
    def observed(hidden, logits, w13, w2):
        plan = routed(logits)[2]
        rows = moe_ops.permute(hidden, plan.sorted_slots)
        gated = moe_ops.gated_activation(moe_ops.grouped_gemm(rows, w13, plan.expert_offsets))
        return gated, rows + 1

    assert _refused(observed, *inputs()) == ["the gathered rows has another user: aten.add.Tensor"]


def test_refuses_a_mismatched_plan():
    def mixed(hidden, logits, w13, w2):
        mine, other = routed(logits)[2], routed(-logits)[2]
        rows = moe_ops.permute(hidden, mine.sorted_slots)
        return moe_ops.gated_activation(moe_ops.grouped_gemm(rows, w13, other.expert_offsets))

    assert _refused(mixed, *inputs()) == [
        "sorted_slots and expert_offsets come from different dispatch plans"
    ]


def test_refuses_something_between_gather_and_gemm():
    def quantised(hidden, logits, w13, w2):
        plan = routed(logits)[2]
        rows = moe_ops.permute(hidden, plan.sorted_slots).to(torch.bfloat16)
        return moe_ops.gated_activation(
            moe_ops.grouped_gemm(rows, w13.to(torch.bfloat16), plan.expert_offsets)
        )

    (reason,) = _refused(quantised, *inputs())
    assert reason.startswith("the input of grouped_gemm comes from prims.convert_element_type")


def test_the_gate_of_a_dense_layer_is_no_candidate():
    def dense(hidden, logits, w13, w2):
        return moe_ops.gated_activation(hidden @ w13[0].t()), up(hidden, w13, routed(logits)[2]).tanh()

    assert _refused(dense, *inputs()) == ["gate_up is read by aten.tanh, not by gated_activation"]


def test_refuses_a_delta_on_gate_up():
    def adapted(hidden, logits, w13, w2):
        return moe_ops.gated_activation(up(hidden, w13, routed(logits)[2]) + 1)

    assert _refused(adapted, *inputs()) == ["gate_up is read by aten.add.Tensor, not by gated_activation"]


def test_refuses_a_custom_gate():
    def custom(hidden, logits, w13, w2):
        return up(hidden, w13, routed(logits)[2]).tanh()

    assert _refused(custom, *inputs()) == ["gate_up is read by aten.tanh, not by gated_activation"]
