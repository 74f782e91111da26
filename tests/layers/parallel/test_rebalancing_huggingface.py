"""Experts of a model of transformers that change places while it generates."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from layers import huggingface
from layers.parallel import ExpertParallel, ExpertRebalancer
from tests.layers.parallel.world import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("dispatcher", ["allreduce", "alltoall"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_logits_while_experts_move(family, dispatcher):
    from tests.huggingface.families import tiny_model

    stock = tiny_model(family)
    model, mesh = copy.deepcopy(stock), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    names = list(model.state_dict())
    huggingface.patch(model, mesh=mesh, style=ExpertParallel(dispatcher))
    rebalancer = ExpertRebalancer(model)
    seed = 0 if dispatcher == "allreduce" else dist.get_rank()
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(seed))
    expected = stock(ids).logits

    def check():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)

    check()
    before = rebalancer.imbalance()
    rebalancer.start()
    while rebalancer.step():
        check()
    assert not any(layer.mlp.experts.moe_ops_balancing.is_initial() for layer in model.model.layers)
    assert rebalancer.load_per_rank()[-1].sum() == 0
    rebalancer.start(), rebalancer.finish()
    check()
    assert (rebalancer.imbalance() <= before + 1e-9).all() and before.max() > 1
    assert list(model.state_dict()) == names
