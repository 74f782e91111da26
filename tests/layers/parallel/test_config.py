"""Data, tensor and sequence parallelism around a layer, in every combination of four ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from layers import TensorShard
from layers.parallel import ParallelConfig
from tests.helpers import assert_matches_oracle, assert_same, mixed
from tests.layers import oracle
from tests.layers.parallel.test_styles import OPTIONS, E, H, I, loss, make_block
from tests.layers.parallel.world import on_ranks

COMBINATIONS = [
    ParallelConfig(dp, ep, tp, sp)
    for dp, tp in ((1, 4), (2, 2), (4, 1))
    for ep in (False, True)
    for sp in (False, True)
]
COMBINATIONS += [ParallelConfig(dp, ep, tp, pcp=2) for dp, tp in ((1, 2), (2, 1)) for ep in (False, True)]
combinations = pytest.mark.parametrize("config", COMBINATIONS, ids=str)


def parallel(block, config, **options):
    twin = copy.deepcopy(block)
    mesh = init_device_mesh("cpu", (config.num_groups, config.tp), mesh_dim_names=("dp", "tp"))
    config.parallelize(twin.experts, mesh, **options)
    return twin


def tokens_of(rank: int, config: ParallelConfig, dtype=torch.float32):
    """Of each data-parallel rank, or part of one, some of its own, which sequence parallel ranks split."""
    number = rank // config.tp
    tokens = torch.randn(
        8 - number, H, generator=torch.Generator().manual_seed(number), dtype=torch.float64
    ).to(dtype)
    return tokens.tensor_split(config.tp)[rank % config.tp].clone() if config.sp else tokens


@on_ranks(4)
@pytest.mark.parametrize(("config", "options"), mixed(COMBINATIONS, ({}, {"max_tokens": 8})), ids=str)
def test_values(config, options):
    if options and config.num_groups == 1 and not config.sp:
        return  # all have the same tokens, and nothing is static to be
    block, hidden = make_block(**OPTIONS["plain"]), tokens_of(dist.get_rank(), config)
    assert_matches_oracle(parallel(block, config, **options)(hidden), oracle.block(block, hidden))


@on_ranks(4)
@pytest.mark.parametrize("ep", [False, True])
def test_a_mesh_without_names(ep):
    block, config = make_block(**OPTIONS["plain"]), ParallelConfig(dp=2, ep=ep, tp=2)
    twin, hidden = copy.deepcopy(block), tokens_of(dist.get_rank(), config)
    config.parallelize(twin.experts, init_device_mesh("cpu", (2, 2)))
    assert_matches_oracle(twin(hidden), oracle.block(block, hidden))


@on_ranks(4)
@pytest.mark.parametrize("order", [[[0, 2], [1, 3]], [[3, 2], [1, 0]]], ids=str)
def test_a_mesh_in_another_order(order, tmp_path):
    """A checkpoint has the experts in theirs."""
    block, mesh = make_block(**OPTIONS["plain"]), DeviceMesh("cpu", order, mesh_dim_names=("dp", "tp"))
    twin, config = copy.deepcopy(block), ParallelConfig(dp=2, ep=True, tp=2)
    config.parallelize(twin.experts, mesh)
    hidden = tokens_of(2 * mesh.get_local_rank("dp"), config)
    assert_matches_oracle(twin(hidden), oracle.block(block, hidden))
    checkpoint.save(twin.experts.state_dict(), checkpoint_id=tmp_path)
    loaded = {name: torch.zeros_like(each) for name, each in block.experts.state_dict().items()}
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    assert_same(list(loaded.values()), list(block.experts.state_dict().values()))


@on_ranks(4)
@combinations
def test_experts_lie_as_configured(config):
    experts = parallel(make_block(**OPTIONS["plain"]), config).experts
    parts = experts.w2_weight.to_local().shape
    assert parts == ((E // 4, H, I) if config.ep else (E, H, I // 4))
    assert config.ep_size == (4 if config.ep else 1)
    assert experts.shard == config.shard(dist.get_rank())


@on_ranks(4)
@combinations
def test_static_shapes_are_those_of_the_exchange(config):
    exchange = parallel(make_block(), config, max_tokens=8).experts.parallel.exchange
    exchange = getattr(exchange, "others", exchange)  # None: all ranks have the same tokens, nothing is sent
    assert exchange is None or exchange.max_tokens == 8
    assert (exchange is None) == (config.num_groups == 1 and not config.sp)


@on_ranks(4)
@pytest.mark.parametrize(
    "config", [each for each in COMBINATIONS if each.dp == each.tp == 2 and not each.sp], ids=str
)
def test_gradients(config):
    block, rank = make_block(torch.float64, **OPTIONS["plain"]), dist.get_rank()
    sharded, hidden = parallel(block, config), tokens_of(rank, config, torch.float64).requires_grad_()
    loss(sharded(hidden)).backward()
    expected = [tokens_of(first, config, torch.float64).requires_grad_() for first in (0, 2)]
    for each in expected:
        loss(block(each)).backward()
    assert_same([hidden.grad], [expected[rank // 2].grad])
    for name, parameter in sharded.experts.named_parameters():
        grad = block.experts.get_parameter(name).grad
        assert_same([parameter.grad.full_tensor().view(grad.shape)], [grad])


def test_sizes():
    config = ParallelConfig(dp=2, ep=False, tp=3, sp=True)
    assert (config.num_ranks, config.ep_size, config.sp_size) == (6, 1, 3)
    assert config.num_tokens([7, 0]) == (3, 3, 3, 0, 0, 0)
    assert config.shard(4) == TensorShard(4, 6)
    assert ParallelConfig(dp=2, tp=2).num_tokens([7, 5]) == (7, 7, 5, 5)
    config = ParallelConfig(dp=2, tp=2, sp=True, pcp=3)
    assert (config.num_ranks, config.ep_size) == (12, 1)
    assert config.num_tokens([7, 1]) == (2,) * 6 + (1,) * 6
    with pytest.raises(TypeError, match="of_each=7: expected Sequence, got int"):
        ParallelConfig(dp=2).num_tokens(7)
    with pytest.raises(ValueError, match=r"of_each=\[7\]: expected dp=2 numbers"):
        config.num_tokens([7])
    with pytest.raises(ValueError, match=r"of_each\[1\]=-1: expected at least 0"):
        config.num_tokens([7, -1])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dp": 0}, "dp=0: expected at least 1"),
        ({"pcp": 0}, "pcp=0: expected at least 1"),
        ({"tp": 1.5}, "tp=1.5: expected an int"),
        ({"ep": 4}, "ep=4: expected bool"),
        ({"sp": None}, "sp=None: expected bool"),
    ],
)
def test_configs_that_make_no_sense(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ParallelConfig(**options)


def test_one_rank_of_each_kind_unless_it_is_told():
    assert ParallelConfig() == ParallelConfig(dp=1, ep=False, tp=1, sp=False, pcp=1)


@on_ranks(4)
def test_meshes_that_do_not_fit():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"mesh has shape \(2, 2\): expected \(4, 1\) = \[dp \* pcp, tp\]"):
        ParallelConfig(dp=4).parallelize(make_block().experts, mesh)
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "pp"))
    with pytest.raises(ValueError, match="mesh has 2 ranks: expected all 4"):
        ParallelConfig(dp=2).parallelize(make_block().experts, cube["dp", "tp"])


@on_ranks(2)
@pytest.mark.parametrize("ep", [False, True])
def test_arguments_that_make_no_sense(ep):
    config, experts = ParallelConfig(dp=2, ep=ep), make_block().experts
    with pytest.raises(TypeError, match="mesh=None: expected DeviceMesh, got NoneType"):
        config.parallelize(experts, None)
    with pytest.raises(ValueError, match="dispatcher='ring': expected one of 'auto', 'allgather'"):
        config.parallelize(experts, init_device_mesh("cpu", (2, 1)), dispatcher="ring")
