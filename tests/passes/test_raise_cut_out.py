"""Ids that are a part of longer rows: of a sort, or of a top-k of one more, as noisy gates find a threshold."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import RELATIVE_NORM, relative_error
from tests.passes.capture import computed
from tests.passes.spellings import looped
from tests.passes.stock import EXPERTS, TOP_K, layer, swiglu
from tests.passes.strangers import dense
from tests.passes.test_before_autograd import ALLOWED, RAISED, Run, float32, grads

PIPELINE = (*RAISES, *FUSIONS)


def sort(logits):
    scores, ids = logits.softmax(-1).sort(-1, descending=True)
    return scores[..., :TOP_K], ids[..., :TOP_K]


def softmax_of_the_first(logits):
    """LLaMA-MoE's."""
    best, ids = logits.topk(TOP_K + 1, dim=1)
    return best[:, :TOP_K].softmax(-1), ids[:, :TOP_K]


def shares_of_the_first(logits):
    """Shazeer's sparsely gated layer."""
    best, ids = logits.softmax(-1).topk(TOP_K + 1, dim=1)
    best = best[:, :TOP_K]
    return best / (best.sum(1, keepdim=True) + 1e-6), ids[:, :TOP_K]


ROUTERS = {each.__name__: each for each in (sort, softmax_of_the_first, shares_of_the_first)}


def scattered(x, weights, ids, w13, w2):
    return dense(x, torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, ids, weights), w13, w2)


def of(router, combine):
    def run(x, weight, w13, w2):
        weights, ids = router(F.linear(x, weight))
        return combine(x, weights, ids, w13, w2)

    return run


LAYERS = {"a loop": looped(swiglu), "einsums": scattered}


def error(function, inputs, out):
    return relative_error(out, function(*(each.double() for each in inputs)))


@pytest.mark.parametrize("combine", LAYERS)
@pytest.mark.parametrize("router", ROUTERS)
def test_it_is_raised_whole(router, combine):
    inputs = layer(7, torch.float32, dynamic=True)
    function = of(ROUTERS[router], LAYERS[combine])
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert error(function, inputs, out) <= RELATIVE_NORM[torch.float32]


@pytest.mark.parametrize(("router", "combine"), [("sort", "a loop"), ("softmax_of_the_first", "einsums")])
def test_gradients(router, combine):
    inputs, run = float32(), Run()
    function = of(ROUTERS[router], LAYERS[combine])
    right = grads(function, [each.double() for each in inputs])
    for ours, expected in zip(grads(run.compile(function), inputs, dynamic=True), right, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == RAISED and not run.refused


def by_choice(x, weights, ids, w13, w2):
    """Each choice is cut out of the ids: they are none by itself."""
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert])
        for k in range(TOP_K):
            total = total + out * weights[:, k : k + 1] * (ids[:, k : k + 1] == expert)
    return total


def test_choices_that_are_cut_apart_are_those_of_one_router():
    inputs = layer(7, torch.float32)
    function = of(lambda logits: logits.softmax(-1).topk(TOP_K), by_choice)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert error(function, inputs, out) <= RELATIVE_NORM[torch.float32]


def of_a_threshold(logits):
    """Somebody reads the one after the last."""
    best, ids = logits.softmax(-1).topk(TOP_K + 1)
    return best[:, :TOP_K] - best[:, TOP_K:], ids[:, :TOP_K] * (ids[:, TOP_K:] >= 0)


def without_the_best(logits):
    best, ids = logits.softmax(-1).topk(TOP_K + 1)
    return best[:, 1:], ids[:, 1:]


def the_lowest(logits):
    scores, ids = logits.softmax(-1).sort(-1)
    return scores[..., :TOP_K], ids[..., :TOP_K]


def every_other(logits):
    scores, ids = logits.softmax(-1).sort(-1, descending=True)
    return scores[..., ::2], ids[..., ::2]


@pytest.mark.parametrize("router", [of_a_threshold, without_the_best, the_lowest, every_other])
def test_other_parts_are_no_router_of_ours(router):
    inputs = layer(7, torch.float32)
    function = of(router, looped(swiglu))
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert "topk_routing" not in [each.kind for each in result.log.raised] and result.reasons
    assert error(function, inputs, out) <= RELATIVE_NORM[torch.float32]
