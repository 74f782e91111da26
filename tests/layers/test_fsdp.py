"""FSDP2 on a mesh of one rank, and the clear error of a DTensor that reaches an operator."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from layers import (
    ExpertLora,
    FusedMoE,
    LowRank,
    MoEBlock,
    MoEConfig,
    RoutedExpertsCapture,
    RouterConfig,
    SharedExpertConfig,
)

H, I, E, K = 16, 24, 8, 2


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make_block() -> MoEBlock:
    torch.manual_seed(0)
    config = MoEConfig(
        E,
        K,
        H,
        I,
        has_bias=True,
        router=RouterConfig(has_correction_bias=True),
        shared_experts=SharedExpertConfig(40),
    )
    return MoEBlock(config)


@pytest.mark.parametrize(
    "wrap", [lambda block: [block], lambda block: [block.experts, block]], ids=["block", "nested"]
)
def test_fully_sharded_block_trains_like_a_plain_one(mesh, wrap):
    plain = make_block()
    sharded = copy.deepcopy(plain)
    for module in wrap(sharded):
        fully_shard(module, mesh=mesh)
    hidden = torch.randn(32, H)
    for _ in range(2):  # the second step runs on updated, resharded weights
        outs = []
        for block in (plain, sharded):
            optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
            out = block(hidden)
            out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            outs.append(out)
        torch.testing.assert_close(outs[1], outs[0])
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), plain.get_parameter(name))


@pytest.mark.parametrize("casts", [False, True])
def test_experts_on_their_own_are_given_logits_as_they_are(mesh, casts):
    """What docs/parallel.md says of mixed precision; with FSDP2's default, some tokens go elsewhere."""
    block = MoEBlock(MoEConfig(E, K, H, I, router=RouterConfig(gate_dtype=torch.float32)))
    plain, hidden, chosen = copy.deepcopy(block).bfloat16(), torch.randn(4000, H), []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    theirs = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=casts)
    fully_shard(block.experts, mesh=mesh, mp_policy=theirs)
    fully_shard(block, mesh=mesh, mp_policy=policy)
    for each, tokens in ((plain, hidden.bfloat16()), (block, hidden)):
        chosen.append(torch.empty(len(hidden), K, dtype=torch.int32))
        each.experts.capture = RoutedExpertsCapture(chosen[-1])
        with torch.no_grad():
            each(tokens)
    assert torch.equal(*chosen) != casts


def to_empty(block, state):
    block.to_empty(device="cpu")
    for name, parameter in block.named_parameters():
        parameter.data.copy_(distribute_tensor(state[name], parameter.device_mesh, parameter.placements))
    block.experts.e_score_correction_bias.copy_(state["experts.e_score_correction_bias"])


def assign(block, state):
    shards = {
        name: distribute_tensor(state[name], parameter.device_mesh, parameter.placements)
        for name, parameter in block.named_parameters()
    }
    block.load_state_dict({**state, **shards}, assign=True)


@pytest.mark.parametrize("load", [to_empty, assign])
def test_a_sharded_block_from_the_meta_device_has_its_map(mesh, load, poisoned_empty):
    expert_map = torch.tensor([0, -1, 1, -1, 2, -1, 3, -1])
    whole = MoEBlock(make_block().config, expert_map)
    block = MoEBlock(whole.config, expert_map, device="meta")
    fully_shard(block, mesh=mesh)
    load(block, whole.state_dict())
    hidden = torch.randn(9, H)
    torch.testing.assert_close(block(hidden), whole(hidden))


def test_a_dtensor_is_refused_clearly(mesh):
    module = FusedMoE(MoEConfig(E, K, H, I))
    module.w13_weight = torch.nn.Parameter(distribute_tensor(module.w13_weight.data, mesh, [Shard(0)]))
    with pytest.raises(TypeError, match=r"w13 is a DTensor: expected a plain tensor"):
        module(torch.randn(4, H), torch.randn(4, E))


def test_experts_that_are_sharded_are_not_moved(mesh):
    """Written to what a forward has gathered, they would come back."""
    module = FusedMoE(MoEConfig(E, K, H, I))
    fully_shard(module, mesh=mesh)
    with pytest.raises(
        TypeError, match="w13_weight is a DTensor: expected a plain parameter, experts move before"
    ):
        module.get_expert_weights()


def test_adapters_are_loaded_before_they_are_sharded(mesh):
    module = FusedMoE(MoEConfig(E, K, H, I))
    module.lora = ExpertLora(module, 2, 4, torch.zeros(9, dtype=torch.int32))
    gate_up, down = (
        LowRank(torch.ones(E, 4, columns), torch.ones(E, rows, 4)) for rows, columns in ((2 * I, H), (H, I))
    )
    fully_shard(module, mesh=mesh)
    with pytest.raises(
        TypeError, match=r"a13 is a DTensor .*: expected adapters that are loaded before fully_shard"
    ):
        module.lora.load_adapter(0, gate_up, down)
    assert not module.lora.b13.full_tensor().any()
