"""Simulated routing: the promised distribution, distinct experts, the same draws for the same seed."""

import pytest
import torch

from layers import FusedMoE, MoEConfig, SimulatedRouting, register_routing_strategy, sample_experts
from layers.simulator import _STRATEGIES
from tests.helpers import assert_matches_oracle
from tests.layers import oracle

E, K = 12, 3


def drawn(strategy, tokens=20000, seed=0):
    weights, ids = SimulatedRouting(strategy, K, seed)(None, torch.randn(tokens, E))
    return weights, ids, ids.flatten().long().bincount(minlength=E).double() / tokens


@pytest.mark.parametrize("strategy", ["uniform", "normal"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_experts_are_distinct_and_weigh_the_same(strategy, tokens):
    weights, ids, _ = drawn(strategy, tokens)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert weights.shape == ids.shape == (tokens, K) and (weights == 1 / K).all()
    assert all(len(set(row)) == K and min(row) >= 0 and max(row) < E for row in ids.tolist())
    assert (
        sample_experts(torch.zeros(E), torch.randn(2, E).double(), K, torch.tensor(0))[0].dtype
        == torch.float64
    )


def test_uniform_draws_all_alike():
    """20000 tokens: a standard deviation of the share of an expert is 0.003."""
    share = drawn("uniform")[2]
    assert (share - K / E).abs().max() < 0.015


def test_normal_is_a_bell_of_the_stated_width():
    """With one expert a token shares are the bell itself: drawn in proportion to the popularity."""
    _, ids = SimulatedRouting("normal", 1)(None, torch.randn(40000, E))
    share = ids.flatten().long().bincount(minlength=E).double() / 40000
    bell = torch.exp(-(((torch.arange(E) - 5.5) / 2) ** 2).double() / 2)
    assert (share - bell / bell.sum()).abs().max() < 0.01


@pytest.mark.parametrize("strategy", ["uniform", "normal"])
def test_a_seed_is_a_draw(strategy):
    first, again, other = (drawn(strategy, 50, seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert (first[1:] != first[:-1]).any(1).all() or len(set(map(tuple, first.tolist()))) > 25


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_a_layer_routes_so_and_draws_anew_when_the_seed_changes(compiled):
    config = MoEConfig(E, K, 8, 10)
    module = FusedMoE(config)
    module.routing_override = routing = SimulatedRouting("uniform", K, seed=5)
    run = torch.compile(module, fullgraph=True) if compiled else module
    hidden, logits, chosen = torch.randn(7, 8), torch.randn(7, E), []
    for _ in range(2):
        ids = routing(None, logits)[1]
        expected = torch.zeros(7, 8, dtype=torch.float64)
        for token in range(7):
            for expert in ids[token].tolist():
                expected[token] += oracle._expert(module, hidden[token].double(), expert) / K
        assert_matches_oracle(run(hidden, logits), expected)
        chosen.append(ids)
        routing.seed.add_(1)
    assert not torch.equal(*chosen)


def test_registered_strategies(monkeypatch):
    monkeypatch.setattr("layers.simulator._STRATEGIES", dict(_STRATEGIES))

    def last(hidden_states, router_logits, top_k, seed):
        ids = torch.arange(E - top_k, E, dtype=torch.int32).expand(router_logits.shape[0], top_k)
        return torch.ones(ids.shape) * hidden_states[:, :1], ids

    register_routing_strategy("last", last)
    hidden = torch.randn(4, 8)
    weights, ids = SimulatedRouting("last", 2)(hidden, torch.randn(4, E))
    assert ids.tolist() == [[E - 2, E - 1]] * 4 and torch.equal(weights[:, 1], hidden[:, 0])
    with pytest.raises(ValueError, match="name='last': expected one that is free, unlike uniform, normal"):
        register_routing_strategy("last", last)
    with pytest.raises(TypeError, match="strategy=3: expected a function"):
        register_routing_strategy("three", 3)


def test_errors():
    with pytest.raises(ValueError, match="strategy='zipf': expected one of 'uniform', 'normal'"):
        SimulatedRouting("zipf", 2)
    with pytest.raises(ValueError, match="top_k=0: expected at least 1"):
        SimulatedRouting("uniform", 0)
    with pytest.raises(ValueError, match=r"router_logits has shape \[4\]: expected \[T, E\]"):
        SimulatedRouting("uniform", 2)(None, torch.zeros(4))
    with pytest.raises(ValueError, match="top_k=5: expected at most 4"):
        SimulatedRouting("normal", 5)(None, torch.zeros(3, 4))
