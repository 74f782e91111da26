"""RaiseExperts on slots that lie by choice, [K, T]: the first choices of all tokens, then the second ones."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import HIDDEN, TOP_K, layer, oracle, softmax_router, sorted_slots, swiglu

PIPELINE = (*RAISES, *FUSIONS)


def gathered(**parts):
    """`bmm` with gathered weights, with some parts written differently."""
    part = {
        "router": softmax_router,
        "experts": lambda ids: ids.T.reshape(-1),
        "rows": lambda x: x.repeat(TOP_K, 1),
        "weight": lambda weights: weights.T.reshape(-1, 1),
        "sum": lambda out: out.view(TOP_K, -1, HIDDEN).sum(0),
        **parts,
    }

    def run(x, router, w13, w2):
        weights, ids = part["router"](F.linear(x, router))
        experts = part["experts"](ids)
        hidden = swiglu(torch.bmm(w13[experts], part["rows"](x).unsqueeze(-1)).squeeze(-1))
        out = torch.bmm(w2[experts], hidden.unsqueeze(-1)).squeeze(-1)
        return part["sum"](out * part["weight"](weights.to(x.dtype)))

    return run


def grouped(rows, finish):
    """Sorted by expert: rows for the place of each, and the sum of what they give."""

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        order, offsets = sorted_slots(ids.T)
        out = torch._grouped_mm(swiglu(torch._grouped_mm(rows(x, order), w13.mT, offsets)), w2.mT, offsets)
        return finish(out, weights.to(x.dtype).T, order, x)

    return run


def put_back(out, weights, order, x):
    slots = torch.empty_like(out)
    slots[order] = out
    return (slots.view(TOP_K, -1, HIDDEN) * weights.unsqueeze(-1)).sum(0)


def picked_back(out, weights, order, x):
    return torch.einsum("kth,kt->th", out[order.argsort()].view(TOP_K, -1, HIDDEN), weights)


def added(out, weights, order, x):
    out = out * weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order % len(x), out)


def scattered(out, weights, order, x):
    out = out * weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(x).scatter_add(0, (order % len(x)).unsqueeze(1).expand_as(out), out)


def of_tokens(x, order):
    return x[order % len(x)]


def of_repeated(x, order):
    return x.repeat(TOP_K, 1)[order]


FORMS = {
    "gathered, repeated": gathered(),
    "gathered, expanded": gathered(rows=lambda x: x.expand(TOP_K, -1, -1).reshape(-1, HIDDEN)),
    "gathered, unsqueezed": gathered(rows=lambda x: x[None].expand(TOP_K, -1, -1).flatten(0, 1)),
    "gathered, unbound": gathered(sum=lambda out: sum(out.view(TOP_K, -1, HIDDEN).unbind())),
    "sorted, put back": grouped(of_repeated, put_back),
    "sorted, added": grouped(of_tokens, added),
    "sorted, scattered": grouped(of_repeated, scattered),
}
SIZES = ((7, torch.bfloat16, False), (1, torch.bfloat16, False))
OPEN = (5, torch.bfloat16, True)


@pytest.mark.parametrize(("form", "sizes"), mixed_but(OPEN, FORMS, SIZES), ids=str)
def test_forms(form, sizes):
    inputs = layer(*sizes)
    result, out = computed(FORMS[form], *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"] and not result.reasons
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, oracle(inputs, stock.looped))


def of_more_than_there_are(logits):
    """Some are found that are no expert's."""
    return softmax_router(torch.cat([logits, logits[:, :2] - 100], 1))


NO_WEIGHT = "is no weight for each slot"
OTHER = {
    "tokens repeated in another order": (
        gathered(rows=lambda x: x.repeat_interleave(TOP_K, 0)),
        "not from the tokens of their slots",
    ),
    "tokens that are not repeated as often": (
        gathered(rows=lambda x: x.repeat(1, TOP_K).view(-1, HIDDEN)),
        "not from the tokens of their slots",
    ),
    "rows out of more than there are slots": (
        gathered(rows=lambda x: x.repeat(2 * TOP_K, 1)[torch.arange(TOP_K * len(x)) + TOP_K * len(x)]),
        "not from the tokens of their slots",
    ),
    "halves of tokens, repeated twice": (
        gathered(rows=lambda x: x[:, : HIDDEN // 2].repeat(TOP_K, 2)),
        "not from the tokens of their slots",
    ),
    "experts by token": (
        gathered(experts=lambda ids: ids.reshape(-1)),
        "rows come from aten.repeat, not from the tokens of their slots",
    ),
    "weights by token": (gathered(weight=lambda weights: weights.reshape(-1, 1)), NO_WEIGHT),
    "a sum by token": (gathered(sum=lambda out: out.view(-1, TOP_K, HIDDEN).sum(1)), NO_WEIGHT),
    "a choice is left out": (
        gathered(sum=lambda out: out.view(TOP_K, -1, HIDDEN)[1:].sum(0)),
        NO_WEIGHT,
    ),
    "ids that may be out of range": (gathered(router=of_more_than_there_are), NO_WEIGHT),
    "sorted, other tokens": (
        grouped(lambda x, order: x[order // TOP_K], added),
        "not from tokens in expert order",
    ),
    "sorted, repeated in another order": (
        grouped(lambda x, order: x.repeat_interleave(TOP_K, 0)[order], put_back),
        "not from the tokens of their slots",
    ),
    "sorted, added to other tokens": (
        grouped(of_tokens, lambda out, weights, order, x: added(out, weights, order // TOP_K, x)),
        NO_WEIGHT,
    ),
    "sorted, not put back": (
        grouped(of_tokens, lambda out, weights, order, x: put_back(out, weights, order.argsort(), x)),
        "reads what experts give, not a weighted sum",
    ),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_mixes_slots_up_stays(what):
    function, reason = OTHER[what]
    result = rewrite(function, *layer(5), passes=PIPELINE)
    assert all(each.kind != "experts" for each in result.log.raised)
    assert any(reason in each for each in result.reasons), result.reasons


def test_ids_that_are_found_in_columns():
    """Of logits [E, T], whose ids are turned to [T, K]: these are no slots by choice."""

    def in_columns(logits):
        weights, ids = logits.T.float().softmax(0).topk(TOP_K, 0)
        return (weights / weights.sum(0, keepdim=True)).T, ids.T

    def rows(x):
        return x.repeat_interleave(TOP_K, 0)

    parts = {
        "experts": lambda ids: ids.reshape(-1),
        "weight": lambda weights: weights.reshape(-1, 1),
        "sum": lambda out: out.view(-1, TOP_K, HIDDEN).sum(1),
    }
    inputs, function = layer(7), gathered(router=in_columns, rows=rows, **parts)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.log.raised[0].kind == "experts"
    assert_matches_oracle(out, oracle(inputs, stock.looped))
