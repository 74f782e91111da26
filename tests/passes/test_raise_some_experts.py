"""Layers with a part of all experts, as a rank has them: those from START on, and ids of all."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import RAISES
from tests.helpers import assert_matches_oracle, relative_error
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import swiglu
from tests.passes.test_before_autograd import ALLOWED, Run, grads
from tests.passes.test_raise_ids_twice import best

ALL, HERE, START = 13, 6, 4
"""Experts that ids name, those that are here, and the first of these."""


def looped(weight_of):
    """`weight_of(weights, ids, expert)` [T, 1] is the weight of one of all experts."""

    def combine(x, weights, ids, w13, w2):
        total = torch.zeros_like(x)
        for expert in range(HERE):
            out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert])
            total = total + out * weight_of(weights, ids, expert).to(x.dtype)
        return total

    return combine


def of_expert(weights, ids, expert):
    return (weights * (ids == START + expert)).sum(-1, keepdim=True)


def scattered(weights, ids):
    return weights.new_zeros(len(ids), ALL).scatter(1, ids, weights)


def at_once(weights_of):
    """`weights_of(weights, ids)` [T, HERE] are the weights of the experts that are here."""

    def combine(x, weights, ids, w13, w2):
        out = torch.einsum("tei,ehi->teh", swiglu(torch.einsum("th,eih->tei", x, w13)), w2)
        return (out * weights_of(weights, ids).to(x.dtype).unsqueeze(-1)).sum(1)

    return combine


def of_arange(weights, ids):
    here = torch.arange(START, START + HERE)
    return (weights.unsqueeze(-1) * (ids.unsqueeze(-1) == here)).sum(1)


def scaled(x, weights, ids, w13, w2):
    """By a number for each of those that are here."""
    total, scales = torch.zeros_like(x), w13[:, 0, 0]
    for expert in range(HERE):
        out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]) * scales[expert]
        total = total + out * of_expert(weights, ids, expert).to(x.dtype)
    return total


SPELLINGS = {
    "times a number of each": scaled,
    "ids that count from elsewhere": looped(of_expert),
    "ids less the first": looped(
        lambda weights, ids, expert: of_expert(weights, ids - START, expert - START)
    ),
    "columns of all experts": looped(
        lambda weights, ids, expert: scattered(weights, ids)[:, START + expert, None]
    ),
    "some columns, at once": at_once(lambda weights, ids: scattered(weights, ids)[:, START : START + HERE]),
    "the numbers of those here": at_once(of_arange),
}
OTHERS = {
    "another order": looped(lambda weights, ids, expert: of_expert(weights, ids, HERE - 1 - expert)),
    "the next one around": looped(lambda weights, ids, expert: of_expert(weights, ids, (expert + 1) % HERE)),
    "those below as the first": looped(
        lambda weights, ids, expert: of_expert(weights, ids.clamp(min=START), expert)
    ),
    "those above as the last": looped(
        lambda weights, ids, expert: of_expert(weights, ids.clamp(max=START + HERE - 1), expert)
    ),
    "one twice": looped(lambda weights, ids, expert: of_expert(weights, ids, max(expert, 1))),
}


def routed(combine):
    def run(x, router, w13, w2):
        return combine(x, *best(x, router), w13[:HERE], w2[:HERE])

    return run


def inputs(dynamic=False):
    return stock.layer(9, torch.float32, dynamic, experts=ALL)


@pytest.mark.parametrize("how", SPELLINGS)
def test_a_part_of_all_experts_is_raised(how):
    given, function = inputs(), routed(SPELLINGS[how])
    result, out = computed(function, *given, passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["experts"]
    ids = best(given.hidden_states, given.router_weight)[1]
    assert bool((ids < START).any()) and bool((ids >= START + HERE).any())
    assert_matches_oracle(out, function(*(each.double() for each in given)))


@pytest.mark.parametrize("how", OTHERS)
def test_other_experts_than_those_from_one_on_stay(how):
    given, function = inputs(), routed(OTHERS[how])
    result, out = computed(function, *given, passes=RAISES)
    assert not result.log.raised and "is not the sum of what experts give" in result.reasons[0]
    assert_matches_oracle(out, function(*(each.double() for each in given)))


def test_ids_from_outside():
    """Of which nothing is known."""
    ids = torch.arange(18).view(9, 2) % ALL - 2
    x, _, w13, w2 = inputs()
    given = (x, torch.rand(9, 2, generator=torch.Generator().manual_seed(1)), ids, w13[:HERE], w2[:HERE])
    for combine, raised in ((looped(of_expert), ["experts"]), (OTHERS["those above as the last"], [])):
        result, out = computed(combine, *given, passes=RAISES)
        assert [each.kind for each in result.log.raised] == raised
        exact = combine(*(each.double() if each.is_floating_point() else each for each in given))
        assert_matches_oracle(out, exact)


def test_for_any_number_of_tokens():
    result = rewrite(routed(looped(of_expert)), *inputs(dynamic=True), passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["experts"]


@pytest.mark.parametrize("how", ["ids that count from elsewhere", "some columns, at once"])
def test_gradients(how):
    given, function, run = inputs(), routed(SPELLINGS[how]), Run()
    exact = grads(function, [each.double() for each in given])
    for ours, expected in zip(grads(run.compile(function), given), exact, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == ["experts"]
