"""Ranks that hold parts of routed and of shared experts: one reduction, behind both or of the shared ones alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layers import (
    LocalPrepareAndFinalize,
    ModularKernel,
    MoEBlock,
    MoERunner,
    Reduction,
    SharedExpertConfig,
    StandardExperts,
    TensorShard,
)
from layers.parallel import AllReducePrepareAndFinalize
from moe_ops import gated_activation
from tests.helpers import assert_matches_oracle
from tests.layers import oracle
from tests.layers.parallel.exchanges import H, config, shard_of_experts
from tests.layers.parallel.world import on_ranks


class PartOfSharedExperts(nn.Module):
    """Rows of gate and up, columns of down: outputs of all ranks add up to those of the whole."""

    def __init__(self, whole: nn.Module, shard: TensorShard) -> None:
        super().__init__()
        gate, up = whole.gate_up_proj.weight.detach().chunk(2)
        self.gate_up = torch.cat([shard.of(gate, 0), shard.of(up, 0)])
        self.down = shard.of(whole.down_proj.weight.detach(), 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return gated_activation(tokens @ self.gate_up.T) @ self.down.T


KERNELS = {
    "layer": lambda layer: layer,
    "kernel": lambda layer: ModularKernel(LocalPrepareAndFinalize(), StandardExperts(layer)),
    "reduced": lambda layer: ModularKernel(
        AllReducePrepareAndFinalize(dist.group.WORLD), StandardExperts(layer)
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("combination", ["sum", "average"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", KERNELS)
def test_parts_are_summed_once(name, order, combination):
    torch.manual_seed(3)
    shared = SharedExpertConfig(20, combination=combination)
    block, hidden, reduced = MoEBlock(config(has_bias=True, shared_experts=shared)), torch.randn(7, H), []

    def all_reduce(part):
        reduced.append(part.shape)
        whole = part.detach().clone()
        dist.all_reduce(whole)
        return whole

    experts = KERNELS[name](shard_of_experts(block.experts))
    is_reduced = name == "reduced" and experts.prepare_finalize.output_is_reduced
    part = PartOfSharedExperts(block.shared_experts, TensorShard(dist.get_rank(), 2))
    reduction = Reduction(all_reduce, of="shared" if is_reduced else "sum")
    runner = MoERunner(experts, block.gate, shared_experts=part, shared_order=order, reduction=reduction)
    with torch.no_grad():
        assert_matches_oracle(runner(hidden), oracle.block(block, hidden))
    assert reduced == [(7, H)]
