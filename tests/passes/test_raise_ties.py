"""Scores that tie: a raised router chooses the lowest experts, and nobody goes on with what another top-k chose."""

import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import RELATIVE_NORM, relative_error
from tests.passes.buffers import STYLES, experts
from tests.passes.capture import computed
from tests.passes.stock import EXPERTS, HIDDEN, TOP_K, batched_experts, layer, swiglu
from tests.passes.test_before_autograd import ALLOWED, Run, grads
from tests.passes.test_raise_masks import kinds

PIPELINE = (*RAISES, *FUSIONS)
TOKENS = 9


def tied():
    """A layer whose scores are all the same."""
    inputs = layer(TOKENS, torch.float32)
    return inputs._replace(router_weight=torch.zeros_like(inputs.router_weight))


def placed_by_a_sort(x, router, w13, w2):
    """MegaBlocks' bins: the slots of each expert follow one another, as far as there are places."""
    weights, ids = F.linear(x, router).softmax(-1).topk(TOP_K)
    ranked, order = ids.flatten().int().sort(stable=True)
    ends = torch.histc(ranked.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).long()
    places = torch.cat([ends.new_zeros(1), ends[:-1]])[:, None] + torch.arange(len(x))
    is_there = places < ends[:, None]
    slots = order[places.clamp(max=ids.numel() - 1)]
    rows = x[slots // TOP_K] * is_there.unsqueeze(-1)
    out = experts(rows, w13, w2) * (weights.flatten()[slots] * is_there).unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, (slots // TOP_K).flatten(), out.view(-1, HIDDEN))


def of_the_lowest(x, router, w13, w2):
    """All tokens choose the first experts, each with the same weight; no place is missing."""
    share = (x @ router.T).softmax(-1)[:, :TOP_K]
    out = [F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]) for expert in range(TOP_K)]
    return (torch.stack(out, 1) * share.unsqueeze(-1)).sum(1)


def test_buffers_hold_what_the_router_chose():
    inputs = tied()
    result, out = computed(placed_by_a_sort, *inputs, passes=PIPELINE)
    assert kinds(result) == ["experts", "topk_routing"]
    right = of_the_lowest(*(each.double() for each in inputs))
    assert relative_error(out, right) <= RELATIVE_NORM[torch.float32]


def test_gradients():
    inputs, run = tied(), Run()
    right = grads(of_the_lowest, [each.double() for each in inputs])
    for ours, expected in zip(grads(run.compile(placed_by_a_sort), inputs), right, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == ["experts", "topk_routing"]


def test_renormalised():
    inputs = tied()
    result, out = computed(STYLES["never_dropped"], *inputs, passes=PIPELINE)
    assert kinds(result) == ["experts", "topk_routing"]
    right = of_the_lowest(*(each.double() for each in inputs)) * EXPERTS / TOP_K
    assert relative_error(out, right) <= RELATIVE_NORM[torch.float32]


def ids_and_more(x, router, w13, w2):
    """Somebody also reads the choice after the last one."""
    scores, ranked = F.linear(x, router).softmax(-1).topk(TOP_K + 1)
    ids = ranked[:, :TOP_K]
    return batched_experts(x, scores[:, :TOP_K], ids, w13, w2), ranked[:, TOP_K]


def ids_cut_out(x, router, w13, w2):
    return ids_and_more(x, router, w13, w2)[0]


def test_a_choice_that_somebody_reads_before_it_became_the_ids_stays():
    inputs = layer(TOKENS, torch.float32)
    result, (out, others) = computed(ids_and_more, *inputs, passes=PIPELINE)
    assert kinds(result) == ["experts"]
    assert any("of which a router makes its ids" in each for each in result.reasons)
    right, ranked = ids_and_more(*(each.double() for each in inputs))
    assert relative_error(out, right) <= RELATIVE_NORM[torch.float32] and torch.equal(others, ranked)


def test_one_that_nobody_reads_is_raised():
    result, _ = computed(ids_cut_out, *layer(TOKENS, torch.float32), passes=PIPELINE)
    assert kinds(result) == ["experts", "topk_routing"] and not result.reasons
