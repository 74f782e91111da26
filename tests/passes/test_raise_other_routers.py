"""RaiseRouters: what only looks like a router of ours, or cannot be tried out, stays as it was written."""

import re

import pytest
import torch
from torch.nn import functional as F

import moe_ops
from inductor_passes.pipeline import RAISES
from tests.passes.capture import computed, rewrite
from tests.passes.stock import TOP_K
from tests.passes.test_raise_routers import EXPERTS, args_of, deepseek_v3, logits, routed, softmax, top


def hotter(x):
    return top((x / 1.5).softmax(-1))


def squared(x):
    weights, ids = softmax(x)
    return weights.square(), ids


def softmax_of_others(x):
    ids = x.topk(TOP_K).indices
    return x.flip(-1).softmax(-1).gather(1, ids), ids


def lowest(x):
    return x.softmax(-1).topk(TOP_K, largest=False)


def rooted(x):
    scores, ids = x.softmax(-1).topk(TOP_K)
    return scores.sqrt(), ids


def not_by_the_sum(x):
    weights, ids = softmax(x)
    return weights / weights.amax(-1, keepdim=True), ids


def of_the_token_before(x):
    weights, ids = softmax(x)
    return weights.roll(1, 0), ids


def almost_scaled(x):
    weights, ids = softmax(x)
    return weights * torch.linspace(1, 1.0001, TOP_K), ids


def other_experts_at_the_edge(x):
    """Right for logits below 6, and only there."""
    return top(x.clamp(max=6.0).softmax(-1))


def reversed_and_scaled(x):
    """Scaled column by column: its columns are not ours, which begin with the best."""
    scores = x.softmax(-1)
    ids = scores.topk(TOP_K).indices.flip(-1)
    return scores.gather(1, ids) * torch.arange(1, TOP_K + 1), ids


def limited_above(x):
    """Right for logits below 30, and only there."""
    return softmax(x.clamp(max=30.0))


def limited_below(x):
    return softmax(x.clamp(min=-90.0))


def bent_far_out(x):
    return softmax(torch.where(x > 100.0, 100.0 + (x - 100.0) / 10, x))


def without_nan(x):
    return softmax(torch.nan_to_num(x))


def even_without_a_logit(x):
    return top(torch.where(x.isnan().all(-1, keepdim=True), 1 / EXPERTS, x.softmax(-1)))


def without_infinite_scores(x):
    scores = x.sigmoid()
    return top(torch.where(x.isinf(), 0.5, scores))


def squashed(x):
    """Of scores between zero and one, not of what they were."""
    return top(x.sigmoid().square())


def weighed_by_limited_above(x):
    """Chosen by the logits as they are: right below 30, and only there."""
    ids = x.topk(TOP_K).indices
    return x.clamp(max=30.0).softmax(-1).gather(1, ids), ids


def weighed_by_limited_below(x):
    ids = x.topk(TOP_K).indices
    return x.clamp(min=-90.0).softmax(-1).gather(1, ids), ids


OTHERS = (
    weighed_by_limited_above,
    weighed_by_limited_below,
    even_without_a_logit,
    without_infinite_scores,
    softmax_of_others,
    lowest,
    reversed_and_scaled,
    squashed,
)
BEHIND = {
    without_nan: ("aten.where.self",),
    limited_above: ("aten.clamp_max.default",),
    limited_below: ("aten.clamp_min.default",),
    bent_far_out: ("aten.where.self",),
    hotter: ("aten.div.Tensor", "aten.where.self"),  # from torch 2.13 on Inductor rewrites it
    other_experts_at_the_edge: ("aten.clamp_max.default",),
}
"""Routers of numbers that were logits before something was done to them, and what was done last."""
SCALED_FURTHER = (squared, rooted, not_by_the_sum, of_the_token_before, almost_scaled)


@pytest.mark.parametrize("router", OTHERS, ids=lambda router: router.__name__)
def test_what_is_no_config_stays(router):
    result = routed(router, logits())
    assert not result.log.raised and result.after == result.before
    (reason,) = result.reasons
    assert reason == "the router is no RoutingConfig: none gives its weights for the logits tried"


@pytest.mark.parametrize(
    "router, far",
    [*((router, far) for router in BEHIND for far in (40.0, -110.0, 7.0)), (without_nan, torch.nan)],
)
def test_a_router_behind_what_is_done_to_logits(router, far):
    """One logit of each token is beyond limits: two would be a tie."""
    x = logits().clamp(-5.0, 5.0)
    x[:, 3] = far

    def layer(x):
        weights, ids = router(x)
        eye = torch.eye(EXPERTS).expand(EXPERTS, -1, -1)
        hidden = torch.ones(weights.shape[0], EXPERTS)
        return moe_ops.fused_experts(hidden, eye, eye, weights, ids, activation="relu2_no_mul"), weights, ids

    result, (_, weights, ids) = computed(layer, x, passes=RAISES)
    (raised,) = [node for node in result.graph.nodes if str(node.target) == "moe.topk_routing.default"]
    assert str(raised.args[0].target) in BEHIND[router]
    wanted, wanted_ids = router(x)
    torch.testing.assert_close(weights, wanted)
    assert torch.equal(ids, wanted_ids)


@pytest.mark.parametrize("dynamic", [(), (0,), (0, 1)], ids=str)
@pytest.mark.parametrize(
    "capacity", [lambda slots: slots // 5, lambda slots: 37], ids=["of tokens", "of rows"]
)
def test_a_capacity_stays_though_random_logits_do_not_reach_it(capacity, dynamic):
    """Weights of tokens that come too late are zero: what follows the router stays, and is no part of it."""

    def router(x):
        weights, ids = softmax(x.view(-1, EXPERTS))
        of_expert = F.one_hot(ids.reshape(-1), EXPERTS)
        place = ((of_expert.cumsum(0) - 1) * of_expert).sum(-1).view(ids.shape)
        return torch.where(place < capacity(ids.numel()), weights, 0.0), ids

    x = torch.randn(8, 5, EXPERTS, generator=torch.Generator().manual_seed(0))
    for dim in dynamic:
        torch._dynamo.mark_dynamic(x, dim)
    result = routed(router, x)
    combine = next(node for node in result.graph.nodes if str(node.target) == "moe.combine.default")
    assert [each.kind for each in result.log.raised] == ["topk_routing"]
    assert combine.args[1].target is torch.ops.aten.where.self


@pytest.mark.parametrize("router", SCALED_FURTHER, ids=lambda router: router.__name__)
def test_what_is_made_of_weights_is_made_of_ours(router):
    """The inner router is one of ours; what a model makes of its weights stays as it is."""
    result = routed(router, logits())
    assert [each.kind for each in result.log.raised] == ["topk_routing"]
    assert "topk.default" not in result.after and "'top_k=3;renormalize=False'" in result.after
    experts = next(node for node in result.graph.nodes if str(node.target) == "moe.combine.default")
    assert str(experts.args[1].target).startswith("aten.")


def test_weights_that_others_read_have_the_dtype_they_had():
    def router(x):
        weights, ids = top(x.softmax(-1))
        return weights.bfloat16(), ids, ids.float().mean()

    def layer(x):
        weights, ids, mean = router(x)
        eye = torch.eye(EXPERTS).expand(EXPERTS, -1, -1)
        hidden = torch.ones(weights.shape[0], EXPERTS)
        return moe_ops.fused_experts(hidden, eye, eye, weights, ids, activation="relu2"), mean, ids

    result = rewrite(layer, logits(), passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["topk_routing"]
    *_, ids = next(node for node in result.graph.nodes if node.op == "output").args[0]
    assert ids.meta["val"].dtype == torch.int64


def test_two_logits_are_no_router():
    def router(x, y):
        weights, ids = top(x.softmax(-1) + y.softmax(-1))
        return weights, ids

    result = routed(router, logits(), logits(dynamic=False) + 1)
    (reason,) = result.reasons
    assert "the router is no RoutingConfig" in reason


def test_scores_of_two_logits_are_no_router():
    def router(x, y):
        weights, ids = top(x.softmax(-1))
        return weights * y.softmax(-1).gather(1, ids), ids.flip(1)

    (reason,) = routed(router, logits(), logits(dynamic=False) + 1).reasons
    assert "not logits and a bias" in reason


def test_a_branch_is_no_logits():
    def router(x, flag):
        more = torch.cond(flag > 0, lambda x: x + 1, lambda x: x - 1, (x[0, :TOP_K],))
        weights, ids = top(x.softmax(-1))
        return weights + more, ids.flip(1)

    (reason,) = routed(router, logits(), torch.ones(())).reasons
    assert "the router reads" in reason and "cond" in reason and "not logits and a bias" in reason


def test_logits_and_what_a_branch_adds():
    def router(x, flag):
        more = torch.cond(flag > 0, lambda x: x + 1, lambda x: x - 1, (x[0],))
        return top((x + more).softmax(-1))

    assert routed(router, logits(), torch.ones(())).log.raised


def test_logits_out_of_a_branch():
    def router(x, flag):
        return softmax(torch.cond(flag > 0, lambda x: x + 1, lambda x: x - 1, (x,)))

    assert routed(router, logits(), torch.ones(())).log.raised


def test_logits_of_a_padded_product():
    """On a GPU Inductor pads products of sizes that are no multiples of 8."""

    def router(x):
        return softmax((x @ torch.ones(EXPERTS, EXPERTS + 3).cumsum(1).cos())[:, :EXPERTS])

    result = routed(router, logits())
    assert [each.kind for each in result.log.raised] == ["topk_routing"]
    assert "topk.default" not in result.after


@pytest.mark.parametrize("fallback", [False, True])
def test_logits_with_noise(fallback):
    def router(x):
        return softmax(x + torch.rand_like(x) / 100)

    with torch._inductor.config.patch(fallback_random=fallback):
        result = routed(router, logits())
    (raised,) = [node for node in result.graph.nodes if str(node.target) == "moe.topk_routing.default"]
    assert str(raised.args[0].target) == "aten.add.Tensor" and not result.reasons


@pytest.mark.parametrize("fallback", [False, True])
def test_weights_with_noise_are_no_router(fallback):
    def router(x):
        weights, ids = softmax(x)
        return weights * torch.rand_like(weights), ids.flip(1)

    with torch._inductor.config.patch(fallback_random=fallback):
        (reason,) = routed(router, logits()).reasons
    assert re.search(r"the router reads .*(rand|seed).*, not logits and a bias", reason)


def test_halves_of_numbers_cannot_be_tried_out():
    """Where a float32 has two halves, a float64 has four."""

    def router(x):
        return top(x.view(torch.int16)[:, 1::2].float().softmax(-1))

    (reason,) = routed(router, logits()).reasons
    assert "the router cannot be tried out" in reason


def test_no_tokens():
    (reason,) = routed(softmax, logits(0)).reasons
    assert reason == "expert ids of shape [0, 3] cannot be tried out"


def test_ids_from_outside_are_not_mentioned():
    def router(x, ids):
        return x[:, :TOP_K].softmax(-1), ids

    result = routed(router, logits(), torch.zeros(7, TOP_K, dtype=torch.long))
    assert not result.reasons and not result.log.raised


def test_random_logits_leave_the_generator_alone():
    before = torch.random.get_rng_state()
    assert routed(deepseek_v3, *args_of(deepseek_v3)).log.raised
    assert torch.equal(before, torch.random.get_rng_state())
