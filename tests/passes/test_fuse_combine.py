"""FuseGemmCombine: what it fuses, what it refuses and why."""

import expecttest
import torch

import moe_ops
from inductor_passes.fuse_combine import FuseGemmCombine
from tests.passes.capture import rewrite
from tests.passes.moe import HIDDEN, INTERMEDIATE, TOKENS, TOP_K, inputs, routed

PASS = (FuseGemmCombine(),)
ROWS = torch.randn(TOKENS * TOP_K, INTERMEDIATE, generator=torch.Generator().manual_seed(1))


def _down(rows, logits, w2, shared=None):
    weights, _, plan = routed(logits)
    return moe_ops.combine(moe_ops.grouped_gemm(rows, w2, plan.expert_offsets), weights, plan.inverse, shared)


class TestGolden(expecttest.TestCase):
    def test_before_and_after(self):
        result = rewrite(_down, ROWS, inputs().router_logits, inputs().w2, passes=PASS)
        self.assertExpectedInline(
            result.before,
            """\
%0 = input() : float32[9, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2') : 2 tensors
%2 = getitem(%1, 0) : float32[9, 2]
%3 = getitem(%1, 1) : int32[9, 2]
%4 = moe.build_dispatch.default(%3, None, 4) : 3 tensors
%5 = getitem(%4, 1) : int32[18]
%6 = getitem(%4, 2) : int32[5]
%7 = input() : float32[18, 8]
%8 = input() : float32[4, 16, 8]
%9 = moe.grouped_gemm.default(%7, %8, %6, None, None, None) : float32[18, 16]
%10 = moe.combine.default(%9, %2, %5, None, None, None) : float32[9, 16]
return [%10]""",
        )
        self.assertExpectedInline(
            result.after,
            """\
%0 = input() : float32[9, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2') : 2 tensors
%2 = getitem(%1, 0) : float32[9, 2]
%3 = getitem(%1, 1) : int32[9, 2]
%4 = moe.build_dispatch.default(%3, None, 4) : 3 tensors
%5 = getitem(%4, 1) : int32[18]
%6 = getitem(%4, 2) : int32[5]
%7 = input() : float32[18, 8]
%8 = input() : float32[4, 16, 8]
%9 = moe.gemm_combine.default(%7, %8, %6, %2, %5, None, None, None, None) : float32[9, 16]
return [%9]""",
        )
        assert result.log.counts() == {"gemm_combine": 1}


def test_shared_output_goes_along_and_values_stay():
    given = (ROWS, inputs().router_logits, inputs().w2, torch.randn(TOKENS, HIDDEN))
    result = rewrite(_down, *given, passes=PASS)
    assert "gemm_combine" in result.ops() and "combine" not in result.ops()


def test_second_run_finds_nothing():
    result = rewrite(_down, ROWS, inputs().router_logits, inputs().w2, passes=PASS + PASS)
    assert result.log.counts() == {"gemm_combine": 1} and not result.reasons


def _refused(function):
    result = rewrite(function, ROWS, inputs().router_logits, inputs().w2, passes=PASS)
    assert not result.log.fused and "grouped_gemm" in result.ops()
    return result.reasons


def test_refuses_another_user_of_expert_out():
    def observed(rows, logits, w2):
        weights, _, plan = routed(logits)
        expert_out = moe_ops.grouped_gemm(rows, w2, plan.expert_offsets)
        return moe_ops.combine(expert_out, weights, plan.inverse), expert_out.sum(0)

    assert _refused(observed) == ["expert_out has another user: aten.sum.dim_IntList"]


def test_refuses_a_mismatched_plan():
    def mixed(rows, logits, w2):
        weights, _, plan = routed(logits)
        expert_out = moe_ops.grouped_gemm(rows, w2, routed(-logits)[2].expert_offsets)
        return moe_ops.combine(expert_out, weights, plan.inverse)

    assert _refused(mixed) == ["expert_offsets and inverse come from different dispatch plans"]


def test_refuses_something_between_gemm_and_sum():
    def adapted(rows, logits, w2):
        weights, _, plan = routed(logits)
        return moe_ops.combine(
            moe_ops.grouped_gemm(rows, w2, plan.expert_offsets).relu(), weights, plan.inverse
        )

    assert _refused(adapted) == ["expert_out comes from aten.relu, not from grouped_gemm"]


def test_refuses_two_weights():
    halves = tuple(half.contiguous() for half in inputs().w2.chunk(2, dim=1))

    def function(rows, logits, *halves):
        weights, _, plan = routed(logits)
        return moe_ops.combine(moe_ops.grouped_gemm(rows, halves, plan.expert_offsets), weights, plan.inverse)

    result = rewrite(function, ROWS, inputs().router_logits, *halves, passes=PASS)
    assert "combine" in result.ops() and result.reasons == ["the second product has two weights"]
