"""RaiseExperts on one layer in many spellings: all are raised, what only looks like them stays."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but
from tests.passes.capture import computed, rewrite
from tests.passes.spellings import (
    SPELLINGS,
    looped,
    of_best,
    of_expert,
    of_one,
    transposed,
    with_biases,
)
from tests.passes.stock import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, layer, softmax_router, swiglu
from tests.passes.test_before_autograd import check, float32
from tests.passes.test_raise_forms_in_training import trained

PIPELINE = (*RAISES, *FUSIONS)
SIZES = ((7, torch.float32, False), (1, torch.bfloat16, False), (9, torch.bfloat16, False))
OPEN = (9, torch.bfloat16, True)


@pytest.mark.parametrize(("what", "sizes"), mixed_but(OPEN, SPELLINGS, SIZES), ids=str)
def test_every_spelling_is_raised(what, sizes):
    inputs = layer(*sizes)
    result, out = computed(SPELLINGS[what], *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, SPELLINGS[what](*(each.double() for each in inputs)))


@pytest.mark.parametrize(
    "what",
    [
        "experts unbound",
        "einsums by expert",
        "weights on the left",
        "gathered, unflattened",
        "summed number by number",
        "top-1 by max of rows",
        "top-1 by a maximum",
        "top-1 at once",
    ],
)
def test_gradients(what):
    assert not trained(SPELLINGS[what]).refused


def seen_otherwise(x, weights, ids, w13, w2):
    """[I, H] as [H, I], which is not its transpose."""
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        hidden = swiglu(torch.einsum("th,ih->ti", x, w13[expert]))
        second = w2[expert].reshape(INTERMEDIATE, HIDDEN)
        total = total + torch.einsum("ti,ih->th", hidden, second) * of_expert(weights, ids, expert)
    return total


def rows_in_the_gate(gate_up):
    """Two are one on the way."""
    return swiglu(gate_up.view(-1, 4 * INTERMEDIATE).tanh().view(-1, 2 * INTERMEDIATE))


def columns_apart(x, dense, w13, w2):
    """Columns of all experts lie together, not those of each."""
    hidden = F.linear(x, w13.permute(2, 0, 1).reshape(-1, x.shape[1])).view(-1, EXPERTS, 2 * INTERMEDIATE)
    return torch.einsum("te,teh->th", dense, torch.einsum("tei,eih->teh", swiglu(hidden), w2))


def placed(x, weights, ids, w13, w2, end=lambda out: out):
    """GShard's dispatch tensor [T, E, C], with room for all."""
    chosen = F.one_hot(ids, EXPERTS).to(x.dtype)
    places = ((chosen.view(-1, EXPERTS).cumsum(0) - 1).view_as(chosen) * chosen).sum(-1).long()
    slots = F.one_hot(places, ids.numel()).to(x.dtype)
    rows = torch.einsum("tec,th->ech", torch.einsum("tke,tkc->tec", chosen, slots), x)
    out = torch.einsum("eci,ehi->ech", swiglu(torch.einsum("ech,eih->eci", rows, w13)), w2)
    return torch.einsum("tec,ech->th", torch.einsum("tke,tkc,tk->tec", chosen, slots, weights), end(out))


def worst_of_all(x, probs, ids, w13, w2):
    """Over tokens, which experts choose."""
    chosen = F.linear(swiglu(F.linear(x, w13[0])), w2[0])
    return chosen[probs.argmax(0)].sum(0, keepdim=True) + x


def gates_on_columns(x, weights, ids, w13, w2):
    """Products from the left, of which none is turned before the last."""
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = (w13[expert] @ x.T).chunk(2)
        total = total + (w2[expert] @ (F.silu(gate) * up)).T * of_expert(weights, ids, expert)
    return total


def columns_to_the_end(x, weights, ids, w13, w2):
    """Products from the left, of which none is turned."""
    total = torch.zeros_like(x.T)
    for expert in range(EXPERTS):
        gate, up = (w13[expert] @ x.T).chunk(2)
        total = total + w2[expert] @ (F.silu(gate) * up) * of_expert(weights, ids, expert).T
    return total.T


OTHER = {
    "gates on columns": (of_best(gates_on_columns), "products that give rows [tokens, columns]"),
    "columns to the end": (of_best(columns_to_the_end), "products that give rows [tokens, columns]"),
    "a matrix seen in another shape": (
        of_best(seen_otherwise),
        "every token is multiplied with every weight[expert]",
    ),
    "rows meet in the gate": (of_best(looped(rows_in_the_gate)), "several as one"),
    "columns of experts lie together": (
        of_best(transposed(columns_apart)),
        "rows are multiplied with all experts at once",
    ),
    "tokens are placed by a product": (
        of_best(partial(placed, end=torch.tanh)),
        "a product with what was chosen places tokens",
    ),
    "something else is added within products": (
        of_best(with_biases(lambda biases, experts: biases[experts] + 1)),
        "the product with experts adds aten.unsqueeze, no bias of theirs",
    ),
}


def test_masks_that_are_products_of_masks():
    result = rewrite(of_best(placed), *layer(6), passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]


def test_places_that_are_counted_in_a_dtype_that_has_not_as_many_numbers():
    result = rewrite(of_best(placed), *layer(100), passes=PIPELINE)
    assert not result.ops() and any("places are counted in torch.bfloat16" in each for each in result.reasons)


@pytest.mark.parametrize("what", OTHER)
def test_what_looks_alike_stays(what):
    function, reason = OTHER[what]
    result = rewrite(function, *layer(6), passes=PIPELINE)
    assert not result.log.raised and not result.ops()
    assert not reason or any(reason in each for each in result.reasons)


@pytest.mark.parametrize(
    "function",
    [
        of_one(worst_of_all),
        of_one(lambda x, probs, ids, *_: x + probs[0, ids].unsqueeze(1)),
        of_one(lambda x, probs, *_: probs.sum().argmax(-1)),
    ],
)
def test_the_best_of_rows_that_choose_no_experts_are_what_they_were(function):
    result = rewrite(function, *layer(6), passes=PIPELINE)
    assert result.after == result.before


@pytest.mark.parametrize(
    "combine",
    [
        lambda x, weights, ids, w13, w2: (w2[ids] * weights[:, :, None, None]).sum(2).sum(1).mT @ x,
        lambda x, weights, ids, w13, w2: (w13[ids] * x[:, None, None]).sum((1, -1)),
        lambda x, weights, ids, w13, w2: (w13[ids] * x[:, None, None]).sum(-1, True),
        lambda x, weights, ids, w13, w2: (w13[ids] * x[:, None, None]).sum(-1),
        lambda x, weights, ids, w13, w2: (w13[ids] * x[:TOP_K, None]).sum(-1),
        lambda x, weights, ids, w13, w2: (x[0] * x[1]).sum(-1),
    ],
)  # fmt: skip
def test_sums_in_no_layer_are_what_they_were(combine):
    result = rewrite(of_best(combine), *layer(6), passes=RAISES)
    assert "aten.sum.dim_IntList" in result.after and result.after.count("aten.bmm") == result.before.count(
        "aten.bmm"
    )


def test_ids_that_others_read_stay():
    """An auxiliary loss counts them: it keeps what it read."""

    def run(x, router, w13, w2):
        probs = F.linear(x, router).float().softmax(-1)
        weights, ids = probs.max(-1)
        hidden = swiglu(torch.bmm(x.unsqueeze(1), w13.mT[ids]))
        out = torch.bmm(hidden, w2.mT[ids]).squeeze(1) * weights.unsqueeze(-1)
        return out, (F.one_hot(ids, EXPERTS).float().mean(0) * probs.mean(0)).sum()

    inputs = layer(7, torch.float32)
    result, outs = computed(run, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    for out, exact in zip(outs, run(*(each.double() for each in inputs)), strict=True):
        assert_matches_oracle(out, exact)


def test_einsums_that_turn_what_gradients_do_not_pass():
    """What is turned back stays where gradients stop in between."""

    def stopped(x, weights, ids, w13, w2):
        hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids]))
        with torch.no_grad():
            hidden = hidden.mT
        return torch.einsum("tki,tkhi,tk->th", hidden.mT, w2[ids], weights)

    run = check(of_best(stopped), float32(7))
    assert not run.raised


def test_what_is_turned_twice_stays_so():
    """Where nothing is raised."""

    def run(x, router, w13, w2):
        turned = torch.einsum("eih,th->iet", w13, x).softmax(0)
        return torch.einsum("iet,ehi->teh", turned[: w2.shape[2]], w2)

    result = rewrite(run, *layer(6), passes=PIPELINE)
    assert "aten.permute" in result.before and result.after == result.before


def by_number_of_tokens(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    rows = torch.einsum("th,tkih->tki", x, w13[ids])
    out = torch.einsum("tki,tkhi->tkh", swiglu(rows), w2[ids]) * x.shape[0]
    return (out * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def test_a_number_of_tokens_is_no_weight():
    """Where it is a symbol."""
    result = rewrite(by_number_of_tokens, *layer(7, dynamic=True), passes=PIPELINE)
    assert not result.log.raised and any("is no weight for each slot" in each for each in result.reasons)


def looped_top_1(x, router, w13, w2):
    """Weighed by the maximum of one weight."""
    weights, ids = F.linear(x, router).float().softmax(-1).topk(1)
    best, place = weights.max(-1)
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert])
        total = total + out * of_expert(best.unsqueeze(-1), ids, expert).to(x.dtype)
    return total, place


def test_the_maximum_of_one_weight():
    """The layer does without it, and somebody else reads where it is."""
    result = rewrite(looped_top_1, *layer(6), passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
