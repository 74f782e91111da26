"""Weights of experts that are chosen already: those of topk_routing for its own choice, right for any other."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_ops import RoutingConfig, routing_weights, topk_routing
from tests.helpers import RELATIVE_NORM, relative_error, weights_of

ROUTINGS = [
    RoutingConfig(3),
    RoutingConfig(3, renormalize=False, scale=2.5),
    RoutingConfig(3, score_fn="sigmoid", renorm_eps=1e-3),
    RoutingConfig(3, order="topk_then_score", renormalize=False),
    RoutingConfig(3, score_fn="sigmoid", order="topk_then_score"),
    RoutingConfig(3, score_fn="sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum", scale=2.0),
]
with_every_routing = pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.spec)


@with_every_routing
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_any_choice_is_weighed_by_its_scores(routing, tokens, dtype):
    logits = torch.randn(tokens, 8).to(dtype)
    ids = torch.randint(-1, 9, (tokens, 3))
    valid = (ids >= 0) & (ids < 8)
    weights = routing_weights(logits, ids.int(), routing)
    expected = weights_of(logits.double(), ids.clamp(0, 7), valid, routing)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert weights.shape == (tokens, 3) and (weights[~valid] == 0).all()
    if tokens:
        rows = valid.any(1)  # a softmax over no expert is no number in the oracle
        assert relative_error(weights[rows], expected[rows]) <= RELATIVE_NORM[weights.dtype]


@with_every_routing
def test_the_operators_choice_has_the_operators_weights(routing):
    logits = torch.randn(33, 8, dtype=torch.float64)
    logits[3, 5] = float("nan")
    weights, ids = topk_routing(logits, routing)
    torch.testing.assert_close(routing_weights(logits, ids, routing), weights, rtol=1e-12, atol=1e-12)


@with_every_routing
def test_gradients(routing):
    """In a row of padding too, where no id is an expert: zero."""
    logits = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 3, 7], [-1, -1, -1], [2, -1, 4], [8, 9, -5]])
    assert torch.autograd.gradcheck(lambda logits: routing_weights(logits, ids, routing), (logits,))
    (grad,) = torch.autograd.grad(routing_weights(logits, ids, routing).square().sum(), logits)
    assert (grad[1] == 0).all() and (grad[3] == 0).all() and (grad[0] != 0).any()


@pytest.mark.parametrize(
    "routing", [RoutingConfig(3), RoutingConfig(3, "sqrtsoftplus", renorm_eps=0.5, scale=2.5)]
)
def test_two_checkpoints_of_any_size(routing):
    """Dynamo fails at a float that it meets as one and the same object in two checkpoints."""

    def weights(logits, ids):
        return routing_weights(logits, ids, routing)

    def both(logits, ids):
        return sum(checkpoint(weights, each, ids, use_reentrant=False) for each in (logits, 2 * logits))

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        logits, ids = torch.randn(tokens, 8, requires_grad=True), torch.randint(8, (tokens, 3))
        torch.testing.assert_close(compiled(logits, ids), both(logits, ids))


def test_errors():
    logits, ids, routing = torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int32), RoutingConfig(2)
    with pytest.raises(
        ValueError, match=r"topk_ids has shape \[3, 2\]: expected \[4, 'K'\]|expected \[4, K\]"
    ):
        routing_weights(logits, ids[:3], routing)
    with pytest.raises(TypeError, match="topk_ids has dtype"):
        routing_weights(logits, ids.float(), routing)
    with pytest.raises(TypeError, match="router_logits has dtype"):
        routing_weights(logits.int(), ids, routing)
    with pytest.raises(TypeError, match="routing='top_k=2': expected a RoutingConfig"):
        routing_weights(logits, ids, "top_k=2")
