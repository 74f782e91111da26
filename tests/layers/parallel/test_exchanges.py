"""Exchanges between ranks against a float64 oracle of one process, for the tokens of every rank."""

import pytest
import torch
import torch.distributed as dist

from layers import EplbState, ExpertPlacement, RouterOutput
from moe_ops import Activation
from moe_ops.reference import reference_experts
from tests.helpers import assert_matches_oracle, assert_same
from tests.layers.parallel.exchanges import (
    ALL,
    EXCHANGES,
    MOST,
    ROUTINGS,
    E,
    H,
    I,
    K,
    config,
    held_by,
    make_layer,
    padded,
    shard_of,
    tokens_of,
    variable,
)
from tests.layers.parallel.world import on_ranks

GPT_OSS = {"activation": Activation("swiglu_oai", interleaved=True), "has_bias": True}
OPTIONS = {"plain": {}, "gpt_oss": GPT_OSS, "ungated": {"activation": "relu2", "has_bias": True}}
exchanges = pytest.mark.parametrize("name", ALL)


def oracle(layer, hidden, routed):
    """Float64, of one process."""
    weights = {name: each.double() for name, each in layer.named_parameters()}
    return reference_experts(
        hidden.double(),
        weights["w13_weight"],
        weights["w2_weight"],
        routed.topk_weights.double(),
        routed.topk_ids,
        layer.config.activation,
        w13_bias=weights.get("w13_bias"),
        w2_bias=weights.get("w2_bias"),
    )


@on_ranks(1, 2, 4)
@exchanges
@pytest.mark.parametrize("routing", ROUTINGS)
def test_values(name, routing):
    layer = make_layer(config())
    hidden, routed = tokens_of(dist.get_rank(), name, routing)
    shared = torch.randn(hidden.shape)
    with torch.no_grad():
        out = ALL[name](layer)(hidden, routed, shared)
    assert_matches_oracle(out, oracle(layer, hidden, routed) + shared.double())


@on_ranks(2)
@exchanges
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_options_and_dtypes(name, options, dtype):
    layer = make_layer(config(**options), dtype)
    hidden, routed = tokens_of(dist.get_rank(), name, dtype=dtype)
    out = ALL[name](layer)(hidden, routed)
    assert out.dtype == dtype
    assert_matches_oracle(out, oracle(layer, hidden, routed))


@on_ranks(2)
@exchanges
def test_replicas(name):
    """Whoever routes speaks of logical experts; ranks hold physical ones, and count what their own tokens chose."""
    plain, layer = make_layer(config()), make_layer(config(num_redundant_experts=4))
    held = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4, 0, 0, 3, 1])
    with torch.no_grad():
        for mine, other in zip(layer.parameters(), plain.parameters(), strict=True):
            mine.copy_(other[held])
    kernel, state = ALL[name](layer), EplbState.initial(1, E, 4)
    kernel.experts.layer.set_eplb_state(0, *state)
    kernel.experts.layer.balancing.commit(ExpertPlacement.of(held, E))
    hidden, routed = tokens_of(dist.get_rank(), name)
    assert_matches_oracle(kernel(hidden, routed), oracle(plain, hidden, routed))
    assert state.expert_load_view.sum() == hidden.shape[0] * K


@on_ranks(2)
@exchanges
def test_no_rank_has_a_token(name):
    layer = make_layer(config())
    routed = RouterOutput(torch.empty(0, E), torch.empty(0, K), torch.empty(0, K, dtype=torch.int32))
    assert ALL[name](layer)(torch.empty(0, H), routed).shape == (0, H)


@on_ranks(2, 4)
@exchanges
def test_gradients(name):
    layer = make_layer(config(has_bias=True), torch.float64)
    kernel, rank, size = ALL[name](layer), dist.get_rank(), dist.get_world_size()
    ranks = range(1) if name in ("all_reduce", "tensor_parallel") else range(size)
    hidden, routed = differentiable(*tokens_of(rank, name, dtype=torch.float64))
    loss(kernel(hidden, routed)).backward()
    expected = [differentiable(*tokens_of(each, name, dtype=torch.float64)) for each in ranks]
    for each in expected:
        loss(layer(*each)).backward()
    own = expected[rank if len(ranks) > 1 else 0]
    assert_same([hidden.grad, routed.topk_weights.grad], [own[0].grad, own[1].topk_weights.grad])
    part = kernel.experts.layer
    for parameter_name, parameter in part.named_parameters():
        grad = layer.get_parameter(parameter_name).grad
        if part.shard.size > 1 and parameter_name != "w2_bias":
            grad = shard_of(parameter_name, grad, part.shard, part.config)
        elif part.expert_map is not None:
            grad = grad[held_by(part.expert_map)]
        assert_same([parameter.grad], [grad])


def differentiable(hidden, routed):
    weights = routed.topk_weights.clone().requires_grad_()
    return hidden.clone().requires_grad_(), routed._replace(topk_weights=weights)


def loss(out):
    return (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)).sum()


@on_ranks(2)
@pytest.mark.parametrize("make", [padded, variable])
@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_uneven_experts_of_every_strategy(make, strategy):
    layer = make_layer(config(num_experts=7))
    hidden, routed = tokens_of(dist.get_rank(), "padded", "padding")
    routed.topk_ids[routed.topk_ids == 7] = 3
    out = make(layer, strategy=strategy)(hidden, routed)
    assert_matches_oracle(out, oracle(layer, hidden, routed))


@on_ranks(2, 4)
def test_a_token_is_sent_once_to_each_rank_that_it_needs():
    kernel, rank, size = variable(make_layer(config())), dist.get_rank(), dist.get_world_size()
    hidden, routed = tokens_of(rank, "variable")
    prepared = kernel.start(hidden, routed).wait()
    rows = []
    for sender in range(size):
        tokens, theirs = tokens_of(sender, "variable")
        rows.append(tokens[(theirs.topk_ids // (E // size) == rank).any(1)])
    assert torch.equal(prepared.hidden_states, torch.cat(rows))


@on_ranks(2)
@pytest.mark.parametrize("name", ["all_gather", "all_gather_static", "all_gather_slots", "padded"])
def test_rows_without_a_token_have_no_expert(name):
    hidden, routed = tokens_of(dist.get_rank(), name)
    prepared = ALL[name](make_layer(config())).start(hidden, routed).wait()
    is_empty = (prepared.hidden_states == 0).all(1)
    assert is_empty.any()
    assert (prepared.topk_ids[is_empty] == -1).all()


@on_ranks(2)
def test_tokens_without_a_row_do_without_those_experts():
    layer, rank = make_layer(config()), dist.get_rank()
    hidden, routed = tokens_of(rank, "padded", "one_rank")
    out = padded(layer, max_tokens=4)(hidden, routed)
    expected = oracle(layer, hidden, routed)
    expected[4:] = 0
    assert_matches_oracle(out, expected)


@on_ranks(2, 4)
@exchanges
def test_a_poisoned_token_changes_no_other_one(name):
    layer = make_layer(config())
    hidden, routed = tokens_of(dist.get_rank(), name, sizes="even")
    kernel = ALL[name](layer)
    clean, poisoned = kernel(hidden, routed), hidden.clone()
    poisoned[0], poisoned[1] = float("nan"), float("inf")
    out = kernel(poisoned, routed)
    assert not out[:2].isfinite().any()
    assert torch.equal(out[2:], clean[2:])


@on_ranks(2)
@exchanges
def test_inputs_are_left_as_they_are(name):
    hidden, routed = tokens_of(dist.get_rank(), name)
    before = hidden.clone(), routed.topk_weights.clone(), routed.topk_ids.clone()
    ALL[name](make_layer(config()))(hidden, routed)
    for tensor, copy in zip((hidden, routed.topk_weights, routed.topk_ids), before):
        assert torch.equal(tensor, copy)


@on_ranks(2)
@pytest.mark.parametrize("name", EXCHANGES)
def test_strided_tokens(name):
    layer = make_layer(config())
    hidden, routed = tokens_of(dist.get_rank(), name)
    wide = torch.cat([hidden, hidden], 1)[:, ::2]
    assert_matches_oracle(ALL[name](layer)(wide, routed), oracle(layer, wide, routed))
    assert I and MOST
