"""What an ExpertRebalancer refuses, on all ranks and before anything is sent."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from layers import FusedMoE
from layers.parallel import ExpertParallel, ExpertRebalancer, ExpertTensorParallel, rebalancing
from tests.layers.parallel.test_rebalancing import make_blocks, mesh_of_all, parallel, tokens_of
from tests.layers.parallel.world import on_ranks


@on_ranks(2)
def test_a_plan_that_fails_raises_on_all_ranks():
    model = parallel(make_blocks())
    rebalancer = ExpertRebalancer(model)
    with mock.patch.object(rebalancing, "rebalance_experts", side_effect=MemoryError("no room")):
        rebalancer.start()
        with pytest.raises(RuntimeError, match="planning failed on rank 0, the first of the mesh") as caught:
            rebalancer.finish()
    assert isinstance(caught.value.__cause__, MemoryError) == (dist.get_rank() == 0)
    assert model[0].experts.balancing.is_initial() and not rebalancer.is_moving
    rebalancer.start(), rebalancer.finish()


@on_ranks(2)
def test_one_thing_at_a_time():
    rebalancer = ExpertRebalancer(parallel(make_blocks(2)))
    rebalancer.start()
    for another in (rebalancer.start, lambda: rebalancer.place("linear")):
        with pytest.raises(
            RuntimeError, match=r"experts are being moved: expected step\(\) until it returns False"
        ):
            another()
    rebalancer.finish()
    with pytest.raises(ValueError, match="strategy='x': expected one of 'linear', 'round_robin'"):
        rebalancer.place("x")


@on_ranks(2)
def test_ranks_that_differ_are_refused_before_anything_is_sent():
    rank, model = dist.get_rank(), parallel(make_blocks())
    with pytest.raises(ValueError, match="num_groups differs between ranks: 1 on rank 0; 2 on rank 1"):
        ExpertRebalancer(model, num_groups=1 + rank)
    rebalancer = ExpertRebalancer(model)
    with pytest.raises(
        ValueError, match="strategy differs between ranks: 'linear' on rank 0; 'round_robin' on"
    ):
        rebalancer.place(["linear", "round_robin"][rank])
    balancing = model[0].experts.balancing
    if rank == 1:
        balancing.logical_to_physical[:2, 0] = torch.tensor([1, 0])
    message = (
        r"placement of 0.experts differs between ranks: \[0, 1, 2, .* on rank 0; \[1, 0, 2, .* on rank 1"
    )
    for move in (rebalancer.start, lambda: rebalancer.place("linear")):
        with pytest.raises(ValueError, match=message):
            move()
    assert not rebalancer.is_moving
    dist.barrier()  # nothing is left on its way


@on_ranks(2)
def test_models_that_cannot_be_rebalanced():
    with pytest.raises(TypeError, match="model=None: expected Module"):
        ExpertRebalancer(None)
    with pytest.raises(ValueError, match="model has no experts that are sharded: expected some"):
        ExpertRebalancer(make_blocks())
    config = make_blocks()[0].experts.config
    parts = parallelize_module(FusedMoE(config), mesh_of_all(), ExpertTensorParallel())
    with pytest.raises(
        ValueError, match=r"model has parameters placed \(Shard\(dim=2\),\): expected \(Shard"
    ):
        ExpertRebalancer(parts)
    pruned = parallelize_module(FusedMoE(config), mesh_of_all(), ExpertParallel())
    del pruned.w2_weight  # as pruning does
    with pytest.raises(ValueError, match="w2_weight is parametrised or pruned: expected a plain parameter"):
        ExpertRebalancer(pruned)
    two_ways = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    block = parallelize_module(make_blocks()[0], two_ways["ep"], {"experts": ExpertParallel()})
    fully_shard(block.experts, mesh=two_ways["dp"])
    with pytest.raises(ValueError, match=r"experts has parameters placed .* by ExpertParallel alone"):
        ExpertRebalancer(block)
    blocks, alone = make_blocks(2), two_ways["dp"]
    for block, mesh in zip(blocks, (mesh_of_all(), alone), strict=True):
        parallelize_module(block, mesh, {"experts": ExpertParallel()})
    with pytest.raises(
        ValueError, match="model has experts on several meshes: expected one ExpertRebalancer"
    ):
        ExpertRebalancer(blocks)


@on_ranks(2)
@pytest.mark.parametrize("has_run", [False, True])
def test_experts_that_fully_shard_has_gone_around_since(has_run):
    """What a forward has gathered lies as before, and is a copy."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    block = parallelize_module(make_blocks()[0], mesh["ep"], {"experts": ExpertParallel()})
    rebalancer = ExpertRebalancer(block)
    rebalancer.place("linear")
    fully_shard(block.experts, mesh=mesh["dp"])
    if has_run:
        block(tokens_of(dist.get_rank()))
    held = block.experts.balancing.held()
    for move in (rebalancer.start, lambda: rebalancer.place("round_robin")):
        with pytest.raises(ValueError, match="experts move before fully_shard"):
            move()
    assert not rebalancer.is_moving and torch.equal(block.experts.balancing.held(), held)


@on_ranks(2)
def test_options_are_looked_at_where_all_layers_have_state():
    model = parallel(make_blocks())
    ExpertRebalancer(model)
    with pytest.raises(TypeError, match="num_real_token"):
        ExpertRebalancer(model, num_real_token=torch.tensor(5))
    with pytest.raises(TypeError, match="num_real_tokens=5: expected Tensor"):
        ExpertRebalancer(model, num_real_tokens=5)
