"""RaiseRouters: which routers are a RoutingConfig, and which only look like one."""

import pytest
import torch
from torch.nn import functional as F

import inductor_passes
import moe_ops
from inductor_passes.pipeline import RAISES
from tests.helpers import assert_matches_oracle, mixed
from tests.passes.capture import computed, rewrite
from tests.passes.stock import TOP_K, layer, swiglu

OPS = torch.ops.moe
EXPERTS = 16
GROUPS, KEPT = 4, 2


def routed(router, *args):
    """Operators of ours behind a router: what raising makes of it, and the ids and weights they use.

    Without the public functions, whose checks Dynamo traces for as long as all the rest, and without products.
    """

    def layer(*args):
        weights, ids = router(*args)
        slots, inverse, _ = OPS.build_dispatch(ids, None, EXPERTS)
        rows = OPS.permute(torch.ones(weights.shape[0], EXPERTS), slots)
        return OPS.combine(rows, weights, inverse, None, None, None)

    return rewrite(layer, *args, passes=RAISES)


def logits(tokens=7, dynamic=False):
    values = torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(0)) * 2
    if dynamic:
        torch._dynamo.mark_dynamic(values, 0)
    return values


def bias():
    return torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1)) / 4


def top(scores):
    return scores.topk(TOP_K, dim=-1)


def softmax(x):
    return top(F.softmax(x, dim=-1, dtype=torch.float))


def renormalized(x):
    weights, ids = softmax(x)
    return weights / weights.sum(-1, keepdim=True), ids


def in_bfloat16(x):
    weights, ids = top(x.bfloat16().softmax(-1))
    return weights, ids


def chosen_then_softmax(x):
    values, ids = top(x)
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
    return top(x.sigmoid())


def sigmoid_renormalized(x):
    weights, ids = sigmoid(x)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), ids


def sqrtsoftplus(x):
    return top(F.softplus(x).sqrt())


def max_of_groups(x):
    """DeepSeek-V2."""
    scores = x.softmax(-1)
    best = scores.view(-1, GROUPS, EXPERTS // GROUPS).amax(-1).topk(KEPT, sorted=False).indices
    mask = torch.zeros(x.shape[0], GROUPS).scatter(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, -1, EXPERTS // GROUPS).reshape(-1, EXPERTS)
    return top(scores.masked_fill(~mask.bool(), 0.0))


def deepseek_v3(x, bias):
    scores = x.sigmoid()
    choice = scores + bias
    best = choice.view(-1, GROUPS, EXPERTS // GROUPS).topk(2)[0].sum(-1).topk(KEPT, sorted=False)[1]
    mask = torch.zeros(x.shape[0], GROUPS).scatter(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, GROUPS, EXPERTS // GROUPS).reshape(-1, EXPERTS)
    ids = choice.masked_fill(~mask.bool(), float("-inf")).topk(TOP_K, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def chosen_then_sigmoid(x):
    """Of large logits all sigmoids are one: by them any three could be the best."""
    weights, ids = top(x)
    return weights.sigmoid(), ids


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
    chosen_then_softmax: "top_k=3;order=topk_then_score;renormalize=False",
    chosen_then_sigmoid: "top_k=3;score_fn=sigmoid;order=topk_then_score;renormalize=False",
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


def _named(value):
    return getattr(value, "__name__", None)


def args_of(router, **options):
    return (logits(**options), bias()) if "bias" in router.__code__.co_varnames[:2] else (logits(**options),)


@pytest.mark.parametrize(("router", "tokens"), mixed(KNOWN, [1, 300]), ids=_named)
def test_a_router_is_known_by_what_it_computes(router, tokens):
    result = routed(router, *args_of(router, tokens=tokens))
    (call,) = [node for node in result.graph.nodes if str(node.target) == "moe.topk_routing.default"]
    assert call.args[2] == KNOWN[router]
    assert (call.args[1] is None) == (len(args_of(router)) == 1)
    assert not result.reasons


@pytest.mark.parametrize("router", KNOWN, ids=lambda router: router.__name__)
def test_and_with_any_number_of_tokens(router):
    result = routed(router, *args_of(router, dynamic=True))
    assert [each.kind for each in result.log.raised] == ["topk_routing"]
    assert "[T0, 3]" in result.after


@pytest.mark.parametrize(("router", "tokens"), mixed([deepseek_v3, renormalized], [1, 33]))
def test_values(router, tokens):
    def used(*args):
        weights, ids = router(*args)
        eye = torch.eye(EXPERTS).expand(EXPERTS, -1, -1)
        marks = torch.arange(1.0, EXPERTS + 1).view(-1, 1, 1) * eye
        hidden = torch.ones(weights.shape[0], EXPERTS)
        return moe_ops.fused_experts(hidden, eye, marks, weights, ids, activation="relu2")

    args = args_of(router, tokens=tokens)
    with torch.no_grad():
        out = torch.compile(used, options=inductor_passes.options(), fullgraph=True)(*args)
        weights, ids = router(*(tensor.double() for tensor in args[:1]), *args[1:])
    expected = (weights * (ids + 1)).sum(-1, keepdim=True).expand(-1, EXPERTS)
    torch.testing.assert_close(out.double(), expected.double(), rtol=1e-5, atol=1e-5)


def test_weights_of_a_topk_that_does_not_sort_stay_beside_its_ids():
    """Of bfloat16 it gives four of four in another order than of float64, in which routers are tried."""

    def used(x, router, w13, w2):
        weights, ids = F.linear(x, router).softmax(-1).topk(4, dim=-1, sorted=False)
        hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids]))
        return torch.einsum("tki,tkhi,tk->th", hidden, w2[ids], weights.nan_to_num(0.5))

    inputs = layer(40, experts=4)
    result, out = computed(used, *inputs, passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert_matches_oracle(out, used(*(each.double() for each in inputs)))
