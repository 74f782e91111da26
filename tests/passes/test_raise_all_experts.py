"""RaiseExperts on products of all tokens with all experts at once: raised where a top-k weighs them, else left."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import EXPERTS, HIDDEN, INTERMEDIATE, softmax_router, swiglu
from tests.passes.strangers import dense, with_biases

PIPELINE = (*RAISES, *FUSIONS)


def layer(tokens, dtype=torch.bfloat16, dynamic=False):
    """That of `stock`, and biases."""
    biases = (torch.randn(EXPERTS, size).to(dtype) for size in (2 * INTERMEDIATE, HIDDEN))
    return (*stock.layer(tokens, dtype, dynamic), *biases)


def weighed(
    combine, scatter=lambda ids, weights: torch.zeros(*ids.shape[:-1], EXPERTS).scatter(-1, ids, weights)
):
    """A layer of `combine(hidden_states, weights [T, E], w13, w2, b13, b2)`."""

    def run(x, router, *parameters):
        weights, ids = softmax_router(F.linear(x, router))
        return combine(x, scatter(ids, weights).to(x.dtype), *parameters)

    return run


def einsum(x, weights, w13, w2, b13, b2):
    hidden = swiglu(torch.einsum("th,eih->tei", x, w13) + b13)
    out = torch.einsum("tei,ehi->teh", hidden, w2) + b2
    return (out * weights.unsqueeze(-1)).sum(1)


def repeated(x, weights, w13, w2, b13, b2):
    rows = x.repeat(EXPERTS, 1).view(EXPERTS, -1, HIDDEN)
    hidden = swiglu(torch.bmm(rows, w13.mT) + b13[:, None])
    out = torch.bmm(hidden, w2.mT) + b2.unsqueeze(1)
    return (out * weights.T[..., None]).sum(dim=0)


def expanded(x, weights, w13, w2, b13, b2):
    """Gate and up apart, the sum a product."""
    (w1, w3), (b1, b3) = w13.chunk(2, dim=1), b13[:, None].chunk(2, dim=-1)
    hidden = F.silu(x @ w1.mT + b1) * (x @ w3.mT + b3)
    return torch.einsum("eth,te->th", hidden @ w2.mT + b2[:, None], weights)


def batched(x, weights, w13, w2, b13, b2):
    """Tokens [B, S, H], and no biases."""
    x, weights = x.unflatten(0, (1, -1)), weights.unflatten(0, (1, -1))
    hidden = swiglu(torch.einsum("bsh,eih->bsei", x, w13))
    return torch.einsum("bseh,bse->bsh", torch.einsum("bsei,ehi->bseh", hidden, w2), weights)[0]


def added(x, weights, w13, w2, b13, b2):
    """`baddbmm`."""
    hidden = swiglu(torch.baddbmm(b13[:, None], x.expand(EXPERTS, -1, -1), w13.mT))
    return torch.einsum("te,eth->th", weights, torch.baddbmm(b2[:, None], hidden, w2.mT))


def looped(x, weights, w13, w2, *biases):
    return with_biases(x, weights, w13, w2)


def turned(x, weights, w13, w2, b13, b2):
    """Input features first."""
    w13, w2 = (each.mT.contiguous().clone() for each in (w13, w2))
    return einsum(x, weights, w13.mT, w2.mT, b13, b2)


def exactly(combine, x, router, w13, w2, b13, b2):
    """The layer in float64, token by token."""
    x, router, w13, w2, b13, b2 = (each.double() for each in (x, router, w13, w2, b13, b2))
    weights, ids = (x @ router.T).softmax(-1).topk(stock.TOP_K)
    is_biased = combine is not batched
    hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids]) + is_biased * b13[ids])
    out = torch.einsum("tki,tkhi->tkh", hidden, w2[ids]) + is_biased * b2[ids]
    return (out * (weights / weights.sum(-1, keepdim=True)).unsqueeze(-1)).sum(1)


SIZES = (
    (7, torch.bfloat16, True),
    (33, torch.float32, False),
    (1, torch.float32, False),
    (13, torch.bfloat16, False),
)


@pytest.mark.parametrize(
    ("combine", "sizes"),
    mixed((einsum, repeated, expanded, batched, added), SIZES),
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_every_form_is_raised(combine, sizes):
    inputs = layer(*sizes)
    result, out = computed(weighed(combine), *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, exactly(combine, *inputs))


@pytest.mark.parametrize("gate", [lambda both: F.relu(both[..., ::2]) * both[..., 1::2]])
def test_a_gate_of_ones_own(gate):
    def combine(x, weights, w13, w2, *biases):
        out = torch.bmm(gate(torch.bmm(x.expand(EXPERTS, -1, -1), w13.mT)), w2.mT)
        return (out * weights.T.unsqueeze(-1)).sum(0)

    inputs = layer(7)
    result, out = computed(weighed(combine), *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe_formula"]
    torch.testing.assert_close(out, weighed(combine)(*inputs), rtol=0.03, atol=0.03)


def with_parts(**parts):
    """Products by expert, with some parts written differently."""
    part = {
        "rows": lambda x: x.expand(EXPERTS, -1, -1),
        "bias": lambda b13: b13[:, None],
        "gate": swiglu,
        "inner": lambda hidden: hidden,
        "column": lambda weights: weights.T.unsqueeze(-1),
        "sum": lambda terms, out, hidden: terms.sum(0),
        **parts,
    }

    def combine(x, weights, w13, w2, b13, b2):
        hidden = part["gate"](torch.bmm(part["rows"](x), w13.mT) + part["bias"](b13))
        out = torch.bmm(part["inner"](hidden), w2.mT)
        return part["sum"](out * part["column"](weights), out, hidden)

    return combine


NOT_THE_SUM = "aten.bmm is not the sum of what experts give, weighed by one tensor"
OTHER = {
    "rows of another token": (
        {"rows": lambda x: x.roll(1, 0).expand(EXPERTS, -1, -1).transpose(0, 1)},
        "not all of them all tokens",
    ),
    "one token for each expert": (
        {"rows": lambda x: x[:, None].expand(-1, EXPERTS, -1)},
        "not all of them all tokens",
    ),
    "rows of each expert's own": (
        {"rows": lambda x: x.expand(EXPERTS, -1, -1) * torch.rand(EXPERTS, 1, 1).to(x.dtype)},
        "not all of them all tokens",
    ),
    "a bias for each token": ({"bias": lambda b13: b13}, "the gate also reads"),
    "a bias for each token, for all experts": ({"bias": lambda b13: b13[None]}, "the gate also reads"),
    "a bias for each column": ({"bias": lambda b13: b13[:1]}, "the gate also reads"),
    "a gate that tells experts apart": (
        {"gate": lambda both: swiglu(both) * torch.arange(EXPERTS)[:, None, None]},
        "tells rows apart by where they lie",
    ),
    "a gate between experts": (
        {"gate": lambda both: swiglu(both) + swiglu(both).mean(0)},
        "the gate also reads aten.mean.dim",
    ),
    "other experts' rows": ({"inner": lambda hidden: hidden.transpose(0, 1)}, "gives experts rows of others"),
    "weights of other tokens": (
        {"column": lambda weights: weights.unsqueeze(-1)},
        NOT_THE_SUM,
    ),
    "twice the weights": (
        {"column": lambda weights: 2 * weights.T.unsqueeze(-1)},
        NOT_THE_SUM,
    ),
    "a sum over tokens": ({"sum": lambda terms, out, hidden: terms.sum(1)}, NOT_THE_SUM),
    "the largest": ({"sum": lambda terms, out, hidden: terms.amax(0)}, NOT_THE_SUM),
    "one that reads what experts give": (
        {"sum": lambda terms, out, hidden: (terms.sum(0), out)},
        "all experts at once",
    ),
    "one that reads a gate": ({"sum": lambda terms, out, hidden: (terms.sum(0), hidden)}, "is also read by"),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_does_something_else_stays(what):
    """There are as many tokens as experts: sizes tell nothing."""
    parts, reason = OTHER[what]
    result = rewrite(weighed(with_parts(**parts)), *layer(EXPERTS), passes=PIPELINE)
    assert not result.log.raised and not result.ops()
    assert any(reason in each for each in result.reasons), result.reasons


def test_gate_and_up_of_other_tokens_stay():
    def combine(x, weights, w13, w2, *biases):
        w1, w3 = w13.chunk(2, dim=1)
        hidden = F.silu(x @ w1.mT) * (x.roll(1, 0) @ w3.mT)
        return ((hidden @ w2.mT) * weights.T.unsqueeze(-1)).sum(0)

    (reason,) = rewrite(weighed(combine), *layer(7), passes=PIPELINE).reasons
    assert reason == "the products before the gate have different inputs"


def test_without_other_parts_it_is_raised():
    assert len(rewrite(weighed(with_parts()), *layer(EXPERTS), passes=PIPELINE).log.raised) == 2


SCATTERS = {
    "into ones": lambda ids, weights: torch.ones(len(ids), EXPERTS).scatter(-1, ids, weights),
    "one more": lambda ids, weights: torch.zeros(len(ids), EXPERTS).scatter(-1, ids, weights + 1),
    "the largest twice": lambda ids, weights: torch.zeros(len(ids), EXPERTS).scatter(
        -1, ids[:, :1], weights[:, :1] * 2
    ),
    "no more than a third": lambda ids, weights: (
        torch.zeros(len(ids), EXPERTS).scatter(-1, ids, weights).clamp(max=1 / 3)
    ),
}


@pytest.mark.parametrize("what", SCATTERS)
def test_other_weights(what):
    """Numbers that are no router's are weights all the same, if they are zero where nobody chose."""
    function, inputs = weighed(einsum, SCATTERS[what]), layer(7, torch.float32)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert bool(result.log.raised) == (what != "into ones")
    torch.testing.assert_close(out, function(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scales", [{"alpha": 2}, {"beta": 2}])
def test_products_that_are_scaled_stay(scales):
    def scaled(x, weights, w13, w2, b13, b2):
        hidden = swiglu(torch.baddbmm(b13[:, None], x.expand(EXPERTS, -1, -1), w13.mT, **scales))
        return torch.einsum("te,eth->th", weights, torch.baddbmm(b2[:, None], hidden, w2.mT))

    assert not rewrite(weighed(scaled), *layer(7), passes=PIPELINE).log.raised


def best(logits):
    """Out of the top-k as they are, no longer a sum of one."""
    scores = logits.softmax(-1)
    weights, ids = scores.topk(stock.TOP_K)
    return torch.zeros_like(scores).scatter(-1, ids, weights)


def softmax_of_the_best(logits):
    """Logits in rows of minus infinity (nanoGPT-like layers)."""
    best, ids = logits.topk(stock.TOP_K, dim=-1)
    return torch.full_like(logits, float("-inf")).scatter(-1, ids, best).softmax(-1)


@pytest.mark.parametrize("combine", [einsum, looped])
@pytest.mark.parametrize("weigh", [best, softmax_of_the_best])
def test_weights_that_routers_scatter(weigh, combine):
    def run(x, router, *parameters):
        return combine(x, weigh(F.linear(x, router).float()).to(x.dtype), *parameters)

    inputs = layer(7, torch.float32)
    result, out = computed(run, *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"] and not result.reasons
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, run(*(each.double() for each in inputs)))


def test_every_style_of_weights_reads_as_stored():
    inputs = layer(7)
    result, out = computed(weighed(turned), *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, exactly(turned, *inputs))


def test_a_mixture_of_all_is_not_mentioned():
    def mixture(x, router, w13, w2):
        return dense(x, F.linear(x, router).softmax(-1), w13, w2)

    assert not rewrite(mixture, *stock.layer(5), passes=PIPELINE).reasons
