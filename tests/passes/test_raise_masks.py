"""Layers that place tokens by masks [T, E, C] with a capacity: what they drop gives zero."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from inductor_passes.raising import place_trials, seen_rows
from tests.helpers import RELATIVE_NORM, mixed, relative_error, usually
from tests.passes.capture import computed, rewrite
from tests.passes.masks import (
    STYLES,
    best_of_others,
    capacity_of,
    drawn_of_others,
    experts,
    placed_in_turn,
    through,
    top1_of,
    top2,
)
from tests.passes.stock import EXPERTS, HIDDEN, layer, swiglu
from tests.passes.test_before_autograd import check

PIPELINE = (*RAISES, *FUSIONS)
TOKENS = 44


def crowded(dtype, dynamic=False):
    """Of the tokens 20 want the same experts; no two choose one by the same weight."""
    args = layer(TOKENS, dtype, dynamic)
    logits = args.hidden_states[:, :EXPERTS]
    logits[:20] = logits[0].clone()
    logits.mul_(1 + torch.arange(TOKENS).unsqueeze(1) / 4)
    return args


def kinds(result):
    return [each.kind for each in result.log.raised]


@pytest.mark.parametrize(("name", "dtype"), mixed(STYLES, [torch.float32, torch.bfloat16]))
def test_a_style(name, dtype):
    args = crowded(dtype)
    result, out = computed(STYLES[name], *args, passes=PIPELINE)
    wanted = STYLES[name](*(each.double() for each in args))
    assert kinds(result)[:1] == ["experts"], result.reasons
    assert relative_error(out, wanted) <= RELATIVE_NORM[dtype]
    dropped = wanted.eq(0).all(1)
    assert dropped.any() and not out[dropped].any()


def test_a_router_is_raised_whose_own_weights_are_placed():
    result = rewrite(STYLES["first_choices_first"], *crowded(torch.float32), passes=PIPELINE)
    assert kinds(result) == ["experts", "topk_routing"]


CLOSED = ("with_matrices", "gate_and_up_apart")
OPEN = [name for name in STYLES if name not in CLOSED]


@pytest.mark.parametrize(
    "name", usually(OPEN, ["by_group", "top2", "switch", "best_tokens_first", "ungated"])
)
def test_an_open_number_of_tokens(name):
    args = crowded(torch.float32, dynamic=True)
    result, out = computed(STYLES[name], *args, passes=PIPELINE)
    assert kinds(result)[:1] == ["experts"], result.reasons
    assert (
        relative_error(out, STYLES[name](*(each.double() for each in args))) <= RELATIVE_NORM[torch.float32]
    )


def one_choice(mask_of, weights_of=None, run=experts):
    """A top-1 layer of gates, ids one-hot [T, E], places [T, E] and a capacity, with masks of one's own."""

    def layer(x, router, w13, w2):
        gates, chosen, place = top1_of(x, router)
        of = gates, chosen, place, capacity_of(len(x), 1)
        return through(x, mask_of(*of), (weights_of or weighed)(*of), w13, w2, run)

    return layer


def kept(gates, chosen, place, capacity):
    where = F.one_hot(place.clamp(max=capacity - 1), capacity)
    return (chosen * (place < capacity)).unsqueeze(-1) * where


def weighed(gates, *others):
    return kept(gates, *others) * gates.unsqueeze(-1)


def crammed(gates, chosen, place, capacity):
    """Who is too late is in the last place as well."""
    return chosen.unsqueeze(-1) * F.one_hot(place.clamp(max=capacity - 1), capacity)


def crammed_among_many(gates, chosen, place, capacity):
    return crammed(gates, chosen, place, TOKENS - 9) * gates.unsqueeze(-1)


def as_it_is_but_for_gradients(gates, *others):
    return kept(gates, *others) * (gates / gates.detach()).unsqueeze(-1)


def of_its_place_everywhere(gates, chosen, place, capacity):
    """Weights of every expert, for whoever has the place there."""
    return kept(gates, chosen, place, capacity).sum(1, keepdim=True) * gates.unsqueeze(-1)


def of_nobody(gates, *others):
    return weighed(gates, *others) * 0.0


def by_two(mask_of):
    """By the expert that was chosen and by the next one, which has as many places more for that."""
    return lambda *of: torch.cat([mask_of(*of), mask_of(*of).roll(1, 1)], 2)


def gate_and_up_of_different_rows(x, router, w13, w2):
    of = (*top1_of(x, router), capacity_of(len(x), 1))
    mask, other = kept(*of).to(x.dtype), kept(*of).roll(1, 0).to(x.dtype)
    rows = [torch.einsum("sec,sm->ecm", each, x) for each in (mask, other)]
    gate, up = (torch.bmm(each, part.mT) for each, part in zip(rows, w13.chunk(2, dim=1), strict=True))
    return torch.einsum("sec,ecm->sm", weighed(*of).to(x.dtype), torch.bmm(F.silu(gate) * up, w2.mT))


def with_places_for_experts(x, router, w13, w2):
    """There are as many."""
    of = (*top1_of(x, router), EXPERTS)
    out = experts(torch.einsum("sec,sm->ecm", kept(*of).to(x.dtype), x), w13, w2)
    return torch.einsum("sec,cem->sm", weighed(*of).to(x.dtype), out)


def of_its_neighbours(rows, w13, w2):
    hidden = swiglu(torch.bmm(rows, w13.mT))
    return torch.bmm(hidden.softmax(1), w2.mT)


def turned_over(rows, w13, w2):
    return torch.bmm(swiglu(torch.bmm(rows, w13.mT)).flip(0), w2.mT)


def of_experts_that_choose(x, router, w13, w2):
    """[E, C, T]: which tokens an expert has chosen."""
    shares, tokens = F.linear(x, router).float().softmax(-1).T.topk(capacity_of(len(x), 1), dim=-1)
    mask = F.one_hot(tokens, len(x)).permute(2, 0, 1)
    return through(x, mask, mask * shares, w13, w2)


def across_batches(x, router, w13, w2):
    """Two batches whose sums are those of each other."""
    rows = x.view(2, -1, HIDDEN)
    gates = F.linear(rows, router).float().softmax(-1)
    weights = placed_in_turn(gates, best_of_others, capacity_of(rows.shape[1], 2))
    placed = torch.einsum("gsec,gsm->egcm", weights.bool().to(x.dtype), rows)
    out = experts(placed.flatten(1, 2), w13, w2).view(placed.shape).flip(1)
    return torch.einsum("gsec,egcm->gsm", weights.to(x.dtype), out).view(x.shape)


def swapped(x, router, w13, w2):
    """The same without an operator that moves rows: the batches of a mask are read in another order."""
    rows = x.view(2, 2, -1, HIDDEN)
    gates = F.linear(rows, router).float().softmax(-1)
    weights = placed_in_turn(gates, best_of_others, capacity_of(rows.shape[2], 2)).to(x.dtype)
    placed = torch.einsum("absec,absm->eabcm", weights.ne(0).to(x.dtype), rows)
    out = experts(placed.flatten(1, 3), w13, w2).view(placed.shape)
    return torch.einsum("absec,ebacm->absm", weights, out).reshape(x.shape)


WRONG = {
    "weighed where they are placed": (one_choice(weighed, kept), "are weighed where they are placed"),
    "a gradient of the mask": (one_choice(as_it_is_but_for_gradients), "are weighed where they are placed"),
    "placed twice as much": (one_choice(lambda *of: 2 * kept(*of)), "is not there once, as it is"),
    "two tokens in a place": (one_choice(crammed), "a place may hold several tokens"),
    "two tokens in a place, of many": (
        one_choice(lambda *of: crammed(*of[:3], TOKENS - 9), crammed_among_many),
        "a place may hold several tokens",
    ),
    "places counted anew": (top2(after_first=False), "a place may hold several tokens"),
    "a weight without a place": (
        one_choice(kept, lambda gates, *of: crammed(gates, *of) * gates.unsqueeze(-1)),
        "is not there once, as it is",
    ),
    "weights of all": (one_choice(kept, of_its_place_everywhere), "is not there once, as it is"),
    "no weights": (one_choice(kept, of_nobody), "experts that they did not choose"),
    "two experts": (one_choice(by_two(kept), by_two(weighed)), "experts that they did not choose"),
    "gate and up of different rows": (gate_and_up_of_different_rows, "is not what is placed"),
    "rows that meet": (one_choice(kept, None, of_its_neighbours), "the gate"),
    "rows of other experts": (one_choice(kept, None, turned_over), "multiplied with all experts at once"),
    "places for experts": (with_places_for_experts, "is not there once, as it is"),
    "experts that choose": (of_experts_that_choose, "cannot be tried out"),
    "batches turned over": (across_batches, "what experts give is not added up by token"),
    "batches that are swapped": (swapped, "at places of another"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_places_otherwise_stays(name):
    function, reason = WRONG[name]
    args = crowded(torch.float32)
    result, out = computed(function, *args, passes=PIPELINE)
    assert not result.ops() and any(reason in each for each in result.reasons), result.reasons
    assert relative_error(out, function(*(each.double() for each in args))) <= RELATIVE_NORM[torch.float32]


def test_a_second_choice_that_is_drawn():
    """Any may be: masks are right for every choice, and for every draw."""
    assert kinds(rewrite(top2(drawn_of_others), *crowded(torch.float32), passes=PIPELINE)) == ["experts"]


def test_what_is_dropped_is_zero_whatever_experts_make_of_it():
    """Its logits are those of tokens that crowd; the rest is too large for experts."""
    args = crowded(torch.float32)
    dropped = STYLES["top1"](*args).eq(0).all(1)
    args.hidden_states[dropped, EXPERTS:] = 1e30
    _, out = computed(STYLES["top1"], *args, passes=PIPELINE)
    assert dropped.any() and not out[dropped].any() and out.isfinite().all()


def test_a_choice_that_is_made_twice_counts_once():
    """Where all other logits are -inf, the second choice is the first one again."""
    args = crowded(torch.float32)
    args.hidden_states[3, :EXPERTS] = torch.tensor([0.0, *[-torch.inf] * (EXPERTS - 1)])
    args.router_weight.copy_(torch.eye(EXPERTS, HIDDEN))

    def function(logits, x, w13, w2):
        gates = logits.softmax(-1)
        weights = placed_in_turn(gates, best_of_others, 16)
        return through(x, weights.bool(), weights, w13, w2)

    logits = args.hidden_states[:, :EXPERTS].clone()
    args.hidden_states[3, :EXPERTS] = 0.0
    inputs = (logits, args.hidden_states, args.w13, args.w2)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert kinds(result) == ["experts"]
    assert relative_error(out, function(*(each.double() for each in inputs))) <= RELATIVE_NORM[torch.float32]


def test_a_layer_that_is_found_and_not_written_is_as_it_was():
    """Somebody else reads a product, so that it would be computed twice."""

    def function(*args):
        read = []

        def run(rows, w13, w2):
            read.append(torch.bmm(rows, w13.mT))
            return torch.bmm(swiglu(read[0]), w2.mT)

        return one_choice(kept, None, run)(*args), read[0].sum()

    result = rewrite(function, *crowded(torch.float32), passes=PIPELINE)
    assert any("is also read by" in each for each in result.reasons), result.reasons
    assert result.after == result.before


def test_alike_layers_are_tried_once(monkeypatch):
    tried = []
    samples = place_trials.samples
    monkeypatch.setattr(place_trials, "samples", lambda *args: tried.append(args) or samples(*args))

    def layers(x, *weights):
        for _ in range(3):
            x = STYLES["top2"](x, *weights) + x
        return STYLES["top1"](x, *weights)

    result = rewrite(layers, *crowded(torch.float32), passes=PIPELINE)
    assert kinds(result) == ["experts"] * 4 and len(tried) == 2

    tried.clear()
    known = []  # of layers in turn ids may come twice, or not
    monkeypatch.setattr(
        place_trials, "may_repeat", lambda node: known.append(node) or _place(known, node) // 2 % 2
    )
    rewrite(layers, *crowded(torch.float32), passes=PIPELINE)
    assert len(tried) == 3


def _place(known, node):
    """Among those that differ."""
    return list(dict.fromkeys(known)).index(node)


def test_a_capacity_shows_that_is_a_multiple_of_the_open_number_of_tokens():
    """It takes one token more."""
    capacity = 2 * TOKENS
    function = one_choice(
        lambda *of: crammed(*of[:3], capacity),
        lambda gates, *of: crammed(gates, *of[:2], capacity) * gates.unsqueeze(-1),
    )
    result = rewrite(function, *crowded(torch.float32, dynamic=True), passes=PIPELINE)
    assert not result.ops() and any("a place may hold several tokens" in each for each in result.reasons)


def test_more_numbers_than_are_tried():
    result = rewrite(STYLES["top1"], *layer(12000, torch.float32), passes=PIPELINE)
    assert not result.ops() and any("too many to be tried out" in each for each in result.reasons)


def test_tokens_of_more_numbers_than_are_followed(monkeypatch):
    """What has a place is fewer."""
    monkeypatch.setattr(seen_rows, "_MOST_NUMBERS", EXPERTS * capacity_of(TOKENS, 1) * HIDDEN)
    result = rewrite(STYLES["top1"], *crowded(torch.float32), passes=PIPELINE)
    assert not result.ops() and any(
        "no rows that are seen to be those of tokens" in each for each in result.reasons
    )


@pytest.mark.parametrize("name", usually(list(STYLES), ["top2", "by_group", "ungated"]))
def test_gradients(name):
    """Before autograd; tokens that are dropped have none."""
    run = check(STYLES[name], crowded(torch.float32))
    assert run.raised[:1] == ["experts"] and run.graphs[0][-1].endswith("combine")


def test_gradients_of_weights_that_are_zero():
    """A scale that starts at zero learns from tokens that have a place, whatever they weigh there."""

    def function(x, router, w13, w2, scale):
        of = (*top1_of(x, router), capacity_of(len(x), 1))
        return through(x, kept(*of), weighed(*of) * scale, w13, w2) + x + router.sum() + w13.sum() + w2.sum()

    run = check(function, (*crowded(torch.float32), torch.zeros(())))
    assert run.raised == ["experts"]


def test_a_mask_with_a_gradient_stays():
    function, reason = WRONG["a gradient of the mask"]
    run = check(function, crowded(torch.float32))
    assert not run.raised and any(reason in each for each in run.refused)
