"""topk_routing kernels against the plain PyTorch definition."""

import pytest
import torch

from moe_ops import routing as definition
from moe_ops.arguments import Router, TopkRoutingBackward
from moe_ops.types import RoutingConfig
from tests.helpers import mixed, sqrt_softplus
from tests.kernels.by_name import launch
from tests.kernels.oracles import assert_close

CONFIGS = [
    RoutingConfig(top_k=3),
    RoutingConfig(top_k=1, renormalize=False),
    RoutingConfig(top_k=2, renorm_eps=0.25),
    RoutingConfig(top_k=4, order="topk_then_score", renormalize=False),
    RoutingConfig(top_k=4, order="topk_then_score", score_fn="sigmoid", scale=1.5),
    RoutingConfig(top_k=5, score_fn="sigmoid", renorm_eps=1e-20, scale=2.5),
    RoutingConfig(top_k=4, num_groups=4, topk_groups=2, group_score="top2_sum", score_fn="sigmoid"),
    RoutingConfig(top_k=3, num_groups=4, topk_groups=2, group_fill=0.0),
    RoutingConfig(top_k=3, score_fn="sqrtsoftplus", renorm_eps=1e-20, scale=1.5),
    RoutingConfig(top_k=2, score_fn="sqrtsoftplus", renormalize=False, order="topk_then_score"),
]


def _experts(config: RoutingConfig) -> int:
    return 20 if config.num_groups > 1 else 13  # groups of 5: neither size is a power of two


def _reference(logits, bias, config):
    logits = logits.cpu()
    weights, ids = definition.reference(Router(logits, None if bias is None else bias.cpu(), config.spec))
    return weights, ids


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.spec)
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_matches_the_definition(config: RoutingConfig, tokens: int, device: str) -> None:
    logits = torch.randn(tokens, _experts(config)).to(device)
    bias = (torch.rand(_experts(config)) / 4).to(device)
    # Below zero, experts of groups that were left out win with a group_fill of 0.
    for correction in (None, bias, bias - 3):
        weights, ids = launch("topk_routing", logits, correction, config)
        expected_weights, expected_ids = _reference(logits, correction, config)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        assert torch.equal(ids.cpu(), expected_ids)
        assert_close(weights, expected_weights)


@pytest.mark.parametrize(
    ("sizes", "score"),
    mixed([(32, 16), (60, 5), (64, 8), (96, 4), (128, 2), (160, 8), (256, 8)], ("max", "top2_sum")),
    ids=str,
)
def test_groups_of_every_size(sizes: tuple[int, int], score: str, device: str) -> None:
    """Rows whose logits load in pieces: several of them in one block once chose each other's experts on a GPU."""
    experts, groups = sizes
    config = RoutingConfig(top_k=2, num_groups=groups, topk_groups=2, group_score=score, score_fn="sigmoid")
    logits = torch.randn(33, experts).to(device)
    weights, ids = launch("topk_routing", logits, None, config)
    expected_weights, expected_ids = _reference(logits, None, config)
    assert torch.equal(ids.cpu(), expected_ids)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_computes_in_the_compute_dtype(dtype: torch.dtype, device: str) -> None:
    config = RoutingConfig(top_k=4)
    logits = torch.randn(9, 13).to(device, dtype)
    weights, ids = launch("topk_routing", logits, None, config)
    expected, expected_ids = _reference(logits, None, config)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(ids.cpu(), expected_ids)
    assert_close(weights, expected, torch.float64 if dtype == torch.float64 else torch.float32)


def test_ties_go_to_the_lowest_id(device: str) -> None:
    logits = torch.zeros(3, 13)
    logits[1, 7] = logits[1, 3] = 1.0
    _, ids = launch("topk_routing", logits.to(device), None, RoutingConfig(top_k=4))
    assert ids.cpu().tolist() == [[0, 1, 2, 3], [3, 7, 0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_of_both_signs_are_one_score(dtype: torch.dtype, device: str) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, -2.0, 0.0]], dtype=dtype, device=device)
    _, ids = launch("topk_routing", logits, None, RoutingConfig(6, order="topk_then_score"))
    assert ids.tolist() == [[1, 2, 3, 5, 0, 4]]


@pytest.mark.parametrize("order", ["score_then_topk", "topk_then_score"])
@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_non_finite_scores_rank_last_with_weight_zero(score_fn: str, order: str, device: str) -> None:
    config = RoutingConfig(top_k=4, score_fn=score_fn, order=order)
    logits = torch.randn(6, 5)
    logits[0, 0] = float("nan")
    logits[1, 1:] = float("-inf")
    logits[2, 2] = float("inf")
    logits[3, :] = float("nan")
    logits[4, :4] = float("nan")
    weights, ids = launch("topk_routing", logits.to(device), None, config)
    expected, expected_ids = _reference(logits, None, config)
    assert torch.equal(ids.cpu(), expected_ids)
    assert weights.isfinite().all()
    assert_close(weights, expected)
    assert all(len(set(row)) == 4 for row in ids.cpu().tolist())


def test_a_finite_group_fill_makes_no_score_usable(device: str) -> None:
    config = RoutingConfig(top_k=6, score_fn="sigmoid", num_groups=4, topk_groups=2, group_fill=0.0)
    logits = torch.randn(5, 20)
    logits[:, ::2] = float("nan")
    weights, ids = launch("topk_routing", logits.to(device), None, config)
    expected, expected_ids = _reference(logits, None, config)
    assert torch.equal(ids.cpu(), expected_ids)
    assert_close(weights, expected)


def test_zero_sum_divides_by_one(device: str) -> None:
    logits = torch.full((2, 8), -1e4)
    weights, _ = launch("topk_routing", logits.to(device), None, RoutingConfig(top_k=2, score_fn="sigmoid"))
    assert weights.cpu().tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("order", ["score_then_topk", "topk_then_score"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_logits_keep_their_sqrtsoftplus_and_slope(order: str, dtype: torch.dtype, device: str) -> None:
    """From where 1 + e^x rounds to 1, over where e^x underflows, to where it overflows; every entry by itself."""
    config = RoutingConfig(1, "sqrtsoftplus", order, renormalize=False)
    far = [-150.0, -110.0, -60.0, -36.5, -36.0, -20.0, -16.5, -7.0, 0.0, 5.0, 100.0, 1000.0]
    logits = torch.tensor(far, dtype=dtype)[:, None]
    weights, ids = launch("topk_routing", logits.to(device), None, config)
    exact = logits.double().requires_grad_()
    expected = sqrt_softplus(exact)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    grad = torch.ones_like(weights)
    gradient = launch("topk_routing_backward", grad, logits.to(device), weights, ids, config)
    for row in range(len(far)):
        assert_close(weights[row], expected[row])
        assert_close(gradient[row], slope[row])


def test_many_experts_and_strided_logits(device: str) -> None:
    config = RoutingConfig(top_k=32, score_fn="sigmoid")
    logits = torch.randn(1024, 3).to(device).t()
    weights, ids = launch("topk_routing", logits, None, config)
    expected, expected_ids = _reference(logits, None, config)
    assert torch.equal(ids.cpu(), expected_ids)
    assert_close(weights, expected)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.spec)
def test_gradient_matches_autograd(config: RoutingConfig, device: str) -> None:
    logits = torch.randn(7, _experts(config), dtype=torch.float64, requires_grad=True)
    grad = torch.randn(7, config.top_k, dtype=torch.float64)
    weights, ids = definition.reference(Router(logits, None, config.spec))
    (expected,) = torch.autograd.grad(weights, logits, grad)
    args = grad.to(device), logits.detach().to(device), weights.detach().to(device), ids.to(device)
    assert_close(launch("topk_routing_backward", *args, config), expected)
    single = launch("topk_routing_backward", *(arg.float() for arg in args[:3]), args[3], config)
    assert single.dtype == torch.float32
    assert_close(single, expected)


def test_gradient_of_non_finite_logits_is_finite(device: str) -> None:
    logits = torch.randn(4, 5)
    logits[0, 2] = float("-inf")
    logits[1, :] = float("nan")
    for config in (RoutingConfig(top_k=3), RoutingConfig(top_k=3, order="topk_then_score")):
        weights, ids = _reference(logits, None, config)
        args = torch.randn(4, 3), logits, weights, ids
        out = launch("topk_routing_backward", *(arg.to(device) for arg in args), config)
        expected = definition.reference_backward(TopkRoutingBackward(*args, config.spec))
        assert out.isfinite().all()
        assert_close(out, expected)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.spec)
def test_gradient_leaves_out_slots_that_were_not_selected(config: RoutingConfig, device: str) -> None:
    """A bias of -inf, a NaN logit, ties: what the forward made constant has no gradient, though its score is finite."""
    experts = _experts(config)
    logits = torch.randn(7, experts, dtype=torch.float64)
    logits[1, ::2], logits[2] = float("nan"), 0.0
    bias = torch.randn(experts, dtype=torch.float64)
    bias[config.top_k - 1 :] = float("-inf")
    leaf = logits.clone().requires_grad_()
    weights, ids = definition.reference(Router(leaf, bias, config.spec))
    grad = torch.randn_like(weights)
    (expected,) = torch.autograd.grad(weights, leaf, grad)
    args = grad, logits, weights.detach(), ids
    assert_close(
        launch("topk_routing_backward", *(arg.to(device) for arg in args), config),
        expected.nan_to_num(nan=0.0),
    )
