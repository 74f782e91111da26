"""FuseResidual: what joins the sum over experts and what does not. Values on a CPU, where the pipeline has it not."""

import expecttest
import pytest
import torch

import moe_ops
from inductor_passes.fuse_residual import FuseResidual
from inductor_passes.pipeline import FUSIONS, PIPELINE
from tests.helpers import assert_matches_oracle
from tests.passes.capture import computed, rewrite
from tests.passes.moe import HIDDEN, ROUTING, TOKENS, inputs, layer, routed

PASS = (FuseResidual("cpu"),)
RESIDUAL = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


class TestGolden(expecttest.TestCase):
    def test_before_and_after(self):
        rows = torch.randn(TOKENS * ROUTING.top_k, HIDDEN)

        def model(rows, logits, residual):
            weights, _, plan = routed(logits)
            return residual + moe_ops.combine(rows, weights, plan.inverse) * 2.5

        result = rewrite(model, rows, inputs().router_logits, RESIDUAL, passes=PASS)
        self.assertExpectedInline(
            result.before,
            """\
%0 = input() : float32[9, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2') : 2 tensors
%2 = getitem(%1, 0) : float32[9, 2]
%3 = getitem(%1, 1) : int32[9, 2]
%4 = moe.build_dispatch.default(%3, None, 4) : 3 tensors
%5 = getitem(%4, 1) : int32[18]
%6 = input() : float32[18, 16]
%7 = moe.combine.default(%6, %2, %5, None, None, None) : float32[9, 16]
%8 = aten.mul.Tensor(%7, 2.5) : float32[9, 16]
%9 = input() : float32[9, 16]
%10 = aten.add.Tensor(%9, %8) : float32[9, 16]
return [%10]""",
        )
        self.assertExpectedInline(
            result.after,
            """\
%0 = input() : float32[9, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2;scale=2.5') : 2 tensors
%2 = getitem(%1, 1) : int32[9, 2]
%3 = getitem(%1, 0) : float32[9, 2]
%4 = moe.build_dispatch.default(%2, None, 4) : 3 tensors
%5 = getitem(%4, 1) : int32[18]
%6 = input() : float32[18, 16]
%7 = input() : float32[9, 16]
%8 = moe.combine.default(%6, %3, %5, %7, None, None) : float32[9, 16]
return [%8]""",
        )
        assert result.log.counts() == {"combine with residual": 1}


def behind(add, scale=1.0):
    """A layer and what is added to it."""

    def model(residual, *given):
        return add(layer(*given) * scale if scale != 1 else layer(*given), residual)

    return model


ADDED = {
    "behind": behind(lambda out, residual: out + residual),
    "in front": behind(lambda out, residual: residual + out),
    "scaled": behind(lambda out, residual: out + residual, scale=2.5),
    "three dimensions": behind(lambda out, x: out.view(3, -1, HIDDEN) + x.view(3, -1, HIDDEN)),
    "a product": behind(lambda out, residual: out + residual @ residual.T @ residual),
    "read elsewhere": behind(lambda out, residual: (out + (wave := residual.sin())) * wave.sum(0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ADDED)
def test_sums_that_take_it(name, dtype):
    given = [tensor.to(dtype) for tensor in (RESIDUAL, *inputs())]
    result, out = computed(ADDED[name], *given, passes=(*PASS, *FUSIONS))
    assert result.log.counts()["combine with residual"] == 1 and not result.reasons
    assert result.ops() == ["topk_routing", "fused_experts"]
    assert_matches_oracle(out, ADDED[name](*(tensor.double() for tensor in given)))


def test_a_scale_goes_into_the_router_that_serves_this_layer_only():
    result = rewrite(ADDED["scaled"], RESIDUAL, *inputs(), passes=PASS)
    assert "scale=2.5" in result.after and "aten.mul" not in result.after

    def observed(residual, hidden, logits, w13, w2):
        weights, ids = moe_ops.topk_routing(logits, ROUTING)
        return moe_ops.fused_experts(hidden, w13, w2, weights, ids) * 2.5 + residual, weights.sum(0)

    result = rewrite(observed, RESIDUAL, *inputs(), passes=PASS)
    assert "scale" not in result.after and result.log.counts() == {"combine with residual": 1}


def test_a_second_run_finds_nothing():
    result = rewrite(ADDED["behind"], RESIDUAL, *inputs(), passes=PASS + PASS)
    assert result.log.counts() == {"combine with residual": 1} and not result.reasons


def test_on_a_cpu_it_melts_into_the_sum_anyway():
    result = rewrite(ADDED["behind"], RESIDUAL, *inputs(), passes=PIPELINE)
    assert result.log.counts() == rewrite(layer, *inputs(), passes=PIPELINE).log.counts()


@pytest.mark.parametrize(
    "add, reason",
    [
        (lambda out, x: torch.add(out, x, alpha=2), "multiplies what it adds, or adds a number"),
        (lambda out, x: out + 1.0, "multiplies what it adds, or adds a number"),
        (lambda out, x: out + x[0], "float32 [16] strides [1]"),
        (lambda out, x: out + x.double(), "gives torch.float32"),
        (lambda out, x: out.sum(0, keepdim=True).expand(TOKENS, HIDDEN).clone() + out, "has another user"),
        (lambda out, x: (out + x, out.amax()), "the sum over experts has another user: aten.amax"),
        (lambda out, x: out + x.sigmoid() * x, "aten.mul.Tensor is computed in one kernel with the addition"),
        (lambda out, x: out + x.T.contiguous().T, "strides"),
        (lambda out, x: out + out.flip(0), "has another user"),
    ],
)
def test_sums_that_do_not(add, reason):
    result = rewrite(behind(add), RESIDUAL, *inputs(), passes=PASS)
    assert not result.log.fused and len(result.reasons) == 1 and reason in result.reasons[0]


def test_a_sum_adds_two_things():
    def model(residual, hidden, logits, w13, w2):
        weights, ids = moe_ops.topk_routing(logits, ROUTING)
        return moe_ops.fused_experts(hidden, w13, w2, weights, ids, shared=hidden) + hidden + residual

    result = rewrite(model, RESIDUAL, *inputs(), passes=PASS)
    assert (
        len(result.log.fused) == 1
        and "the sum over experts already adds the graph input" in result.reasons[0]
    )


def test_a_symbolic_number_of_tokens_stays():
    given = [RESIDUAL.clone(), *inputs()]
    for tensor in given[:3]:
        torch._dynamo.mark_dynamic(tensor, 0)
    result = rewrite(ADDED["behind"], *given, passes=PASS)
    assert result.reasons == ["with a symbolic number of tokens the router would be a call of its own"]
