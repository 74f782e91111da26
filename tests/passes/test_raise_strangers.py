"""Layers of strangers: those that are raised compute the same, those that are not say why, and the docs list both."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import moe_ops
from inductor_passes.pipeline import FUSIONS, RAISES
from tests.passes.capture import computed, rewrite
from tests.passes.stock import EXPERTS, layer, softmax_router, swiglu
from tests.passes.strangers import BOTH, STRANGERS, table

PIPELINE = (*RAISES, *FUSIONS)


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger(name):
    function, raised, reason = STRANGERS[name]
    inputs = layer(11)
    result, out = computed(function, *inputs, passes=PIPELINE)
    kinds = [each.kind for each in result.log.raised]
    assert kinds == {BOTH: ["experts", "topk_routing"], "experts": ["experts"], "": []}[raised]
    assert not reason or any(reason in each for each in result.reasons)
    torch.testing.assert_close(out, function(*inputs), rtol=0.03, atol=0.03)


def test_the_docs_have_the_table():
    assert table() in (Path(__file__).parents[2] / "docs" / "raising.md").read_text()


def of_list(x, router, w13, w2):
    """Experts that are modules of their own."""
    weights, ids = softmax_router(F.linear(x, router))
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert])
        total = total + out * (weights * (ids == expert)).sum(-1, keepdim=True).to(x.dtype)
    return total


def test_experts_with_weights_of_their_own_say_how_to_stack_them():
    x, router, w13, w2 = layer(5)
    weights = [each.clone() for each in w13], [each.clone() for each in w2]
    (reason,) = rewrite(of_list, x, router, *weights, passes=PIPELINE).reasons
    assert "whose weights are tensors of their own" in reason and "stack_experts=True" in reason


def of_mixture(x, router, w13, w2):
    """Nobody is chosen."""
    out = torch.einsum("tei,ehi->teh", swiglu(torch.einsum("th,eih->tei", x, w13)), w2)
    return (out * F.linear(x, router).softmax(-1).unsqueeze(-1)).sum(1)


def of_a_best(x, router, w13, w2):
    """A dense layer beside a choice, neither of which weighs the other; what was chosen from is read, too."""
    logits = F.linear(x, router)
    return F.linear(swiglu(F.linear(x, w13[0])), w2[0]), logits * (logits >= logits.topk(3)[0][:, 2:])


def of_a_sum(x, router, w13, w2):
    return F.linear(swiglu(F.linear(x, w13[0])), w2[0]) + F.linear(x, router).topk(3)[0].sum(-1, keepdim=True)


def of_what_is_added(x, router, w13, w2):
    """Heads of tokens to which a best is added."""
    best = F.linear(x, router).topk(1)[0]
    return torch.bmm((x + best).expand(EXPERTS, -1, -1), w13.mT)


def of_what_came_before(x, router, w13, w2):
    """A gate on what a dense layer gives, from the best of what is made of it."""
    rows = F.linear(swiglu(F.linear(x, w13[0])), w2[0])
    return rows * F.linear(rows, router).topk(3)[0].sum(-1, keepdim=True)


def of_a_table(x, router, w13, w2):
    """What is added for the best: rows of one table."""
    return x + F.embedding(F.linear(x, router).topk(3)[1], w13[:, 0].contiguous()).sum(1)


def of_a_table_of_the_model(x, router, w13, w2):
    return x + F.embedding(F.linear(x, router).topk(3)[1], router).sum(1)


def of_merged_weights(x, router, w13, w2):
    """Experts' weights are added up, and each token multiplied with its sum of them."""
    weights, ids = softmax_router(F.linear(x, router))
    w13, w2 = ((each[ids] * weights.to(x.dtype)[..., None, None]).sum(1) for each in (w13, w2))
    return torch.einsum("ti,thi->th", swiglu(torch.einsum("th,tih->ti", x, w13)), w2)


def of_a_largest(x, router, w13, w2):
    """A softmax by hand, as attention with sinks has one: nobody reads which number is the largest."""
    logits = F.linear(x, router)
    scores = (logits - logits.max(-1, keepdim=True).values).exp()
    return F.linear(swiglu(F.linear(x, w13[0])), w2[0]) * (scores / scores.sum(-1, keepdim=True))[:, :1]


@pytest.mark.parametrize(
    "function",
    [
        of_a_largest,
        of_mixture,
        of_a_best,
        of_a_sum,
        of_what_is_added,
        of_what_came_before,
        of_a_table,
        of_a_table_of_the_model,
        of_merged_weights,
    ],
)
def test_what_weighs_no_experts_by_a_choice_is_not_mentioned(function):
    assert not rewrite(function, *layer(5), passes=PIPELINE).reasons


def of_other_numbers(x, router, w13, w2):
    """What is gathered is cast, to a dtype that no router's weights have."""
    weights, ids = softmax_router(F.linear(x, router))
    rows = torch.einsum("th,tkih->tki", x.double(), w13[ids].double())
    return torch.einsum("tki,tkhi,tk->th", swiglu(rows), w2[ids].double(), weights.double()).to(x.dtype)


def of_all_but_one(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    total = torch.zeros_like(x)
    for expert in range(EXPERTS - 1):
        out = F.linear(F.linear(x, w13[expert, : w2.shape[2]]), w2[expert])
        total = total + out * (weights * (ids == expert)).sum(-1, keepdim=True).to(x.dtype)
    return total


def of_picked_weights(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    chosen = F.one_hot(ids, EXPERTS).to(x.dtype)
    w13, w2 = (torch.einsum("tke,exy->tkxy", chosen, each) for each in (w13, w2))
    rows = swiglu(torch.einsum("th,tkih->tki", x, w13))
    return torch.einsum("tki,tkhi,tk->th", rows, w2, weights.to(x.dtype))


def of_picked_tokens(x, router, w13, w2):
    """Mixture of depths: of tokens some are multiplied, with a layer that all of them share."""
    score, tokens = F.linear(x, router)[:, 0].topk(3)
    out = F.linear(swiglu(F.linear(x[tokens], w13[0])), w2[0])
    return x.index_add(0, tokens, out * score.sigmoid()[:, None])


def of_neurons(x, router, w13, w2):
    """PEER: experts of one neuron, rows of two tables, by keys of two parts."""
    first, second = (F.linear(x, each).topk(2) for each in router.chunk(2))
    sums = (first[0][:, :, None] + second[0][:, None]).flatten(1)
    scores, place = sums.topk(3)
    ids = (first[1][:, :, None] * 2 + second[1][:, None]).flatten(1).remainder(EXPERTS).gather(1, place)
    hidden = F.gelu(torch.einsum("th,tkh->tk", x, F.embedding(ids, w13))) * scores.softmax(-1)
    return torch.einsum("tk,tkh->th", hidden, F.embedding(ids, w2))


def by_convolution(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    dense = torch.zeros(len(x), EXPERTS).scatter(1, ids, weights).to(x.dtype)
    hidden = F.conv1d(x.T.repeat(EXPERTS, 1), w13[:, ::2].reshape(-1, x.shape[1], 1), groups=EXPERTS).relu()
    out = F.conv1d(hidden, w2.reshape(-1, w2.shape[2], 1), groups=EXPERTS)
    return torch.einsum("eht,te->th", out.view(EXPERTS, -1, len(x)), dense)


def of_ids_by_token(x, router, w13, w2):
    """One expert for each token, by a number of its own."""
    ids = (x[:, 0] * 8).long() % EXPERTS
    return torch.einsum("ti,thi->th", swiglu(torch.einsum("th,tih->ti", x, w13[ids])), w2[ids])


def looped_on_input(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    dense = torch.zeros(len(x), EXPERTS).scatter(1, ids, weights).to(x.dtype)
    rows = (x * dense[:, expert, None] for expert in range(EXPERTS))
    return sum(F.linear(swiglu(F.linear(each, w13[e])), w2[e]) for e, each in enumerate(rows))


@pytest.mark.parametrize(
    "function, how",
    [
        (of_picked_tokens, "picks the tokens that are multiplied"),
        (by_convolution, "by a convolution in groups"),
        (of_ids_by_token, "expert ids have shape [5]"),
        (looped_on_input, "what goes into an expert of the loop is weighed"),
        (of_other_numbers, "multiplied with weight[ids]"),
        (of_all_but_one, "every weight[expert]"),
        (of_picked_weights, "picked by a product"),
    ],
)
def test_layers_that_stay_say_how_they_read_their_weights(function, how):
    (reason,) = rewrite(function, *layer(5), passes=PIPELINE).reasons
    assert how in reason


def test_experts_of_one_neuron_say_so_once():
    x, router, w13, w2 = layer(5)
    (reason,) = rewrite(of_neurons, x, router, w13[:, 0].clone(), w2[..., 0].clone(), passes=PIPELINE).reasons
    assert "experts of one neuron each" in reason


def of_two_choices(x, router, w13, w2):
    """Two choices, by which the same layer is taken: what chooses for one is no expert of the other."""
    weights, _ = softmax_router(F.linear(x, router))
    total = torch.zeros_like(x)
    for scores in (F.linear(x, router), F.linear(x, router.roll(1, 0))):
        dense = torch.zeros_like(scores).scatter(1, scores.topk(weights.shape[1])[1], weights.to(x.dtype))
        for e in range(EXPERTS):
            total = total + F.linear(swiglu(F.linear(x, w13[e])), w2[e]) * dense[:, e, None]
    return total


def test_a_router_is_no_expert_of_another_choice():
    reasons = rewrite(of_two_choices, *layer(5), passes=PIPELINE).reasons
    assert len(reasons) == 1 and "the weights of an expert come from" in reasons[0]


def test_halves_of_tokens_are_no_experts():
    """Nor is their number known: what is seen of them has no place in a table."""

    def function(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        total = torch.zeros_like(x)
        for index, half in enumerate(x.view(2, -1, x.shape[1])):
            out = F.silu(x @ half.mT) @ half
            total = total + out * (weights * (ids == index)).sum(-1, keepdim=True)
        return total

    inputs = layer(12, torch.float32, True)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert not result.ops()
    torch.testing.assert_close(out, function(*inputs))


def test_a_choice_of_ours_is_not_mentioned():
    """Its weights weigh a dense layer as well."""

    def function(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        routed = moe_ops.fused_experts(x, w13, w2, weights, ids)
        return routed + F.linear(x, w13[0][:64]) * weights[:, :1].to(x.dtype)

    result = rewrite(function, *layer(7), passes=PIPELINE)
    assert result.ops() and not result.reasons
