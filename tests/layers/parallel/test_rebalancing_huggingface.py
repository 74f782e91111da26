"""Experts of a model of transformers that change places while it generates."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
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


@on_ranks(2)
def test_experts_that_have_moved_are_not_saved(tmp_path):
    """A model would load each as another."""
    from tests.huggingface.families import tiny_model

    stock = tiny_model("qwen3_moe")
    model, mesh = copy.deepcopy(stock), init_device_mesh("cpu", (2,))
    huggingface.patch(model, mesh=mesh, style=ExpertParallel("alltoall"))
    rebalancer = ExpertRebalancer(model)
    rebalancer.place("round_robin")
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.experts has experts that have moved: expected them in"
    ):
        model.save_pretrained(tmp_path, state_dict=_gathered(model))
    assert not any(tmp_path.iterdir())
    rebalancer.place("linear")
    state = _gathered(model)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path, state_dict=state)
        loaded = type(stock).from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(loaded[name], each) for name, each in stock.state_dict().items())
    dist.barrier()


def _gathered(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
