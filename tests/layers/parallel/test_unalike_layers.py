"""Layers and styles that differ between ranks: each rank raises at once, and says which rank has what."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils.parametrizations import spectral_norm

from layers import ExpertLora, ExpertsConfig, FusedMoE, MoEConfig
from layers.parallel import ExpertParallel, ExpertTensorParallel, ParallelConfig
from tests.layers.parallel.test_styles import mesh_of_all
from tests.layers.parallel.world import on_ranks

E, K, H, I = 8, 2, 16, 12


def layer(num_experts=E, intermediate_size=I, **options) -> FusedMoE:
    return FusedMoE(MoEConfig(num_experts, K, H, intermediate_size, **options))


def adapted() -> FusedMoE:
    made = layer()
    made.lora = ExpertLora(made, 1, 2, torch.zeros(4, dtype=torch.int32))
    return made


def parametrised() -> FusedMoE:
    return spectral_norm(layer(), "w2_weight")


NOT_SHARDABLE = {
    "computed": (parametrised, ExpertParallel(), "w2_weight is parametrised or pruned: expected a plain"),
    "experts": (lambda: layer(7), ExpertParallel(), "num_experts=7: expected a multiple of 2 ranks"),
    "columns": (
        lambda: layer(intermediate_size=11),
        ExpertTensorParallel(),
        "intermediate_size=11: expected a multiple of the shard's size=2",
    ),
    "adapters": (adapted, ExpertParallel(), "module has lora: expected None"),
    "norm": (
        lambda: layer(experts=ExpertsConfig(post_norm_eps=0.5)),
        ExpertTensorParallel(),
        "experts.post_norm_eps=0.5: expected None among ranks",
    ),
    "emit": (
        lambda: layer(emit="batch_invariant"),
        ExpertParallel(),
        "config.emit='batch_invariant': expected another among ranks",
    ),
    "module": (lambda: nn.Linear(3, 3), ExpertParallel(), "module=Linear: expected FusedMoE"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", NOT_SHARDABLE)
def test_what_one_rank_cannot_shard_is_told_to_all(name):
    make, style, message = NOT_SHARDABLE[name]
    module = make() if dist.get_rank() == 1 else layer()
    with pytest.raises(
        ValueError, match=r"error differs between ranks: None on rank 0; .* on rank 1;"
    ) as caught:
        parallelize_module(module, mesh_of_all(), style)
    assert message in str(caught.value)


@on_ranks(4)
def test_what_all_cannot_shard_is_the_error_of_each():
    with pytest.raises(TypeError) as caught:
        parallelize_module(nn.Linear(3, 3), mesh_of_all(), ExpertParallel())
    assert str(caught.value).startswith("module=Linear: expected FusedMoE")


@on_ranks(2)
def test_kinds_of_styles_that_differ():
    style = [ExpertParallel("allreduce"), ExpertTensorParallel()][dist.get_rank()]
    with pytest.raises(ValueError) as caught:
        parallelize_module(layer(), mesh_of_all(), style)
    assert str(caught.value) == (
        "style differs between ranks: 'ExpertParallel' on rank 0; 'ExpertTensorParallel' on rank 1; "
        "expected the same on all"
    )


@on_ranks(2)
def test_configs_of_a_layer_that_differ():
    config = ParallelConfig(dp=2, ep=True, sp=dist.get_rank() == 0)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        ValueError, match=r"style.config differs between ranks: .*sp=True.* on rank 0; .*sp=False"
    ):
        config.parallelize(layer(), mesh)


@on_ranks(2)
def test_sources_that_differ():
    with pytest.raises(
        ValueError, match=r"style.src_data_rank differs between ranks: 0 on rank 0; 1 on rank 1"
    ):
        parallelize_module(layer(), mesh_of_all(), ExpertParallel(), src_data_rank=dist.get_rank())


@on_ranks(2)
def test_devices_that_differ():
    made = layer().to(["cpu", "meta"][dist.get_rank()])
    with pytest.raises(
        ValueError, match=r"parameters differs between ranks: .*'cpu'.* on rank 0; .*'meta'.* on"
    ):
        parallelize_module(made, mesh_of_all(), ExpertParallel())


@on_ranks(2)
@pytest.mark.parametrize("style", [ExpertParallel(), ExpertTensorParallel()], ids=["whole", "parts"])
def test_a_mesh_in_another_order_than_its_group(style):
    """A checkpoint would have experts in the order of the mesh, that ranks hold in that of the group."""
    experts, message = layer(), r"mesh has ranks \[1, 0\]: expected them in ascending order"
    with pytest.raises(ValueError, match=message):
        parallelize_module(experts, DeviceMesh("cpu", [1, 0]), style)
    assert not hasattr(experts.w2_weight, "placements")
