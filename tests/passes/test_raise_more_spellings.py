"""RaiseExperts on more spellings: equal parts of a weight for experts, einsums of one choice, adapters at once."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but, relative_error
from tests.passes.capture import computed, rewrite
from tests.passes.spellings import of_expert
from tests.passes.stock import EXPERTS, HIDDEN, INTERMEDIATE, layer, softmax_router, swiglu
from tests.passes.test_before_autograd import ALLOWED, RAISED, Run, check, float32, grads
from tests.passes.test_raise_forms_in_training import trained

PIPELINE = (*RAISES, *FUSIONS)
SIZES = ((7, torch.float32, False), (1, torch.bfloat16, False), (9, torch.bfloat16, False))
OPEN = (9, torch.bfloat16, True)


def looped(matrices):
    """A loop over pairs of matrices, `matrices(w13, w2)`."""

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        total = torch.zeros_like(x)
        for expert, (first, second) in enumerate(matrices(w13, w2)):
            out = F.linear(swiglu(F.linear(x, first)), second)
            total = total + out * of_expert(weights, ids, expert).to(x.dtype)
        return total

    return run


def flat(cut):
    """Parts of matrices [E * 2I, H] and [E * I, H]."""
    return looped(lambda w13, w2: [(a, b.T) for a, b in cut(w13.flatten(0, 1), w2.mT.flatten(0, 1))])


def sliced(w13, w2, order=range(EXPERTS)):
    for expert, other in zip(range(EXPERTS), order, strict=False):
        yield w13[expert * 64 : (expert + 1) * 64], w2[other * 32 : (other + 1) * 32]


def biased(x, router, w13, w2):
    """Products of a batch of one, with biases of as many numbers as there are not tokens."""
    weights, ids = softmax_router(F.linear(x, router))
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        hidden = swiglu(torch.einsum("th,ih->ti", x, w13[expert]) + w13[expert, :, 0])
        out = torch.einsum("ti,hi->th", hidden, w2[expert]) + w2[expert, :, 0]
        total = total + out * of_expert(weights, ids, expert).to(x.dtype)
    return total


def one_choice(x, router, w13, w2):
    """gpt-fast's, with one choice of K."""
    weights, ids = F.linear(x, router).float().softmax(-1).topk(1, dim=-1)
    hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids]))
    return torch.einsum("tki,tkhi,tk->th", hidden, w2[ids], weights.to(x.dtype))


def one_choice_in_two_sums(x, router, w13, w2):
    weights, ids = F.linear(x, router).float().softmax(-1).topk(1, dim=-1)
    hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids]))
    out = torch.einsum("tki,tkhi->tkh", hidden, w2[ids])
    return torch.einsum("tkh,tk->th", out, weights.to(x.dtype))


def adapters(turn=lambda rows: rows):
    """LoRA of all experts at once, beside a product of all tokens."""

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        dense = torch.zeros(len(x), EXPERTS).scatter(1, ids, weights).to(x.dtype)
        rows = torch.einsum("th,eih->tei", x, w13[:, :INTERMEDIATE])
        out = torch.einsum("tei,ehi->teh", turn(rows), w2)
        return F.linear(x, w13[0, :HIDDEN]) + 2 * (out * dense.unsqueeze(-1)).sum(1)

    return run


SPELLINGS = {
    "slices": flat(sliced),
    "split": flat(lambda w13, w2: zip(w13.split(64), w2.split(32), strict=True)),
    "chunks of one": looped(
        lambda w13, w2: [(a.squeeze(0), b[0]) for a, b in zip(w13.chunk(EXPERTS), w2.split(1), strict=True)]
    ),
    "slices of one": looped(
        lambda w13, w2: [
            (w13[e : e + 1].reshape(-1, HIDDEN), w2[e : e + 1].squeeze(0)) for e in range(EXPERTS)
        ]
    ),
    "products of a batch of one with biases": biased,
    "one choice of K": one_choice,
    "one choice of K, summed behind": one_choice_in_two_sums,
    "adapters at once": adapters(),
}


@pytest.mark.parametrize(("what", "sizes"), mixed_but(OPEN, SPELLINGS, SIZES), ids=str)
def test_every_spelling_is_raised(what, sizes):
    inputs = layer(*sizes)
    result, out = computed(SPELLINGS[what], *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"] and not result.reasons
    assert_matches_oracle(out, SPELLINGS[what](*(each.double() for each in inputs)))


@pytest.mark.parametrize("what", ["slices", "chunks of one", "one choice of K", "adapters at once"])
def test_gradients(what):
    trained(SPELLINGS[what])


OTHERS = {
    "parts of others": flat(lambda w13, w2: sliced(w13, w2, (1, 0, 2, 3, 4, 5))),
    "a part of the experts": flat(lambda w13, w2: sliced(w13, w2, range(EXPERTS - 1))),
    "a part that begins later": flat(
        lambda w13, w2: [
            (w13[e * 64 + (e == 1) : (e + 1) * 64 + (e == 1)], w2[e * 32 : (e + 1) * 32])
            for e in range(EXPERTS)
        ]
    ),
    "parts that overlap": flat(
        lambda w13, w2: [(w13[e * 32 : e * 32 + 64], w2[e * 32 : e * 32 + 32]) for e in range(EXPERTS)]
    ),
    "adapters of others": adapters(lambda rows: rows.transpose(0, 1)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_looks_alike_stays(what):
    inputs = layer(EXPERTS, torch.float32)
    result, out = computed(OTHERS[what], *inputs, passes=PIPELINE)
    assert not result.log.raised
    assert_matches_oracle(out, OTHERS[what](*(each.double() for each in inputs)))


def test_parts_in_no_layer_are_what_they_were():
    def run(x, router, w13, w2):
        first, second = w13.flatten(0, 1).split(HIDDEN)[:2]
        return F.linear(F.linear(x, first), second[:32]) + w2[1:2, 0, :] + first[0, :32] + second[1, 1]

    result = rewrite(run, *layer(6), passes=PIPELINE)
    assert "aten.slice.Tensor" in result.before or "aten.split.Tensor" in result.before
    assert result.after == result.before


def in_autocast(function):
    def run(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(*inputs)

    return run


def gate_and_up(others=lambda x: x):
    """At once, gate and up of weights that lie as they are multiplied."""

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        dense = torch.zeros(len(x), EXPERTS).scatter(1, ids, weights)
        gate = torch.einsum("th,eih->tei", x, w13[:, :INTERMEDIATE])
        up = torch.einsum("th,ehi->tei", others(x), w13.mT[:, :, INTERMEDIATE:])
        out = torch.einsum("tei,ehi->teh", F.silu(gate) * up, w2)
        return torch.einsum("teh,te->th", out, dense.to(out.dtype))

    return run


@pytest.mark.parametrize("function", [gate_and_up(), adapters()], ids=["gate and up", "adapters"])
def test_einsums_under_autocast(function):
    """They cast what they have made matrices of."""
    inputs = layer(7, torch.float32)
    result, out = computed(in_autocast(function), *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    rounded = [each.bfloat16().double() for each in inputs]
    assert_matches_oracle(out.bfloat16(), function(*rounded))


@pytest.mark.parametrize("others", [lambda x: x.flip(0), lambda x: x.float() * 2, torch.detach])
def test_tokens_that_differ_under_autocast_are_no_one_input(others):
    function, run = in_autocast(gate_and_up(others)), Run()
    inputs = layer(EXPERTS, torch.float32)
    stock = grads(function, inputs)
    for ours, expected in zip(grads(run.compile(function), inputs), stock, strict=True):
        assert relative_error(ours, expected.double()) <= ALLOWED
    assert not run.raised and any("different inputs" in each for each in run.refused)


def of_a_row(x, row):
    return torch.einsum("th,h->t", x.tanh(), row)


def test_a_product_with_a_row_is_none_of_an_expert():
    """A batch of one, as an einsum writes it: of a row, which no matrix is."""
    inputs = torch.randn(7, HIDDEN), torch.randn(HIDDEN)
    result, out = computed(of_a_row, *inputs, passes=PIPELINE)
    assert result.after == result.before and not result.reasons
    assert_matches_oracle(out, of_a_row(*(each.double() for each in inputs)))
    assert not check(of_a_row, inputs).raised


def at_once(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    dense = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, ids, weights).to(x.dtype)
    out = torch.einsum("bsei,ehi->bseh", swiglu(torch.einsum("bsh,eih->bsei", x, w13)), w2)
    return torch.einsum("bseh,bse->bsh", out, dense)


def by_mask(x, router, w13, w2):
    """With zeros of as many rows as an expert gives."""
    weights, ids = softmax_router(F.linear(x, router))
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert])
        weighed = out * of_expert(weights, ids, expert)
        total = total + torch.where((ids == expert).any(-1, keepdim=True), weighed, torch.zeros_like(out))
    return total


@pytest.mark.parametrize("function", [at_once, by_mask])
def test_sizes_of_what_experts_give_are_no_readers_of_it(function):
    """Sequences of any length."""
    run, (x, *weights) = Run(), float32(12)
    inputs = [x.view(2, 6, HIDDEN), *weights]

    def of_any_length(x, *weights):
        torch._dynamo.mark_dynamic(x, 1)
        return compiled(x, *weights)

    compiled = run.compile(function)
    exact = grads(function, [each.double() for each in inputs])
    for ours, expected in zip(grads(of_any_length, inputs), exact, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == RAISED and not run.refused
