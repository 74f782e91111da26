"""RaiseExperts where what goes into products with all experts is weighed: tokens, as Llama 4 has it, or gates."""

import math

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but
from tests.passes.capture import computed, rewrite
from tests.passes.spellings import of_best
from tests.passes.stock import EXPERTS, HIDDEN, layer, swiglu
from tests.passes.test_before_autograd import check, float32
from tests.passes.test_raise_forms_in_training import trained

PIPELINE = (*RAISES, *FUSIONS)
OPEN = (7, torch.bfloat16, True)
SIZES = (
    (7, torch.bfloat16, False),
    (33, torch.float32, False),
    (1, torch.float32, False),
    (EXPERTS, torch.float32, False),
)


def of_all(combine):
    """A layer of `combine(x, weights [T, E], w13, w2)`."""

    def run(x, weights, ids, w13, w2):
        return combine(x, torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, ids, weights), w13, w2)

    return of_best(run)


def by_expert(rows, w13, w2, gate=swiglu):
    """What all experts give of rows [E, T, H]."""
    return torch.bmm(gate(torch.bmm(rows, w13.mT)), w2.mT)


def llama(scores, repeat, top_k=1):
    """Llama 4's: `scores` of logits of which all but the best are minus infinity."""

    def run(x, router, w13, w2):
        logits = F.linear(x, router)
        best, ids = logits.topk(top_k, dim=1)
        column = scores(torch.full_like(logits, -math.inf).scatter(1, ids, best)).to(x.dtype)
        rows = (repeat(x) * column).view(EXPERTS, -1, HIDDEN)
        return by_expert(rows, w13, w2).view(-1, HIDDEN).reshape(EXPERTS, -1, HIDDEN).sum(0)

    return run


def picked(x):
    """Its first version picked each token for each expert."""
    places = torch.arange(len(x)).view(1, -1).expand(EXPERTS, -1).reshape(-1, 1)
    return torch.gather(x, 0, places.expand(-1, HIDDEN))


def by_token(x, weights, w13, w2):
    rows = torch.einsum("te,th->teh", weights, x)
    return torch.einsum("tei,ehi->teh", swiglu(torch.einsum("teh,eih->tei", rows, w13)), w2).sum(1)


def gates_by_token(x, weights, w13, w2):
    hidden = swiglu(torch.einsum("th,eih->tei", x, w13)) * weights.unsqueeze(-1)
    return torch.einsum("tei,ehi->teh", hidden, w2).sum(1)


def at_once(x, weights, w13, w2):
    """Ports from JAX: experts are summed over within the second product."""
    hidden = swiglu(torch.einsum("th,ehi->eti", x, w13.mT.contiguous()))
    return torch.einsum("te,eti,ehi->th", weights, hidden, w2)


def at_once_of_turned(x, weights, w13, w2):
    hidden = swiglu(torch.einsum("th,eih->tei", x, w13)) * weights.unsqueeze(-1)
    return hidden.flatten(1) @ w2.mT.contiguous().clone().flatten(0, 1)


def gates_by_expert(x, weights, w13, w2):
    hidden = swiglu(torch.bmm(x.expand(EXPERTS, -1, -1), w13.mT)) * weights.T.unsqueeze(-1)
    return torch.bmm(hidden, w2.mT).sum(0)


def of_biases(x, weights, w13, w2):
    """Of the first products: they are weighed with what they are added to."""
    hidden = swiglu(torch.einsum("th,eih->tei", x, w13) + w13[..., 0]) * weights[..., None]
    return torch.einsum("tei,ehi->teh", hidden, w2).sum(1)


ON_INPUT = {
    "Llama 4": llama(lambda masked: masked.sigmoid().T.reshape(-1, 1), lambda x: x.repeat(EXPERTS, 1)),
    "Llama 4's first": llama(lambda masked: masked.T.float().sigmoid().reshape(-1, 1), picked),
    "two of each token": llama(lambda masked: masked.sigmoid().T.reshape(-1, 1), picked, top_k=2),
    "broadcast": of_all(lambda x, weights, w13, w2: by_expert(x * weights.T[..., None], w13, w2).sum(0)),
    "by token": of_all(by_token),
}
ON_GATES = {
    "gates by token": of_all(gates_by_token),
    "gates by expert": of_all(gates_by_expert),
    "gates, at once": of_all(at_once),
    "gates, at once, stored turned": of_all(at_once_of_turned),
    "first products with biases": of_all(of_biases),
}
IN_PARTS = ["routing_dispatch", "permute", "grouped_gemm", "gated_activation", "gemm_combine"]


@pytest.mark.parametrize(("what", "sizes"), mixed_but(OPEN, {**ON_INPUT, **ON_GATES}, SIZES), ids=str)
def test_every_form_is_raised(what, sizes):
    inputs, function = layer(*sizes), {**ON_INPUT, **ON_GATES}[what]
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    whole = ["topk_routing", "fused_experts"] if "Llama 4" in what else IN_PARTS
    assert result.ops() == (["fused_moe"] if what in ON_GATES else whole)
    assert_matches_oracle(out, function(*(each.double() for each in inputs)))


def test_weights_by_expert_of_batches():
    """[E, B, S], as they are added up over choices."""

    def function(x, router, w13, w2):
        batches = x.view(3, -1, HIDDEN)
        weights, ids = F.linear(batches, router).softmax(-1).topk(2)
        of_all = torch.stack([(weights * (ids == expert)).sum(-1) for expert in range(EXPERTS)])
        out = by_expert(x.expand(EXPERTS, -1, -1), w13, w2).view(EXPERTS, *batches.shape)
        return (out * of_all.unsqueeze(-1)).sum(0)

    inputs = layer(12, torch.float32)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, function(*(each.double() for each in inputs)))


def test_one_token_at_once():
    """Einsums leave sizes of 1 between the others."""
    result = rewrite(ON_GATES["gates, at once"], *layer(1, torch.float32), passes=PIPELINE)
    assert result.ops() == ["fused_moe"]


@pytest.mark.parametrize("what", ["Llama 4", "broadcast", "gates by token", "gates, at once"])
def test_gradients(what):
    trained({**ON_INPUT, **ON_GATES}[what])


def test_a_gradient_that_stops_at_what_is_weighed_stops():
    check(of_all(lambda x, w, w13, w2: by_expert((x * w.T[..., None]).detach(), w13, w2).sum(0)), float32(7))


def on_input(**parts):
    """`broadcast`, with some parts written differently."""
    part = {
        "weights": lambda weights: weights.T[..., None],
        "rows": lambda x: x,
        "bias": 0.0,
        "gate": swiglu,
        "last": lambda out, weights: out.sum(0),
        **parts,
    }

    def combine(x, weights, w13, w2):
        rows = part["rows"](x) * part["weights"](weights)
        hidden = part["gate"](torch.bmm(rows, w13.mT) + part["bias"])
        return part["last"](torch.bmm(hidden, w2.mT), weights)

    return of_all(combine)


NOT_WEIGHED = "is not the tokens, for each expert weighed by one tensor"
OTHER = {
    "weights of other tokens": ({"weights": lambda weights: weights[..., None]}, NOT_WEIGHED),
    "what nobody chose": ({"weights": lambda weights: weights.T[..., None] + 1}, NOT_WEIGHED),
    "twice the weights": ({"weights": lambda weights: 2 * weights.T[..., None]}, NOT_WEIGHED),
    "other tokens": ({"rows": lambda x: torch.stack([x.roll(e, 0) for e in range(EXPERTS)])}, NOT_WEIGHED),
    "biases": ({"bias": torch.ones(EXPERTS, 1, 64)}, "with biases is weighed"),
    "a gate that makes something of nothing": (
        {"gate": lambda both: both.chunk(2, -1)[0].sigmoid()},
        "does not make zero of zero",
    ),
    "a mean": (
        {"last": lambda out, weights: out.mean(0)},
        "aten.mean.dim is not the sum of what experts give",
    ),
    "a sum times a number": (
        {"last": lambda out, weights: (2 * out).sum(0)},
        "is not the sum of what experts give",
    ),
    "weighed again": ({"last": lambda out, weights: (out * weights.T[..., None]).sum(0)}, "experts read"),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_does_something_else_stays(what):
    """There are as many tokens as experts: sizes tell nothing."""
    parts, reason = OTHER[what]
    result = rewrite(on_input(**parts), *layer(EXPERTS, torch.float32), passes=PIPELINE)
    assert not result.log.raised and result.after == result.before
    assert any(reason in each for each in result.reasons), result.reasons


def test_gate_and_up_of_other_weighed_tokens_stay():
    def combine(x, weights, w13, w2):
        w1, w3 = w13.chunk(2, dim=1)
        hidden = F.silu((x * weights.T[..., None]) @ w1.mT) * (x @ w3.mT)
        return (hidden @ w2.mT).sum(0)

    (reason,) = rewrite(of_all(combine), *layer(7), passes=PIPELINE).reasons
    assert reason == "the products before the gate have different inputs"


def test_gates_weighed_by_what_nobody_chose_stay():
    def combine(x, weights, w13, w2):
        hidden = swiglu(torch.einsum("th,eih->tei", x, w13)) * (weights + 1).unsqueeze(-1)
        return torch.einsum("tei,ehi->teh", hidden, w2).sum(1)

    (reason,) = rewrite(of_all(combine), *layer(7), passes=PIPELINE).reasons
    assert "is not what goes into experts, weighed by one tensor" in reason


def test_weighed_gates_before_a_bias_stay():
    def combine(x, weights, w13, w2):
        hidden = swiglu(torch.bmm(x.expand(EXPERTS, -1, -1), w13.mT)) * weights.T.unsqueeze(-1)
        return (torch.bmm(hidden, w2.mT) + w2[:, None, :, 0]).sum(0)

    (reason,) = rewrite(of_all(combine), *layer(7), passes=PIPELINE).reasons
    assert reason == "what goes into experts with biases is weighed, not what they give"


def heads(x, router, w13, w2):
    """An attention's output, out of a tensor [heads, A, H]: nobody chooses any."""
    rows = torch.einsum("th,ehi->tei", x, w2)
    return torch.einsum("tei,ehi->th", rows, w2), F.linear(x, router).topk(2).values


def test_other_products_over_experts_are_what_they_were():
    result = rewrite(heads, *layer(7, torch.float32), passes=PIPELINE)
    assert result.after == result.before and not result.reasons


@pytest.mark.parametrize("is_turned", [False, True])
def test_columns_of_experts_that_meet_others_stay(is_turned):
    """Experts have as many columns as there are experts: [E, E, H], turned perhaps."""

    def combine(x, weights, w13, w2):
        hidden = swiglu(torch.einsum("th,eih->tei", x, w13[:, : 2 * EXPERTS])) * weights.unsqueeze(-1)
        last = w2[..., :EXPERTS].mT
        return hidden.flatten(1) @ (last.transpose(0, 1) if is_turned else last).reshape(-1, HIDDEN)

    function, inputs = of_all(combine), layer(7, torch.float32)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert bool(result.log.raised) != is_turned
    assert_matches_oracle(out, function(*(each.double() for each in inputs)))


def on_output(x, weights, w13, w2):
    return (by_expert(x.expand(EXPERTS, -1, -1), w13, w2) * weights.T[..., None]).sum(0)


def test_a_mixture_of_all_behind_a_layer_is_not_mentioned():
    """A norm multiplies each token with a number that is made of the choices of the layer before."""

    def run(x, router, w13, w2):
        x = x + of_all(on_output)(x, router, w13, w2)
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return by_expert(x.expand(EXPERTS, -1, -1), w13, w2).sum(0)

    result = rewrite(run, *layer(7, torch.float32), passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"] and not result.reasons
