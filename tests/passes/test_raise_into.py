"""RaiseExperts on sums that begin with something: what a shared expert gives, or the tokens themselves."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but
from tests.passes.capture import computed
from tests.passes.spellings import of_best, of_expert
from tests.passes.stock import EXPERTS, HIDDEN, TOP_K, layer, swiglu
from tests.passes.test_before_autograd import float32
from tests.passes.test_raise_forms_in_training import trained

PIPELINE = (*RAISES, *FUSIONS)
SIZES = ((7, torch.float32, False), (1, torch.float32, False), (EXPERTS, torch.float32, False))
OPEN = (9, torch.float32, True)


def expert(x, w13, w2, number):
    return F.linear(swiglu(F.linear(x, w13[number])), w2[number])


def shared(x, w13, w2):
    """Of matrices that no loop takes for an expert's."""
    return torch.tanh(x @ w13.sum(0).mT)


def terms(x, weights, ids, w13, w2):
    return [expert(x, w13, w2, each) * of_expert(weights, ids, each) for each in range(EXPERTS)]


def looped(begin, step=torch.add, end=lambda total, there: total):
    """A loop over experts that begins with what `begin` gives."""

    def combine(x, weights, ids, w13, w2):
        total = there = begin(x, w13, w2)
        for term in terms(x, weights, ids, w13, w2):
            total = step(total, term)
        return end(total, there)

    return of_best(combine)


def in_place(x, weights, ids, w13, w2):
    total = x.clone()
    for term in terms(x, weights, ids, w13, w2):
        total += term
    return total


def in_turn(x, weights, ids, w13, w2):
    total = shared(x, w13, w2)
    for k in range(TOP_K):
        hidden = swiglu(torch.einsum("th,tih->ti", x, w13[ids[:, k]]))
        total = total + torch.einsum("ti,thi->th", hidden, w2[ids[:, k]]) * weights[:, k, None]
    return total


def of_all(x, weights, ids, w13, w2):
    """As Llama 4 was first written: all tokens for each expert, weighed, and added up where a shared expert is."""
    dense = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
    tokens = torch.arange(len(x)).repeat(EXPERTS)[:, None].expand(-1, HIDDEN)
    rows = x.gather(0, tokens) * dense.mT.reshape(-1, 1)
    out = swiglu(rows.view(EXPERTS, -1, HIDDEN) @ w13.mT) @ w2.mT
    return shared(x, w13, w2).scatter_add(0, tokens, out.view(-1, HIDDEN))


def in_between(x, weights, ids, w13, w2):
    first, *others = terms(x, weights, ids, w13, w2)
    total = first + x
    for term in others:
        total = total + term
    return total


def of_all_weighed_behind(x, weights, ids, w13, w2):
    dense = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
    out = (swiglu(x @ w13.mT) @ w2.mT) * dense.mT.unsqueeze(-1)
    return x.index_add(0, torch.arange(len(x)).repeat(EXPERTS), out.view(-1, HIDDEN))


def weighed_inside(x, weights, ids, w13, w2):
    hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids])) * weights.unsqueeze(-1)
    out, total = torch.einsum("tki,tkhi->tkh", hidden, w2[ids]), x
    for k in range(TOP_K):
        total = total + out[:, k]
    return total


FORMS = {
    "all experts at once, weighed behind": of_best(of_all_weighed_behind),
    "weighed inside": of_best(weighed_inside),
    "a shared expert": looped(shared),
    "ones": looped(lambda x, w13, w2: torch.ones_like(x)),
    "in place, tokens": of_best(in_place),
    "tokens in between": of_best(in_between),
    "one choice after another": of_best(in_turn),
    "all experts at once": of_best(of_all),
    "and read again": looped(shared, end=lambda total, there: total + there.sin()),
}


def ran(function, inputs):
    """What is raised of it; that it computes the same is seen to."""
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert_matches_oracle(out, function(*(each.double() for each in inputs)))
    return result


@pytest.mark.parametrize(("what", "sizes"), mixed_but(OPEN, FORMS, SIZES), ids=str)
def test_every_form_is_raised(what, sizes):
    result = ran(FORMS[what], layer(*sizes))
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]


@pytest.mark.parametrize("what", ["in place, tokens", "and read again"])
def test_gradients(what):
    trained(FORMS[what])


@pytest.mark.parametrize("what", ["in place, tokens", "all experts at once, weighed behind"])
def test_layers_one_behind_the_other(what):
    """What the second one begins with has been chosen by the first."""

    def run(x, *weights):
        return FORMS[what](FORMS[what](x, *weights), *weights)

    assert [each.kind for each in ran(run, float32(7)).log.raised] == ["experts"] * 2 + ["topk_routing"] * 2


def test_batches_seen_flat_behind_a_residual():
    def run(x, router, w13, w2):
        flat = x.view(-1, HIDDEN)
        return x + FORMS["a shared expert"](flat, router, w13, w2).view(x.shape)

    inputs = float32(8)
    result = ran(run, inputs._replace(hidden_states=inputs.hidden_states.view(4, 2, HIDDEN)))
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]


def test_what_begins_in_another_shape_stays():
    """[B, S, H], of which [T, H] is seen once a term is added."""

    def run(x, router, w13, w2):
        def combine(flat, weights, ids, w13, w2):
            first, *others = terms(flat, weights, ids, w13, w2)
            total = (x + first.view(x.shape)).view(flat.shape)
            for term in others:
                total = total + term
            return total

        return of_best(combine)(x.view(-1, HIDDEN), router, w13, w2)

    inputs = float32(8)
    result = ran(run, inputs._replace(hidden_states=inputs.hidden_states.view(4, 2, HIDDEN)))
    assert not result.log.raised


def tokens_of(x, w13, w2):
    return x


def in_each_turn(x, weights, ids, w13, w2):
    total = x
    for term in terms(x, weights, ids, w13, w2):
        total = total + term + x
    return total


OTHERS = {
    "tokens in each turn": of_best(in_each_turn),
    "scaled in each turn": looped(tokens_of, lambda total, term: total * 0.5 + term),
    "weighed": looped(tokens_of, lambda total, term: total.addcmul(term, total)),
    "of other tokens": looped(lambda x, w13, w2: x, lambda total, term: total.roll(1, 0) + term),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_sum_of_both_stays(what):
    assert not ran(OTHERS[what], float32(7)).log.raised


def test_what_each_expert_adds_stays():
    def added(x, weights, ids, w13, w2):
        total = torch.zeros_like(x)
        for each in range(EXPERTS):
            total = total + (x + expert(x, w13, w2, each)) * of_expert(weights, ids, each)
        return total

    assert not ran(of_best(added), float32(7)).log.raised
