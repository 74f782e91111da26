"""Sums of what experts give times a number, as LoRA's `alpha / r`, and of the best of each row, which is no [T, 1]."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import RELATIVE_NORM, relative_error
from tests.passes.at_once import at_once, routed
from tests.passes.capture import computed
from tests.passes.spellings import of_best, of_expert, of_one
from tests.passes.stock import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, layer, swiglu
from tests.passes.test_before_autograd import ALLOWED, RAISED, Run, float32, grads

PIPELINE = (*RAISES, *FUSIONS)


def looped(scale, begin=torch.zeros_like, expert=swiglu):
    """`scale(out, expert)` of what each expert gives."""

    def combine(x, weights, ids, w13, w2):
        total = begin(x)
        for e in range(EXPERTS):
            out = F.linear(expert(F.linear(x, w13[e])), w2[e])
            total = total + scale(out, e) * of_expert(weights, ids, e)
        return total

    return combine


def adapters(x, weights, ids, w13, w2):
    """Of tokens that are not flattened, weights as they are multiplied, beside what they adapt."""
    rows, total = x.unsqueeze(0), x.unsqueeze(0).tanh()
    for e in range(EXPERTS):
        first = w13.mT[e][:, :INTERMEDIATE]
        total = total + (rows @ first @ w2.mT[e]) * 0.25 * of_expert(weights, ids, e)
    return total.squeeze(0)


def in_turn(x, weights, ids, w13, w2):
    total = torch.zeros_like(x)
    for k in range(TOP_K):
        hidden = swiglu(torch.einsum("th,tih->ti", x, w13[ids[:, k]]))
        out = torch.einsum("ti,thi->th", hidden, w2[ids[:, k]])
        total = total + (0.3 * out) * weights[:, k, None]
    return total


def halved_and_scattered(out, ids, weights):
    dense = torch.zeros(len(ids), EXPERTS, dtype=out.dtype).scatter(1, ids, weights)
    return (out / 2 * dense.unsqueeze(-1)).sum(1)


SCALED = {
    "times a number": of_best(looped(lambda out, e: out * 0.5)),
    "divided by one": of_best(looped(lambda out, e: out / 3)),
    "into a residual": of_best(looped(lambda out, e: 2 * out, begin=torch.clone)),
    "LoRA": of_best(adapters),
    "choices in turn": of_best(in_turn),
    "at once": routed(at_once(halved_and_scattered)),
}


def error(function, inputs, out):
    return relative_error(out, function(*(each.double() for each in inputs)))


@pytest.mark.parametrize("name", SCALED)
def test_scaled(name):
    inputs = layer(7, torch.float32, dynamic=True)
    result, out = computed(SCALED[name], *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == RAISED and not result.reasons
    assert error(SCALED[name], inputs, out) <= RELATIVE_NORM[torch.float32]


def gradients(function):
    inputs, run = float32(), Run()
    right = grads(function, [each.double() for each in inputs])
    for ours, expected in zip(grads(run.compile(function), inputs, dynamic=True), right, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    return run


@pytest.mark.parametrize("name", ["times a number", "LoRA", "choices in turn"])
def test_gradients(name):
    assert gradients(SCALED[name]).raised == RAISED


OTHERS = {
    "of each expert": of_best(looped(lambda out, e: out * (0.5 + e))),
    "of one expert": of_best(looped(lambda out, e: out * 0.5 if e == 1 else out)),
    "added": of_best(looped(lambda out, e: out + 0.5)),
    "of each column": of_best(looped(lambda out, e: out * torch.linspace(0.5, 1, HIDDEN, dtype=out.dtype))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_number_times_the_sum_stays(name):
    inputs = layer(7, torch.float32)
    result, out = computed(OTHERS[name], *inputs, passes=PIPELINE)
    assert not result.ops() and result.reasons
    assert error(OTHERS[name], inputs, out) <= RELATIVE_NORM[torch.float32]


def of_the_maximum(begin, weigh):
    """The output of the best expert, in the place of what stood there."""

    def run(x, router, w13, w2):
        weights, ids = F.linear(x, router).softmax(-1).max(-1)
        total = begin(x)
        for e in range(EXPERTS):
            out = F.linear(swiglu(F.linear(x, w13[e])), w2[e])
            total = torch.where((ids == e).unsqueeze(-1), out * weigh(weights).unsqueeze(-1), total)
        return total

    return run


def as_it_is(weights):
    return weights


def test_the_weight_of_the_best():
    inputs, function = layer(7, torch.float32, dynamic=True), of_the_maximum(torch.zeros_like, as_it_is)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert error(function, inputs, out) <= RELATIVE_NORM[torch.float32]
    assert gradients(function).raised == RAISED


@pytest.mark.parametrize(
    ("begin", "weigh"),
    [(torch.clone, as_it_is), (torch.zeros_like, torch.square), (torch.ones_like, torch.sqrt)],
)
def test_other_weights_of_the_best(begin, weigh):
    """What stood there is in no sum."""
    inputs, function = layer(7, torch.float32), of_the_maximum(begin, weigh)
    _, out = computed(function, *inputs, passes=PIPELINE)
    assert error(function, inputs, out) <= RELATIVE_NORM[torch.float32]


def test_a_maximum_that_is_read_elsewhere():
    def run(x, router, w13, w2):
        probs = F.linear(x, router).softmax(-1)
        best, ids = probs.max(-1)
        out = of_one(
            lambda x, probs, ids, w13, w2: looped(lambda out, e: out)(x, probs, ids[:, None], w13, w2)
        )
        return out(x, router, w13, w2), best, ids

    inputs = layer(7, torch.float32)
    _, (_, best, ids) = computed(run, *inputs, passes=PIPELINE)
    right = F.linear(*(each.double() for each in inputs[:2])).softmax(-1).max(-1)
    assert best.shape == ids.shape == (7,) and torch.equal(ids, right.indices)
    assert relative_error(best, right.values) <= RELATIVE_NORM[torch.float32]
