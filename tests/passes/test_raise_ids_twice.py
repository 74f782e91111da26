"""Ids that a token has twice: our operators add up both slots, so a layer must do so too, or its ids never repeat."""

import operator
import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from inductor_passes.pipeline import RAISES
from inductor_passes.raising.finders import may_repeat
from tests.passes.capture import rewrite
from tests.passes.stock import EXPERTS, TOP_K, swiglu
from tests.passes.strangers import dense, looped
from tests.passes.test_before_autograd import check, float32


def best_of_heads(x, router):
    """Each of the TOP_K ids of a token is the best of another head, and any may be that of others."""
    heads = F.linear(x, router).unsqueeze(1) * torch.linspace(-1, 1, TOP_K, dtype=x.dtype).view(-1, 1)
    return normed(*heads.softmax(-1).max(-1))


def best(x, router):
    return normed(*F.linear(x, router).softmax(-1).topk(TOP_K))


def best_sorted(x, router):
    scores, ids = F.linear(x, router).softmax(-1).sort(-1, descending=True)
    return normed(scores, ids)


def normed(weights, ids):
    return weights / weights.sum(-1, keepdim=True), ids


def _zeros(weights):
    return weights.new_zeros(len(weights), EXPERTS)


def scattered(weights, ids):
    return _zeros(weights).scatter(1, ids, weights)


def scattered_and_added(weights, ids):
    return _zeros(weights).scatter_add(1, ids, weights)


def of_all(combine, choose, scatter):
    def run(x, router, w13, w2):
        return combine(x, scatter(*choose(x, router)), w13, w2)

    return run


def compared(x, router, w13, w2):
    """As `stock.looped`, whose weights are those of every slot of an expert."""
    (weights, ids), total = best_of_heads(x, router), torch.zeros_like(x)
    for expert in range(EXPERTS):
        weight = (weights * (ids == expert)).sum(-1, keepdim=True)
        total = total + F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]) * weight
    return total


@pytest.mark.parametrize("combine", [dense, looped])
def test_one_weight_of_an_id_that_a_token_has_twice_stays(combine):
    run = check(of_all(combine, best_of_heads, scattered), float32())
    assert not run.raised
    assert re.search("not what the tokens of its experts weigh them by|not the sum", run.refused[0])


ALL_OF_THEM = {
    "at once": of_all(dense, best_of_heads, scattered_and_added),
    "in turn": of_all(looped, best_of_heads, scattered_and_added),
    "compared": compared,
}


@pytest.mark.parametrize("how", ALL_OF_THEM)
def test_all_weights_of_an_id_that_a_token_has_twice_are_raised(how):
    assert "experts" in check(ALL_OF_THEM[how], float32()).raised


@pytest.mark.parametrize("choose", [best, best_sorted])
def test_ids_of_which_a_token_has_none_twice_are_raised(choose):
    assert "experts" in check(of_all(dense, choose, scattered), float32()).raised


@pytest.mark.parametrize(
    ("choose", "is_raised"),
    [
        (lambda scores: torch.multinomial(scores, TOP_K, replacement=True), False),
        (lambda scores: scores.topk(TOP_K)[1], True),
    ],
    ids=["drawn", "the best"],
)
def test_ids_that_are_drawn_may_repeat(choose, is_raised):
    def run(x, router, w13, w2):
        scores = F.linear(x, router).softmax(-1)
        return dense(x, scattered(*normed(x[:, :TOP_K].sigmoid(), choose(scores))), w13, w2)

    assert bool(rewrite(run, *float32(), passes=RAISES).log.raised) == is_raised


@pytest.mark.parametrize(("dim", "repeats"), [(-1, False), (1, False), (0, True)])
def test_ids_are_found_once_along_one_dimension(dim, repeats):
    def found(scores):
        return scores.topk(TOP_K, dim=dim).indices

    graph = make_fx(found)(torch.rand(TOP_K, TOP_K)).graph
    (ids,) = (node for node in graph.nodes if node.target is operator.getitem and node.args[1] == 1)
    assert may_repeat(ids) == repeats
