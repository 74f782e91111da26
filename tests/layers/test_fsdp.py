"""FSDP2 on a mesh of one rank, and the clear error of a DTensor that reaches an operator."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from layers import FusedMoE, MoEBlock, MoEConfig, RouterConfig, SharedExpertConfig

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


def test_a_dtensor_is_refused_clearly(mesh):
    module = FusedMoE(MoEConfig(E, K, H, I))
    module.w13_weight = torch.nn.Parameter(distribute_tensor(module.w13_weight.data, mesh, [Shard(0)]))
    with pytest.raises(TypeError, match=r"w13 is a DTensor: expected a plain tensor"):
        module(torch.randn(4, H), torch.randn(4, E))
