"""Shared experts in models that DistributedDataParallel keeps alike on all ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from layers import (
    EplbState,
    ExpertLora,
    FusedMoE,
    HashRouting,
    MoEConfig,
    RoutedExpertsCapture,
    RoutedExpertsReplay,
    RouterConfig,
    TensorShard,
)
from layers.parallel import names_of_ranks_own
from tests.helpers import assert_same
from tests.layers.parallel.exchanges import EXCHANGES
from tests.layers.parallel.test_huggingface import models
from tests.layers.parallel.test_styles import OPTIONS, H, make_block, parallel
from tests.layers.parallel.world import on_ranks


def replicated(model: nn.Module) -> DistributedDataParallel:
    own = names_of_ranks_own(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return DistributedDataParallel(model)


@on_ranks(2)
@pytest.mark.parametrize("style", ["alltoall", "tensor_allgather"])
def test_a_replicated_block_has_the_gradients_of_one(style):
    plain = make_block(torch.float64, **OPTIONS["deepseek_v3"])
    sharded, ranks = parallel(plain, style), dist.get_world_size()
    tokens = torch.randn(ranks, 5, H, dtype=torch.float64)
    model = replicated(sharded)
    model(tokens[dist.get_rank()]).square().sum().backward()
    (plain(tokens.flatten(0, 1)).square().sum() / ranks).backward()
    for name, parameter in sharded.named_parameters():
        grad, expected = parameter.grad, plain.get_parameter(name).grad
        grad = grad.full_tensor() / ranks if isinstance(grad, DTensor) else grad  # a sum over tokens of all
        assert_same([grad.reshape(expected.shape)], [expected])


@on_ranks(2)
@pytest.mark.parametrize("name", ["variable", "gathered_shards"])
def test_a_block_with_a_modular_kernel_has_the_gradients_of_one(name):
    """All ranks would have run the first one's part of the experts."""
    plain, ranks, rank = make_block(torch.float64, **OPTIONS["plain"]), dist.get_world_size(), dist.get_rank()
    block = copy.deepcopy(plain)
    block.experts = EXCHANGES[name](plain.experts)
    tokens = torch.randn(ranks, 5, H, dtype=torch.float64)
    model = replicated(block)
    model(tokens[rank]).square().sum().backward()
    (plain(tokens.flatten(0, 1)).square().sum() / ranks).backward()
    part, whole = block.experts.experts.layer, plain.experts.w2_weight.grad
    expected = whole[rank * 4 :][:4] if name == "variable" else part.shard.of(whole, 2)
    assert_same([part.w2_weight.grad / ranks], [expected])  # a sum over tokens of all
    assert_same([block.gate.weight.grad], [plain.gate.weight.grad])


def test_names_of_parts_of_a_layer():
    moe = MoEConfig(8, 2, H, 24, router=RouterConfig(has_expert_scale=True))
    experts = FusedMoE(moe, torch.tensor([0, 1, 2, 3, -1, -1, -1, -1]))
    experts.lora = ExpertLora(experts, 1, 2, torch.zeros(9, dtype=torch.int32))
    weights = ["w13_weight", "w2_weight", *(f"lora.{name}" for name in ("a13", "b13", "a2", "b2"))]
    assert names_of_ranks_own(experts) == [*weights, "expert_map", "lora.adapter_ids"]
    assert names_of_ranks_own(nn.ModuleList([FusedMoE(moe, shard=TensorShard(1, 2))])) == [
        "0.w13_weight",
        "0.w2_weight",
    ]
    assert names_of_ranks_own(FusedMoE(moe)) == []


@on_ranks(2)
def test_names_of_a_block():
    block = make_block(**OPTIONS["deepseek_v3"])
    assert names_of_ranks_own(copy.deepcopy(block)) == []
    sharded = parallel(block, "alltoall")
    sharded.experts.lora = ExpertLora(sharded.experts, 1, 2, torch.zeros(9, dtype=torch.int32))
    parameters = ["w13_weight", "w2_weight", *(f"lora.{name}" for name in ("a13", "b13", "a2", "b2"))]
    expected = [*parameters, "expert_map", "lora.adapter_ids"]
    assert names_of_ranks_own(sharded.experts) == expected
    assert names_of_ranks_own(sharded) == [f"experts.{name}" for name in expected]
    with pytest.raises(TypeError, match="model=None: expected Module, got NoneType"):
        names_of_ranks_own(None)


def with_adapters(layer, ids):
    layer.lora = ExpertLora(layer, 4, 2, ids[:, 0])
    torch.nn.init.normal_(layer.lora.b2)


def with_known_experts(layer, ids):
    layer.routing_override = RoutedExpertsReplay(ids, layer.config.routing)


def with_token_ids(layer, ids):
    layer.routing_override = HashRouting(torch.arange(8).int().view(4, 2), ids[:, 0], layer.config.routing)


def with_state(layer, ids):
    layer.capture = RoutedExpertsCapture(ids)
    layer.set_eplb_state(0, *EplbState.initial(1, 8), num_real_tokens=ids.max())


@on_ranks(2)
@pytest.mark.parametrize("attach", [with_adapters, with_known_experts, with_token_ids, with_state])
def test_what_a_rank_knows_of_its_tokens_stays_its_own(attach):
    """Of layers that are whole on each rank, too."""
    torch.manual_seed(0)
    layer = FusedMoE(MoEConfig(8, 2, 16, 8))
    attach(layer, torch.full((5, 2), dist.get_rank() + 1, dtype=torch.int32))
    tokens, logits = torch.randn(2, 5, 16)[dist.get_rank()], torch.randn(2, 5, 8)[dist.get_rank()]
    alone = copy.deepcopy(layer)
    model = replicated(layer)
    for _ in range(2):
        torch.testing.assert_close(model(tokens, logits), alone(tokens, logits))
    for (name, buffer), expected in zip(layer.named_buffers(), alone.buffers(), strict=True):
        assert torch.equal(buffer, expected), name


@on_ranks(2)
def test_a_patched_model_is_replicated():
    _, model = models("qwen3_moe", "alltoall")
    maps = [each for each in model.buffers() if each.dtype == torch.int32]
    before = [each.clone() for each in maps]
    replicated(model)
    assert maps and all(map(torch.equal, maps, before))


@on_ranks(2)
@pytest.mark.parametrize("style, is_whole", [("tensor", True), ("alltoall", False)])
def test_a_bias_that_ranks_have_whole_is_drawn_alike(style, is_whole):
    """A checkpoint has that of any rank; computed is that of the first."""
    experts = parallel(make_block(has_bias=True), style).experts
    torch.manual_seed(dist.get_rank())
    experts.reset_parameters()
    bias = experts.w2_bias.to_local().detach()
    drawn = [torch.empty_like(bias) for _ in range(2)]
    dist.all_gather(drawn, bias)
    assert torch.equal(*drawn) == is_whole and bias.unique().numel() > 50
