"""RaiseExperts on weights [T, E] that are zero where nobody chose, and are those of no tensor [T, K]."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but
from tests.passes.capture import computed, rewrite
from tests.passes.stock import EXPERTS, TOP_K, layer
from tests.passes.strangers import dense, looped
from tests.passes.test_raise_forms_in_training import trained

PIPELINE = (*RAISES, *FUSIONS)
SIZES = ((7, torch.float32, False), (1, torch.bfloat16, False), (9, torch.bfloat16, False))
OPEN = (9, torch.bfloat16, True)


def weighed(weigh, combine=dense):
    """A layer of `weigh(logits, ids)`, whose ids are those of the largest logits."""

    def run(x, router, w13, w2):
        logits = F.linear(x, router)
        return combine(x, weigh(logits, logits.topk(TOP_K).indices), w13, w2)

    return run


def mask_of(logits, ids):
    return torch.zeros_like(logits).scatter(1, ids, 1.0)


def softmax_of_masked(logits, ids):
    others = torch.ones_like(logits, dtype=torch.bool).scatter(1, ids, False)
    return logits.masked_fill(others, float("-inf")).softmax(-1)


def probs_of_masked(logits, ids):
    return logits.softmax(-1) * mask_of(logits, ids)


def shares(logits, ids):
    weights = probs_of_masked(logits, ids)
    return weights / weights.sum(-1, keepdim=True)


def scattered_shares(logits, ids):
    """V-MoE's: weights are scattered, then made a sum of one."""
    weights = torch.zeros_like(logits).scatter(1, ids, logits.softmax(-1).gather(1, ids))
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)


def of_one_hot(logits, ids):
    chosen = F.one_hot(ids, EXPERTS).sum(1).to(logits.dtype)
    return torch.where(chosen > 0, logits.sigmoid(), 0.0)


FORMS = {
    "softmax of masked logits": weighed(softmax_of_masked),
    "masked": weighed(probs_of_masked),
    "masked, shares": weighed(shares),
    "scattered, shares": weighed(scattered_shares),
    "sigmoids where chosen": weighed(of_one_hot),
    "in a loop": weighed(shares, looped),
}


@pytest.mark.parametrize(("what", "sizes"), mixed_but(OPEN, FORMS, SIZES), ids=str)
def test_every_form_is_raised(what, sizes):
    inputs = layer(*sizes)
    result, out = computed(FORMS[what], *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, FORMS[what](*(each.double() for each in inputs)))


@pytest.mark.parametrize("what", ["softmax of masked logits", "masked, shares", "in a loop"])
def test_gradients(what):
    assert not trained(FORMS[what]).refused


def softmax_of_lowered(logits, ids):
    """Others weigh little."""
    return (logits - 3 + 3 * mask_of(logits, ids)).softmax(-1)


def of_others(logits, ids):
    return logits.softmax(-1) * (1 - mask_of(logits, ids))


def of_the_sum(logits, ids):
    """Of a mask that has one expert more."""
    return logits.softmax(-1) * mask_of(logits, ids) + mask_of(logits, logits.argmin(-1, keepdim=True))


def of_waves(logits, ids):
    return mask_of(logits, ids) * logits.cos()


def softmax_of_lowered_far(logits, ids):
    """By a number that large logits are beyond."""
    return (logits - 1000 + 1000 * mask_of(logits, ids)).softmax(-1)


def of_roots(logits, ids):
    """Of all experts; NaN for a token with any logit that is not large."""
    return (logits - 5).sqrt() * (1 + mask_of(logits, ids))


OTHER = (softmax_of_lowered, softmax_of_lowered_far, of_roots, of_others, of_the_sum)


@pytest.mark.parametrize("weigh", OTHER)
def test_what_weighs_others_too_stays(weigh):
    result = rewrite(weighed(weigh), *layer(7, torch.float32), passes=PIPELINE)
    assert not result.log.raised and result.reasons


def test_weights_of_no_router():
    """The experts are raised alone."""
    function, inputs = weighed(of_waves), layer(7, torch.float32)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts"]
    torch.testing.assert_close(out, function(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weigh", [softmax_of_masked, probs_of_masked])
def test_noise(weigh):
    """Noisy top-k: experts are raised, whatever their logits are."""

    def run(x, router, w13, w2):
        logits = F.linear(x, router)
        logits = logits + torch.randn_like(logits) * F.softplus(logits)
        return dense(x, weigh(logits, logits.topk(TOP_K).indices), w13, w2)

    raised = rewrite(run, *layer(7, torch.float32), passes=PIPELINE).log.raised
    assert [each.kind for each in raised] == ["experts", "topk_routing"]


def test_ids_that_a_token_has_twice_stay():
    """Their weight would count twice."""

    def run(x, router, w13, w2):
        logits = F.linear(x, router)
        ids = torch.cat([logits[:, :3].argmax(-1, True), logits.argmax(-1, True)], 1)
        return dense(x, probs_of_masked(logits, ids), w13, w2)

    inputs = layer(7, torch.float32)
    result, out = computed(run, *inputs, passes=PIPELINE)
    assert not result.ops()
    torch.testing.assert_close(out, run(*inputs), rtol=1e-4, atol=1e-5)
