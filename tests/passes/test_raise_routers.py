"""RaiseRouters: which routers are a RoutingConfig, and which only look like one."""

import pytest
import torch
from torch.nn import functional as F

import inductor_passes
import moe_ops
from inductor_passes.pipeline import RAISES
from tests.passes.capture import rewrite
from tests.passes.stock import TOP_K

EXPERTS = 16
GROUPS, KEPT = 4, 2


def _run(router, *args):
    """A layer of ours behind a router: what raising makes of it, and the ids and weights it uses."""

    def layer(*args):
        weights, ids = router(*args)
        x = torch.eye(EXPERTS).expand(EXPERTS, -1, -1)
        hidden = torch.ones(weights.shape[0], EXPERTS)
        return moe_ops.fused_experts(hidden, x, x, weights, ids, activation="silu_no_mul")

    return rewrite(layer, *args, passes=RAISES)


def logits(tokens=7, dynamic=False):
    values = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(0)) * 2
    if dynamic:
        torch._dynamo.mark_dynamic(values, 0)
    return values


def bias():
    return torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1)) / 4


def _top(scores):
    return scores.topk(TOP_K, dim=-1)


def softmax(x):
    return _top(F.softmax(x, dim=-1, dtype=torch.float))


def renormalized(x):
    weights, ids = softmax(x)
    return weights / weights.sum(-1, keepdim=True), ids


def in_bfloat16(x):
    weights, ids = _top(x.bfloat16().softmax(-1))
    return weights, ids


def chosen_then_softmax(x):
    values, ids = _top(x)
    return values.softmax(-1), ids


def scaled(x):
    weights, ids = renormalized(x)
    return weights * 2.5, ids


def averaged(x):
    weights, ids = renormalized(x)
    return weights / TOP_K, ids


def sorted_not_topk(x):
    scores, ids = x.softmax(-1).sort(-1, descending=True)
    return scores[:, :TOP_K], ids[:, :TOP_K]


def gathered(x):
    scores = x.softmax(-1)
    ids = scores.topk(TOP_K, sorted=False).indices
    return scores.gather(1, ids), ids


def clamped_sum(x):
    """Ernie: a sum of scores is never so small."""
    weights, ids = softmax(x)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12), ids


def sigmoid(x):
    return _top(x.sigmoid())


def sigmoid_renormalized(x):
    weights, ids = sigmoid(x)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


def sqrtsoftplus(x):
    return _top(F.softplus(x).sqrt())


def max_of_groups(x):
    """DeepSeek-V2."""
    scores = x.softmax(-1)
    best = scores.view(-1, GROUPS, EXPERTS // GROUPS).amax(-1).topk(KEPT, sorted=False).indices
    mask = torch.zeros(x.shape[0], GROUPS).scatter(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, -1, EXPERTS // GROUPS).reshape(-1, EXPERTS)
    return _top(scores.masked_fill(~mask.bool(), 0.0))


def deepseek_v3(x, bias):
    scores = x.sigmoid()
    choice = scores + bias
    best = choice.view(-1, GROUPS, EXPERTS // GROUPS).topk(2)[0].sum(-1).topk(KEPT, sorted=False)[1]
    mask = torch.zeros(x.shape[0], GROUPS).scatter(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, GROUPS, EXPERTS // GROUPS).reshape(-1, EXPERTS)
    ids = choice.masked_fill(~mask.bool(), float("-inf")).topk(TOP_K, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def biased_softmax(x, bias):
    scores = x.softmax(-1)
    ids = (scores + bias).topk(TOP_K).indices
    return scores.gather(1, ids), ids


def biased_logits(x, bias):
    """Kolibri: chosen by logits and bias."""
    ids = (x + bias).topk(TOP_K).indices
    return x.gather(1, ids).sigmoid(), ids


KNOWN = {
    softmax: "top_k=3;renormalize=False",
    renormalized: "top_k=3",
    in_bfloat16: "top_k=3;renormalize=False",
    chosen_then_softmax: "top_k=3",
    scaled: "top_k=3;scale=2.5",
    averaged: f"top_k=3;scale={1 / 3}",
    sorted_not_topk: "top_k=3;renormalize=False",
    gathered: "top_k=3;renormalize=False",
    clamped_sum: "top_k=3",
    sigmoid: "top_k=3;score_fn=sigmoid;renormalize=False",
    sigmoid_renormalized: "top_k=3;score_fn=sigmoid;renorm_eps=1e-20",
    sqrtsoftplus: "top_k=3;score_fn=sqrtsoftplus;renormalize=False",
    max_of_groups: "top_k=3;renormalize=False;num_groups=4;topk_groups=2",
    deepseek_v3: "top_k=3;score_fn=sigmoid;renorm_eps=1e-20;num_groups=4;topk_groups=2;group_score=top2_sum;scale=2.5",
    biased_softmax: "top_k=3;renormalize=False",
    biased_logits: "top_k=3;score_fn=sigmoid;order=topk_then_score;renormalize=False",
}


def _args(router, **options):
    return (logits(**options), bias()) if "bias" in router.__code__.co_varnames[:2] else (logits(**options),)


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("router", KNOWN, ids=lambda router: router.__name__)
def test_a_router_is_known_by_what_it_computes(router, tokens):
    result = _run(router, *_args(router, tokens=tokens))
    (call,) = [node for node in result.graph.nodes if str(node.target) == "moe.topk_routing.default"]
    assert call.args[2] == KNOWN[router]
    assert (call.args[1] is None) == (len(_args(router)) == 1)
    assert not result.reasons


@pytest.mark.parametrize("router", KNOWN, ids=lambda router: router.__name__)
def test_and_with_any_number_of_tokens(router):
    result = _run(router, *_args(router, dynamic=True))
    assert [each.kind for each in result.log.raised] == ["topk_routing"]
    assert "[T0, 3]" in result.after


@pytest.mark.parametrize("router", [renormalized, deepseek_v3], ids=lambda router: router.__name__)
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_values(router, tokens):
    def used(*args):
        weights, ids = router(*args)
        eye = torch.eye(EXPERTS).expand(EXPERTS, -1, -1)
        marks = torch.arange(1.0, EXPERTS + 1).view(-1, 1, 1) * eye
        hidden = torch.ones(weights.shape[0], EXPERTS)
        return moe_ops.fused_experts(hidden, eye, marks, weights, ids, activation="relu2")

    args = _args(router, tokens=tokens)
    with torch.no_grad():
        out = torch.compile(used, options=inductor_passes.options(), fullgraph=True)(*args)
        weights, ids = router(*(tensor.double() for tensor in args[:1]), *args[1:])
    expected = (weights * (ids + 1)).sum(-1, keepdim=True).expand(-1, EXPERTS)
    torch.testing.assert_close(out.double(), expected.double(), rtol=1e-5, atol=1e-5)


# What is something else


def hotter(x):
    return _top((x / 1.5).softmax(-1))


def squared(x):
    weights, ids = softmax(x)
    return weights.square(), ids


def softmax_of_others(x):
    ids = x.topk(TOP_K).indices
    return x.flip(-1).softmax(-1).gather(1, ids), ids


def lowest(x):
    return x.softmax(-1).topk(TOP_K, largest=False)


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
    return _top(x.clamp(max=6.0).softmax(-1))


OTHERS = (
    hotter,
    softmax_of_others,
    lowest,
    other_experts_at_the_edge,
)
SCALED_FURTHER = (squared, not_by_the_sum, of_the_token_before, almost_scaled)


@pytest.mark.parametrize("router", OTHERS, ids=lambda router: router.__name__)
def test_what_is_no_config_stays(router):
    result = _run(router, logits())
    assert not result.log.raised and result.after == result.before
    (reason,) = result.reasons
    assert reason == "the router is no RoutingConfig: none gives its weights for the logits tried"


@pytest.mark.parametrize("router", SCALED_FURTHER, ids=lambda router: router.__name__)
def test_what_is_made_of_weights_is_made_of_ours(router):
    """The inner router is one of ours; what a model makes of its weights stays as it is."""
    result = _run(router, logits())
    assert [each.kind for each in result.log.raised] == ["topk_routing"]
    assert "topk.default" not in result.after and "'top_k=3;renormalize=False'" in result.after
    experts = next(node for node in result.graph.nodes if str(node.target) == "moe.combine.default")
    assert str(experts.args[1].target).startswith("aten.")


def test_weights_that_others_read_have_the_dtype_they_had():
    def router(x):
        weights, ids = _top(x.softmax(-1))
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
        weights, ids = _top(x.softmax(-1) + y.softmax(-1))
        return weights, ids

    result = _run(router, logits(), logits(dynamic=False) + 1)
    (reason,) = result.reasons
    assert "not logits and a bias" in reason


def test_ids_from_outside_are_not_mentioned():
    def router(x, ids):
        return x[:, :TOP_K].softmax(-1), ids

    result = _run(router, logits(), torch.zeros(7, TOP_K, dtype=torch.long))
    assert not result.reasons and not result.log.raised


def test_random_logits_leave_the_generator_alone():
    before = torch.random.get_rng_state()
    assert _run(deepseek_v3, *_args(deepseek_v3)).log.raised
    assert torch.equal(before, torch.random.get_rng_state())
