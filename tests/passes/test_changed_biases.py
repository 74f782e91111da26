"""Routers whose bias follows the load of experts: the forward that reads it changes it in place, and trains."""

import pytest
import torch
from torch.nn import functional as F

from tests.helpers import relative_error
from tests.passes import stock
from tests.passes.stock import EXPERTS, TOP_K
from tests.passes.test_before_autograd import ALLOWED, RAISED, Run, float32, grads


def following(bias, is_late):
    """A layer that changes `bias` between its weights and its experts, or before it chooses."""

    def follow(ids):
        counts = F.one_hot(ids, EXPERTS).sum((0, 1)).float()
        with torch.no_grad():
            bias.add_((counts.mean() - counts).sign(), alpha=0.3)

    def function(x, router, w13, w2):
        scores = F.linear(x, router).sigmoid()
        biased = scores + bias
        if not is_late:
            follow(scores.topk(TOP_K).indices)
        ids = biased.topk(TOP_K).indices
        weights = scores.gather(1, ids)
        if is_late:
            follow(ids)
        return stock.batched_experts(x, weights, ids, w13, w2)

    return function


@pytest.mark.parametrize("is_late", [True, False])
def test_a_bias_that_changes_on_the_way(is_late):
    """Each step sees what the step before has left."""
    run, ours, exact = Run(), torch.zeros(EXPERTS), torch.zeros(EXPERTS)
    compiled = run.compile(following(ours, is_late))
    for tokens in (9, 9):
        args = float32(tokens)
        wanted = grads(following(exact, is_late), [each.double() for each in args])
        for one, other in zip(grads(compiled, args), wanted, strict=True):
            assert relative_error(one, other) <= ALLOWED
        assert torch.equal(ours, exact) and ours.any()
    assert run.raised == (RAISED if is_late else [])
    assert is_late or "is changed in place" in run.refused[0]


def test_a_bias_that_weighs_too_is_left():
    """A backward would read what it has become."""
    bias = torch.linspace(0.0, 0.3, EXPERTS)

    def function(x, router, w13, w2):
        scores = F.linear(x, router).sigmoid()
        ids = (scores + bias).topk(TOP_K).indices
        weights = scores.gather(1, ids) * bias[ids]
        out = stock.batched_experts(x, weights, ids, w13, w2)
        with torch.no_grad():
            bias.mul_(2)
        return out

    run, args = Run(), float32(9)
    wanted = grads(function, [each.double() for each in args])
    bias.div_(2)
    for one, other in zip(grads(run.compile(function), args), wanted, strict=True):
        assert relative_error(one, other) <= ALLOWED
    assert not run.raised and "is changed in place" in run.refused[0]


def test_logits_that_change_later_are_left():
    """What a router reads besides its bias has gradients."""

    def function(x, logits, w13, w2):
        scores, ids = logits.topk(TOP_K)
        out = stock.batched_experts(x, scores.softmax(-1), ids, w13, w2)
        with torch.no_grad():
            logits.mul_(0.5)
        return out

    run, (x, _, w13, w2) = Run(), float32(9)
    logits = torch.randn(9, EXPERTS)
    wanted = grads(function, [each.double() for each in (x, logits, w13, w2)])
    for one, other in zip(grads(run.compile(function), (x, logits, w13, w2)), wanted, strict=True):
        assert relative_error(one, other) <= ALLOWED
    assert "topk_routing" not in run.raised


def test_weights_that_change_later_are_left():
    """Where the first product has a gradient, that of the second one reads its weight."""

    def function(x, router, w13, w2):
        out = stock.batched(x, router, w13, w2)
        with torch.no_grad():
            w2.mul_(0.5)
        return out

    run, args = Run(), float32(9)
    wanted = grads(function, [each.double() for each in args])
    for one, other in zip(grads(run.compile(function), args), wanted, strict=True):
        assert relative_error(one, other) <= ALLOWED
    assert not run.raised
