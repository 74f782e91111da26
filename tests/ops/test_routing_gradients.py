"""Gradients of the router: every formula, with a correction bias, ties, groups, and logits that are not finite."""

from itertools import product

import pytest
import torch

import moe_ops
from moe_ops import RoutingConfig
from moe_ops.reference import reference_routing
from tests.cases import ROUTINGS
from tests.helpers import assert_same, weights_of

FORMULAS = [
    RoutingConfig(2, score_fn, order, renormalize)
    for score_fn, order, renormalize in product(
        ("softmax", "sigmoid", "sqrtsoftplus"), ("score_then_topk", "topk_then_score"), (True, False)
    )
]
by_spec = {"ids": lambda routing: routing.spec}


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def expected_gradient(grad, logits, bias, routing):
    """By autograd on every row alone, since one that is not finite is constant and would only give NaN."""
    weights, ids = reference_routing(logits, routing, bias)
    rows = []
    for row in range(logits.shape[0]):
        leaf = logits[row : row + 1].clone().requires_grad_()
        valid = weights[row : row + 1] != 0
        value = weights_of(leaf, ids[row : row + 1].long(), valid, routing)
        (gradient,) = torch.autograd.grad(value, leaf, grad[row : row + 1])
        rows.append(gradient.nan_to_num(nan=0.0) if not logits[row].isfinite().all() else gradient)
    return torch.cat(rows)


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.spec)
def test_routing_gradcheck(routing):
    assert torch.autograd.gradcheck(lambda x: moe_ops.topk_routing(x, routing)[0], (double(5, 16),))


def test_routing_gradient_of_a_row_that_is_not_finite_is_finite():
    logits = double(3, 8)
    with torch.no_grad():
        logits[1] = float("nan")
    weights, _ = moe_ops.topk_routing(logits, RoutingConfig(top_k=2))
    (gradient,) = torch.autograd.grad(weights.square().sum(), logits)
    assert gradient.isfinite().all()
    assert (gradient[1] == 0).all()


@pytest.mark.parametrize("routing", ROUTINGS[:9], ids=lambda routing: routing.spec)
def test_second_derivatives_of_routing(routing):
    check = torch.autograd.gradgradcheck
    assert check(lambda x: moe_ops.topk_routing(x, routing)[0].sin(), (double(3, 6),))


@pytest.mark.parametrize("routing", FORMULAS, **by_spec)
def test_a_slot_without_a_usable_selection_is_constant(routing):
    """A bias of -inf leaves one expert: the second slot weighs 0 and moves nothing, though its score is finite."""
    logits = double(3, 4)
    bias = torch.tensor([float("-inf")] * 3 + [0.0])
    weights, ids = moe_ops.topk_routing(logits, routing, bias)
    assert ids[:, 0].eq(3).all()
    assert weights[:, 1].eq(0).all()
    (of_second,) = torch.autograd.grad(weights[:, 1].sum(), logits, retain_graph=True)
    assert of_second.eq(0).all()
    (of_first,) = torch.autograd.grad(weights[:, 0].sum(), logits)
    finite = torch.zeros_like(logits)
    step = 1e-6
    for index in range(4):
        shifted = [logits.detach().clone() for _ in range(2)]
        shifted[0][:, index] += step
        shifted[1][:, index] -= step
        up, down = (moe_ops.topk_routing(each, routing, bias)[0][:, 0] for each in shifted)
        finite[:, index] = (up - down) / (2 * step)
    torch.testing.assert_close(of_first, finite, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("routing", [*FORMULAS, *ROUTINGS], **by_spec)
@pytest.mark.parametrize("bias", ["none", "finite", "not finite"])
def test_ties_groups_and_entries_that_are_not_finite(routing, bias):
    logits = torch.randn(8, 16, dtype=torch.float64)
    logits[1] = 0.0
    logits[2, ::3] = float("nan")
    logits[3] = float("nan")
    logits[4, 5] = float("inf")
    logits[5, 3:] = float("-inf")
    logits[6] = -1000.0
    logits[7, :4], logits[7, 4:] = float("nan"), 1.0
    correction = None if bias == "none" else torch.randn(16, dtype=torch.float64)
    if bias == "not finite":
        correction[:9], correction[12] = float("-inf"), float("nan")
    leaf = logits.clone().requires_grad_()
    for router in (
        lambda: moe_ops.topk_routing(leaf, routing, correction)[0],
        lambda: moe_ops.routing_dispatch(leaf, routing, correction_bias=correction)[0],
    ):
        weights = router()
        grad = torch.randn_like(weights)
        (gradient,) = torch.autograd.grad(weights, leaf, grad)
        assert_same([gradient], [expected_gradient(grad, logits, correction, routing)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("routing", [each for each in FORMULAS if each.score_fn == "sqrtsoftplus"], **by_spec)
def test_far_below_zero_sqrtsoftplus_and_its_slope_are_their_limits(routing, dtype):
    """sqrt(log(1 + e^x)) tends to e^(x/2), which is positive long after e^x is not; its slope to half of that."""
    logits = torch.tensor([-36.0, -36.5, -60.0, -110.0, -150.0, -float("inf")], dtype=dtype)
    score = (logits.double() / 2).exp()
    for ids in ([0, 1], [1, 2], [2, 3], [3, 4], [4, 5]):
        leaf = logits[ids].unsqueeze(0).requires_grad_()
        weights, chosen = moe_ops.topk_routing(leaf, routing)
        total = score[ids].sum() if routing.renormalize else 1.0
        expected = score[ids] / total
        assert chosen.tolist() == [[0, 1]]
        torch.testing.assert_close(weights[0].double(), expected, rtol=1e-5, atol=0.0)
        slope = expected / 2 * (1 - expected if routing.renormalize else 1.0)
        (gradient,) = torch.autograd.grad(weights[0, 0], leaf)
        along = torch.tensor([[1.0, 0.0]], dtype=dtype)
        _, tangent = torch.func.jvp(lambda x: moe_ops.topk_routing(x, routing)[0], (leaf.detach(),), (along,))
        for derivative in (gradient[0, 0], tangent[0, 0]):
            torch.testing.assert_close(
                derivative.double(), slope[0], rtol=1e-4, atol=1e-7 * expected[0].item()
            )


def test_the_layer_passes_the_same_gradient_to_its_logits():
    logits, x = double(6, 4), torch.randn(6, 8, dtype=torch.float64)
    w13, w2 = torch.randn(4, 12, 8, dtype=torch.float64), torch.randn(4, 8, 6, dtype=torch.float64)
    bias = torch.tensor([float("-inf"), 0.0, float("-inf"), float("-inf")], dtype=torch.float64)
    routing = RoutingConfig(2)
    for emit in ("fused", "stages"):
        out = moe_ops.fused_moe(x, logits, w13, w2, routing, correction_bias=bias, emit=emit)
        (gradient,) = torch.autograd.grad(out.sin().sum(), logits)
        assert gradient.abs().max() <= 1e-12  # one expert is left: its renormalised weight is 1
