"""Capacities that follow from how many tokens there are, where that is open: tokens that experts keep, or choose."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import RELATIVE_NORM, relative_error
from tests.passes.capture import computed, rewrite
from tests.passes.stock import EXPERTS, TOP_K, einsums, layer, softmax_router
from tests.passes.strangers import dense, looped

PIPELINE = (*RAISES, *FUSIONS)
TOKENS = 33


def kept(weights):
    """Megatron's, dropped by probability: an expert keeps those tokens that choose it most."""
    capacity = weights.shape[0] * TOP_K // (2 * EXPERTS)
    best = weights.topk(capacity, dim=0).indices
    return weights * torch.zeros_like(weights).scatter(0, best, 1.0)


def of_all(x, router):
    weights, ids = softmax_router(F.linear(x, router))
    return kept(weights.new_zeros(x.shape[0], EXPERTS).scatter(1, ids, weights))


def dropped_at_once(x, router, w13, w2):
    return dense(x, of_all(x, router), w13, w2)


def dropped_in_a_loop(x, router, w13, w2):
    return looped(x, of_all(x, router), w13, w2)


def dropped_of_the_chosen(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    chosen = kept(weights.new_zeros(x.shape[0], EXPERTS).scatter(1, ids, weights)).gather(1, ids)
    hidden = torch.einsum("th,tkih->tki", x, w13[ids]).chunk(2, dim=-1)
    return torch.einsum("tki,tkhi,tk->th", F.silu(hidden[0]) * hidden[1], w2[ids], chosen.to(x.dtype))


def choosing(experts):
    """Experts that choose their tokens, each of which goes through all of them, weighed by zero mostly."""

    def run(x, router, w13, w2):
        scores = F.linear(x, router).softmax(-1)
        best, tokens = scores.topk(x.shape[0] * TOP_K // EXPERTS, dim=0)
        return experts(x, torch.zeros_like(scores).scatter(0, tokens, best), w13, w2)

    return run


def of(function, dynamic):
    """What passes did, and how far what is computed is from float64. No two tokens have the same scores."""
    args = layer(TOKENS, torch.float32, dynamic)
    args.router_weight.copy_(
        torch.randn(args.router_weight.shape, generator=torch.Generator().manual_seed(0))
    )
    result, out = computed(function, *args, passes=PIPELINE)
    return result, relative_error(out, function(*(each.double() for each in args)))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [dropped_at_once, dropped_in_a_loop, dropped_of_the_chosen])
def test_tokens_that_an_expert_does_not_keep(function, dynamic):
    result, error = of(function, dynamic)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert error <= RELATIVE_NORM[torch.float32]


@pytest.mark.parametrize("experts", [dense, looped])
def test_experts_that_choose_an_open_number_of_tokens_stay(experts):
    result, error = of(choosing(experts), dynamic=True)
    assert not result.log.raised and error <= RELATIVE_NORM[torch.float32]
    assert any("cannot be tried out for other numbers of tokens" in each for each in result.reasons)


def test_no_tokens_at_all_are_said():
    result = rewrite(einsums, *layer(0), passes=PIPELINE)
    assert not result.log.raised and "there are no rows" in result.reasons[0]
