"""Patched routers inside torch.autocast: float32 logits where a family computes them so, else autocast's."""

import copy

import pytest
import torch

from layers import huggingface
from tests.coverage.cases import outputs, stock_model
from tests.helpers import relative_error
from tests.huggingface.families import FAMILIES, HIDDEN, TOP_K, pair, tokens

FLOAT32_LOGITS = ("deepseek_v3", "glm4_moe")
TOKENS = 3000


def router_of(model):
    mlp = model.model.layers[1].mlp
    return mlp.router if hasattr(mlp, "router") else mlp.gate


def route(router, hidden):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return router(hidden)


def ids_of(output):
    return output[2].long().sort(-1).values


@pytest.fixture
def hidden():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", FLOAT32_LOGITS)
def test_float32_logits_pick_the_exact_experts(family, compiled, hidden):
    stock_model, our_model = pair(family)
    huggingface.patch(our_model)
    stock, ours = router_of(stock_model), router_of(our_model)
    actual = route(torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours, hidden)
    assert actual[0].dtype == actual[1].dtype == torch.float32
    with torch.no_grad():
        expected = exact_routing(stock, hidden)
    assert torch.equal(ids_of(actual), expected)
    rounded = (ids_of(route(stock, hidden)) != expected).any(-1)
    assert rounded.sum() > 10  # transformers' own router rounds its logits there


def exact_routing(router, hidden):
    """Sigmoid scores plus bias, the best groups by their two best, the best of those: in float64."""
    scores = (hidden.double() @ router.weight.double().T).sigmoid() + router.e_score_correction_bias.double()
    groups = scores.unflatten(-1, (router.num_group, -1))
    best = groups.topk(2, -1).values.sum(-1).topk(router.topk_group, -1).indices
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
    return (
        groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1).topk(TOP_K, -1).indices.sort(-1).values
    )


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FLOAT32_LOGITS])
def test_other_routers_agree_with_stock(family, hidden):
    stock, ours = pair(family)
    huggingface.patch(ours)
    expected, actual = route(router_of(stock), hidden), route(router_of(ours), hidden)
    assert actual[0].dtype == expected[0].dtype == torch.bfloat16
    assert torch.equal(actual[0], expected[0])
    tied = expected[0].float().sort(-1, descending=True).values
    distinct = tied[:, TOP_K - 1] != tied[:, TOP_K]
    assert distinct.float().mean() > 0.9
    assert torch.equal(ids_of(actual)[distinct], ids_of(expected)[distinct])


@pytest.mark.parametrize("hidden_act", ["silu", "mish"])  # mish is the experts' own code
@torch.no_grad()
def test_experts_return_the_dtype_that_they_are_given(hidden_act, hidden):
    stock, ours = pair("mixtral", hidden_act=hidden_act)
    huggingface.patch(ours)
    ids = torch.randint(8, (TOKENS, 2), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = (
            model.model.layers[0].mlp.experts(hidden, ids, torch.ones(TOKENS, 2)) for model in (stock, ours)
        )
    assert actual.dtype == expected.dtype == torch.float32
    assert relative_error(actual, expected) < 1e-2


@torch.no_grad()
def test_a_block_that_gathers_tokens_of_two_kinds():
    name = "ernie4_5_vl_moe.mixed"
    stock = stock_model(name)
    ours = copy.deepcopy(stock)
    huggingface.patch(ours)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [outputs(model, name)[0] for model in (ours, stock)]
    assert results[0].dtype == results[1].dtype
    assert relative_error(*results) < 3e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_inside_autocast(family):
    stock, ours = pair(family)
    huggingface.patch(ours)
    ids = tokens(2, 16)
    losses = []
    for model in (stock, ours):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=0)
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters() if p.grad is not None)
    assert router_of(ours).weight.grad.any()
