"""What experts give times a number for each expert, which weights are multiplied with in its place."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import RAISES
from tests.helpers import assert_matches_oracle, relative_error
from tests.passes import stock
from tests.passes.capture import computed
from tests.passes.stock import EXPERTS, HIDDEN, TOP_K, softmax_router, swiglu
from tests.passes.test_before_autograd import ALLOWED, Run, grads


def gathered(scales_of):
    """`scales_of(scales, ids)` is what outputs [T, K, H] are multiplied with."""

    def combine(x, weights, ids, w13, w2, scales):
        hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids]))
        out = torch.einsum("tki,tkhi->tkh", hidden, w2[ids]) * scales_of(scales, ids)
        return (out * weights.unsqueeze(-1)).sum(1)

    return combine


def looped(scale_of):
    """`scale_of(scales, expert)` is what outputs [T, H] of one expert are multiplied with."""

    def combine(x, weights, ids, w13, w2, scales):
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):
            out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]) * scale_of(scales, expert)
            total = total + out * (weights * (ids == expert)).sum(-1, keepdim=True)
        return total

    return combine


def at_once(x, weights, ids, w13, w2, scales):
    spread = weights.new_zeros(len(x), EXPERTS).scatter(1, ids, weights)
    out = torch.einsum("tei,ehi->teh", swiglu(torch.einsum("th,eih->tei", x, w13)), w2)
    return (out * scales.view(1, -1, 1) * spread.unsqueeze(-1)).sum(1)


def in_rows(x, weights, ids, w13, w2, scales):
    """Sorted by expert."""
    experts, order = ids.flatten().sort(stable=True)
    hidden = swiglu(torch.bmm(w13[experts], x[order // TOP_K].unsqueeze(-1)).squeeze(-1))
    out = torch.bmm(w2[experts], hidden.unsqueeze(-1)).squeeze(-1) * scales[experts].unsqueeze(-1)
    out = out * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // TOP_K, out)


SPELLINGS = {
    "gathered": gathered(lambda scales, ids: scales[ids].unsqueeze(-1)),
    "of a column": gathered(lambda scales, ids: scales.unsqueeze(1)[ids]),
    "of a formula": gathered(lambda scales, ids: F.softplus(scales)[ids].unsqueeze(-1)),
    "in a loop": looped(lambda scales, expert: scales[expert]),
    "at once": at_once,
    "in rows": in_rows,
}
OTHERS = {
    "another expert's": gathered(lambda scales, ids: scales[(ids + 1) % EXPERTS].unsqueeze(-1)),
    "another expert's in a loop": looped(lambda scales, expert: scales[expert - 1]),
    "one expert's of two": looped(lambda scales, expert: scales[expert // 2]),
    "of tokens": gathered(lambda scales, ids: scales.view(-1, 1, 1)),
    "of columns": gathered(lambda scales, ids: scales.repeat(HIDDEN)[:HIDDEN]),
    "squared": gathered(lambda scales, ids: scales[ids].unsqueeze(-1).square()),
}


def routed(combine):
    def run(x, router, w13, w2, scales):
        return combine(x, *softmax_router(F.linear(x, router)), w13, w2, scales)

    return run


def inputs():
    """As many tokens as experts."""
    given = stock.layer(EXPERTS, torch.float32)
    return [*given, torch.linspace(0.5, 2.0, EXPERTS)]


@pytest.mark.parametrize("how", SPELLINGS)
def test_scales_of_experts_are_part_of_their_weights(how):
    given, function = inputs(), routed(SPELLINGS[how])
    result, out = computed(function, *given, passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert_matches_oracle(out, function(*(each.double() for each in given)))


@pytest.mark.parametrize("how", OTHERS)
def test_scales_of_anything_else_stay(how):
    given, function = inputs(), routed(OTHERS[how])
    result, out = computed(function, *given, passes=RAISES)
    assert not result.log.raised and result.reasons
    assert_matches_oracle(out, function(*(each.double() for each in given)))


@pytest.mark.parametrize("how", ["gathered", "in a loop"])
def test_gradients(how):
    given, function, run = inputs(), routed(SPELLINGS[how]), Run()
    exact = grads(function, [each.double() for each in given])
    for ours, expected in zip(grads(run.compile(function), given), exact, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == ["experts", "topk_routing"]
