"""Checkpoints into experts that ranks share: each rank reads its own part, and the layer is that of one device."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import layers.vllm
from layers import EplbState, FusedMoE, MoEBlock, MoEConfig, checkpoint_state_dict, load_checkpoint
from layers.parallel import ExpertParallel, ExpertRebalancer, ExpertTensorParallel
from tests.helpers import assert_same
from tests.layers.parallel.world import on_ranks

STYLES = {
    "allreduce": ExpertParallel("allreduce"),
    "alltoall": ExpertParallel("alltoall", max_tokens=10),
    "tensor": ExpertTensorParallel(),
}


def stock(family):
    from tests.huggingface.families import tiny_model

    torch.manual_seed(5)
    model = tiny_model(family)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    return model


def empty_block(config, style, mesh=None):
    """As a model too large for one device is made: sharded without memory, then given what is here, of nonsense."""
    block = MoEBlock(config, device="meta")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    parallelize_module(block, mesh, {"experts": STYLES[style]})
    block.to_empty(device="cpu")
    for parameter in block.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    return block


@on_ranks(2)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_each_rank_reads_its_part(family, style):
    model = stock(family)
    config, prefix, hidden = (
        MoEConfig.from_hf(model.config),
        "model.layers.1",
        torch.randn(9, model.config.hidden_size),
    )
    whole, sharded = MoEBlock(config), empty_block(config, style)
    for block in (whole, sharded):
        load_checkpoint(block, model.state_dict(), prefix=prefix, progress=False)
    assert_same([sharded(hidden)], [whole(hidden)], tolerance=1e-6)
    for name, parameter in sharded.experts.named_parameters(recurse=False):
        assert isinstance(parameter, DTensor)
        expected = whole.experts.get_parameter(name)
        assert_same([parameter.full_tensor().view(expected.shape)], [expected], tolerance=0)
        if name.endswith("weight"):
            assert parameter.to_local().numel() * 2 == expected.numel()


@on_ranks(1, 2)
@pytest.mark.parametrize("num_redundant_experts", [2, 8])
@pytest.mark.parametrize(
    ("family", "is_saved"), [("qwen3_moe", False), ("qwen3_moe", True), ("gpt_oss", True)]
)
def test_experts_with_places_for_replicas(family, is_saved, num_redundant_experts):
    """Which are empty until experts are placed; with eight of them the second rank has no other."""
    model, given = stock(family), {"prefix": "model.layers.1"}
    config, hidden = MoEConfig.from_hf(model.config), torch.randn(9, model.config.hidden_size)
    block, wider = MoEBlock(config), replace(config, num_redundant_experts=num_redundant_experts)
    load_checkpoint(block, model.state_dict(), progress=False, **given)
    sharded = empty_block(wider, "allreduce")
    stored = checkpoint_state_dict(block, model.config, **given) if is_saved else model.state_dict()
    for each in (sharded, whole := MoEBlock(wider)):
        load_checkpoint(each, stored, progress=False, **given)
    saved = checkpoint_state_dict(whole, model.config, **given)
    assert all(torch.equal(saved[name], each) for name, each in model.state_dict().items() if name in saved)
    ExpertRebalancer(sharded).place("linear")
    whole.experts.set_eplb_state(0, *EplbState.initial(1, config.num_experts, num_redundant_experts))
    assert_same([sharded(hidden), whole(hidden)], [block(hidden)] * 2, tolerance=1e-6)


@on_ranks(2)
def test_from_files_of_single_experts(tmp_path):
    model = stock("qwen3_moe")
    config, hidden = MoEConfig.from_hf(model.config), torch.randn(9, model.config.hidden_size)
    model.save_pretrained(tmp_path)  # transformers writes on the first rank alone
    dist.barrier()
    whole, sharded = MoEBlock(config), empty_block(config, "allreduce")
    for block in (whole, sharded):
        load_checkpoint(block, tmp_path, prefix="model.layers.0", progress=False)
    assert_same([sharded(hidden)], [whole(hidden)], tolerance=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("split", ["router", "experts"])
def test_what_is_split_otherwise_is_refused(split):
    model = stock("qwen3_moe")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    block = empty_block(MoEConfig.from_hf(model.config), "allreduce", mesh["ep"])
    fully_shard(block.gate if split == "router" else block.experts, mesh=mesh["dp"])
    name = "gate.weight" if split == "router" else "experts.w13_weight"
    with pytest.raises(TypeError, match=rf"{name} is a DTensor: expected plain tensors"):
        load_checkpoint(block, model.state_dict(), prefix="model.layers.1", progress=False)


@on_ranks(1)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_one_rank_saves_what_it_has_loaded(family, style):
    model = stock(family)
    block, given = empty_block(MoEConfig.from_hf(model.config), style), {"prefix": "model.layers.1"}
    load_checkpoint(block, model.state_dict(), progress=False, **given)
    saved, expected = checkpoint_state_dict(block, model.config, **given), model.state_dict()
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in saved or family == "gpt_oss"
    load_checkpoint(whole := MoEBlock(MoEConfig.from_hf(model.config)), saved, progress=False, **given)
    assert_same(
        [whole.experts.w13_weight], [block.experts.w13_weight.to_local().view_as(whole.experts.w13_weight)], 0
    )
    assert all(torch.equal(each, expected[name]) for name, each in saved.items() if name in expected)
    assert not any(isinstance(each, DTensor) for each in saved.values())


@on_ranks(1)
@pytest.mark.parametrize("place", ["layer", "beside"])
def test_what_is_split_otherwise_is_not_saved(place):
    model = stock("qwen3_moe")
    block, norm = MoEBlock(MoEConfig.from_hf(model.config)), torch.nn.LayerNorm(4)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    fully_shard(block.experts if place == "layer" else norm, mesh=mesh)
    name = "experts.w13_weight" if place == "layer" else "norm.weight"
    module = torch.nn.ModuleDict({"0": torch.nn.ModuleDict({"mlp": block}), "norm": norm})
    with pytest.raises(
        TypeError, match=rf"{name} is a DTensor: expected plain tensors, of a module that is not"
    ):
        checkpoint_state_dict(module, model.config)


def _shards(num_experts: int) -> list[tuple[str, str, torch.Tensor]]:
    """(parameter, shard id, tensor of all experts), over all ranks."""
    generator = torch.Generator().manual_seed(3)
    kinds = {"w13_weight": (8, 6), "w2_weight": (6, 8), "w13_bias": (8,), "w2_bias": (6,)}
    ids = {"w13_weight": ("w1", "w3"), "w2_weight": ("w2",), "w13_bias": ("w3", "w1"), "w2_bias": ("w2",)}
    return [
        (name, shard_id, torch.randn(num_experts, *shape, generator=generator))
        for name, shape in kinds.items()
        for shard_id in ids[name]
    ]


def _load_one_by_one(experts: FusedMoE, *, stacked: bool) -> list[bool]:
    """As a model's loop does; stacked, all experts at once."""
    parameters = dict(experts.named_parameters())
    return [
        parameters[name].weight_loader(
            parameters[name],
            tensor if stacked else tensor[expert],
            name,
            shard_id,
            expert,
            return_success=True,
        )
        for name, shard_id, tensor in _shards(4)
        for expert in range(1 if stacked else 4)
    ]


@on_ranks(2)
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_one_tensor_at_a_time(style, stacked, activation):
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 6, "intermediate_size": 8, "has_bias": True}
    whole, sharded = (layers.vllm.fused_moe(**sizes, activation=activation) for _ in range(2))
    parallelize_module(sharded, init_device_mesh("cpu", (2,)), STYLES[style])
    assert all(_load_one_by_one(whole, stacked=stacked))
    loaded = _load_one_by_one(sharded, stacked=stacked)
    assert sum(loaded) == len(loaded) // (
        1 if stacked or style == "tensor" else 2
    )  # experts of others are not
    for name, parameter in sharded.named_parameters():
        expected = whole.get_parameter(name)
        assert_same([parameter.full_tensor().view(expected.shape)], [expected], tolerance=0)
    hidden, logits = torch.randn(9, 6), torch.randn(9, 4)
    assert_same([sharded(hidden, logits)], [whole(hidden, logits)], tolerance=1e-6)


@on_ranks(2)
def test_one_tensor_of_what_is_split_otherwise_is_refused():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    plain, sharded = (FusedMoE(MoEConfig(4, 2, 6, 8)) for _ in range(2))
    parallelize_module(sharded, mesh["ep"], STYLES["allreduce"])
    for experts in (plain, sharded):
        fully_shard(experts, mesh=mesh["dp"])
        with pytest.raises(
            TypeError, match="param is a DTensor: expected a plain tensor, or one that a style"
        ):
            experts.weight_loader(experts.w2_weight, torch.ones(6, 8), "weight", "w2", 0)
