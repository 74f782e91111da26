"""RaiseExperts on weights [E, A, B] that are gathered, and einsums of these: what a token chose lies side by side in
one matrix, or one below the other, which sums over choices as well.
"""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but, relative_error
from tests.passes.capture import computed
from tests.passes.spellings import of_best
from tests.passes.stock import HIDDEN, TOP_K, layer, swiglu
from tests.passes.test_before_autograd import ALLOWED, RAISED, Run, float32, grads
from tests.passes.test_raise_forms_in_training import trained

PIPELINE = (*RAISES, *FUSIONS)
SIZES = ((7, torch.float32, False), (1, torch.bfloat16, False), (TOP_K, torch.float32, False))
OPEN = (9, torch.bfloat16, True)


def first(x, w13, ids, spec="th,tkhi->tki"):
    return swiglu(torch.einsum(spec, x, w13.mT.contiguous()[ids]))


def below(w2, ids):
    """[T, K * I, H]: matrices one below the other."""
    return w2.mT.contiguous()[ids].reshape(len(ids), -1, HIDDEN)


def beside(x, weights, ids, w13, w2):
    out = torch.einsum("tki,tkih->tkh", first(x, w13, ids), w2.mT.contiguous()[ids])
    return (out * weights.unsqueeze(-1)).sum(1)


def weights_first(x, weights, ids, w13, w2):
    hidden = swiglu(torch.einsum("tkhi,th->tki", w13.mT.contiguous()[ids], x))
    return torch.einsum("tki,tkih,tk->th", hidden, w2.mT.contiguous()[ids], weights)


def with_biases(x, weights, ids, w13, w2):
    hidden = swiglu(torch.einsum("th,tkhi->tki", x, w13.mT.contiguous()[ids]) + w13[:, :, 0][ids])
    out = torch.einsum("tki,tkih->tkh", hidden, w2.mT.contiguous()[ids]) + w2[:, :, 0][ids]
    return torch.einsum("tkh,tk->th", out, weights)


def summed(x, weights, ids, w13, w2):
    hidden = first(x, w13, ids) * weights.unsqueeze(-1)
    return torch.einsum("tki,tkih->th", hidden, w2.mT.contiguous()[ids])


def summed_as_stored(x, weights, ids, w13, w2):
    hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids])) * weights.unsqueeze(-1)
    return torch.einsum("tki,tkhi->th", hidden, w2[ids])


def summed_by_choice(x, weights, ids, w13, w2):
    hidden = first(x, w13, ids) * weights.unsqueeze(-1)
    return (hidden.reshape(len(x), 1, -1) @ below(w2, ids)).squeeze(1)


def turned(x, weights, ids, w13, w2):
    """As many columns as rows, which are the columns here."""
    factor = w13[ids].permute(0, 3, 1, 2).flatten(2)
    hidden = swiglu((x.unsqueeze(1) @ factor).view(len(x), TOP_K, -1)) * weights.unsqueeze(-1)
    return torch.einsum("tki,tkhi->th", hidden, w2[ids])


FORMS = {
    "turned": of_best(turned),
    "side by side": of_best(beside),
    "side by side, weights first": of_best(weights_first),
    "side by side, with biases": of_best(with_biases),
    "summed": of_best(summed),
    "summed, [E, B, A]": of_best(summed_as_stored),
    "summed by choice": of_best(summed_by_choice),
}


def ran(function, inputs):
    """What is raised of it; that it computes the same is seen to."""
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert_matches_oracle(out, function(*(each.double() for each in inputs)))
    return result


@pytest.mark.parametrize(("what", "sizes"), mixed_but(OPEN, FORMS, SIZES), ids=str)
def test_every_form_is_raised(what, sizes):
    result = ran(FORMS[what], layer(*sizes))
    assert result.ops() == ["fused_moe"] and not result.reasons


@pytest.mark.parametrize("what", ["side by side", "summed"])
def test_gradients(what):
    assert not trained(FORMS[what]).refused


def test_by_batch_of_tokens():
    def run(x, router, w13, w2):
        weights, ids = F.linear(x, router).softmax(-1).topk(TOP_K)
        hidden = swiglu(torch.einsum("bsh,bskhi->bski", x, w13.mT.contiguous()[ids])) * weights.unsqueeze(-1)
        return torch.einsum("bski,bskih->bsh", hidden, w2.mT.contiguous()[ids])

    inputs = float32(8)
    result = ran(run, inputs._replace(hidden_states=inputs.hidden_states.view(4, 2, HIDDEN)))
    assert result.ops() == ["fused_moe"]


def of_first(multiply):
    """A first product with [T, H, K * 2 * I] that `multiply` makes of what was gathered, [T, K, H, 2 * I]."""

    def combine(x, weights, ids, w13, w2):
        factor = multiply(w13.mT.contiguous()[ids])
        hidden = swiglu((x.unsqueeze(1) @ factor).view(len(x), TOP_K, -1))
        return (torch.einsum("tki,tkhi->tkh", hidden, w2[ids]) * weights.unsqueeze(-1)).sum(1)

    return of_best(combine)


def of_second(arrange, choose=lambda ids: ids):
    """Hidden rows [T, K, I] are arranged otherwise than matrices, [K * I, H], or these are of other choices."""

    def combine(x, weights, ids, w13, w2):
        hidden = first(x, w13, ids) * weights.unsqueeze(-1)
        return (arrange(hidden).reshape(len(x), 1, -1) @ below(w2, choose(ids))).squeeze(1)

    return of_best(combine)


OTHERS = {
    "not turned": of_first(lambda each: each.reshape(len(each), HIDDEN, -1)),
    "columns of one choice after those of another": of_first(
        lambda each: each.permute(0, 2, 3, 1).flatten(2)
    ),
    "hidden rows turned": of_second(lambda rows: rows.mT),
    "choices in another order": of_second(lambda rows: rows.flip(1)),
    "experts of other choices": of_second(lambda rows: rows, lambda ids: ids.flip(1)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_lies_otherwise_stays(what):
    assert not ran(OTHERS[what], float32(7)).ops()


def normed(rows):
    return F.layer_norm(rows, rows.shape[-1:])


def of_both_choices(x, weights, ids, w13, w2):
    """A layer, and one with a norm inside: both read what was gathered as it was turned."""
    turned = w2.mT.contiguous()[ids].transpose(1, 2)
    hidden = first(x, w13, ids)
    out = torch.einsum("tki,tikh,tk->th", hidden, turned, weights)
    rows = normed(first(x.sin(), w13, ids)).mT.reshape(len(x), 1, -1)
    return out + (rows @ turned.reshape(len(x), -1, HIDDEN)).squeeze(1)


def of_all_experts(x, weights, ids, w13, w2):
    """A layer, and a mixture of all experts."""
    dense = torch.zeros(len(x), len(w2), dtype=x.dtype).scatter(1, ids, weights)
    hidden, mixed = (swiglu(torch.einsum("th,eih->tei", each, w13)) for each in (x, x.sin()))
    out = torch.einsum("te,teh->th", dense, torch.einsum("tei,ehi->teh", hidden, w2))
    return out.sin() + torch.einsum("te,tei,ehi->th", x[:, : len(w2)].softmax(-1), mixed, w2)


@pytest.mark.parametrize("combine", [of_both_choices, of_all_experts])
def test_a_product_that_stays_beside_a_layer_of_the_same_weights(combine):
    """How it read them is gone with the layer, where nobody else read them so."""
    run = Run()
    exact = grads(of_best(combine), [each.double() for each in float32(7)])
    for ours, expected in zip(grads(run.compile(of_best(combine)), float32(7)), exact, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == RAISED


def of_two(x, router, w13, w2):
    """All experts are chosen of what comes from all of them, then of what is gathered: T * K is T * E."""
    weights, ids = (x @ router).softmax(-1).topk(len(w2))
    w13 = w13.view(len(w2), -1, HIDDEN)
    out = (w2 @ swiglu(torch.einsum("ti,eoi->teo", x, w13)).unsqueeze(-1)).squeeze(-1)
    picked = out.gather(1, ids.unsqueeze(-1).expand(-1, -1, HIDDEN))
    rows = (picked * weights.unsqueeze(-1)).sum(1) / 4
    hidden = swiglu(torch.einsum("ti,tkoi->tko", rows, w13[ids]))
    return ((hidden.unsqueeze(2) @ w2[ids].mT).squeeze(2) * weights.unsqueeze(-1)).sum(1)


def test_a_layer_that_is_raised_leaves_what_another_is_made_of():
    """Which is seen otherwise while layers are looked for, so that nobody reads how it was written."""
    given = (
        torch.randn(7, HIDDEN),
        torch.randn(HIDDEN, 3),
        torch.randn(3 * 64, HIDDEN),
        torch.randn(3, HIDDEN, 32),
    )
    torch._dynamo.mark_dynamic(given[0], 0)
    result, out = computed(of_two, *given, passes=PIPELINE)
    assert_matches_oracle(out, of_two(*(each.double() for each in given)))
    assert len(result.log.raised) >= 2
