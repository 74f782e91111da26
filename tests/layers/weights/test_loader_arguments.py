"""What loaders refuse before they write anything, and checkpoints whose tensors have more than one name or expert."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.prune import random_unstructured

from layers import FusedMoE, MoEBlock, MoEConfig, load_checkpoint

E, H, I = 4, 16, 12


def config(**options) -> MoEConfig:
    return MoEConfig(E, 2, H, I, **options)


@pytest.mark.parametrize(
    ("param", "shard_id", "expected"),
    [("w13_weight", "w2", "'w1' or 'w3'"), ("w2_weight", "w1", "'w2'"), ("w2_bias", "w3", "'w2'")],
)
def test_a_shard_of_another_parameter_is_refused(param, shard_id, expected):
    """Gate and up have room for a down projection, whatever is left of them would become zero."""
    layer = FusedMoE(MoEConfig(E, 2, H, H, has_bias=True))
    before = {name: each.clone() for name, each in layer.named_parameters()}
    loaded = torch.randn(H) if param.endswith("bias") else torch.randn(H, H)
    with pytest.raises(ValueError) as caught:
        layer.weight_loader(layer.get_parameter(param), loaded, f"experts.0.{param}", shard_id, 0)
    assert str(caught.value) == f"shard_id={shard_id!r} with param={param}: expected {expected}"
    assert all(torch.equal(before[name], each) for name, each in layer.named_parameters())


@pytest.mark.parametrize("which", ["param", "loaded_weight"])
def test_tensors_without_memory_are_refused(which):
    layer = FusedMoE(config(), device="meta" if which == "param" else None)
    loaded = torch.randn(I, H, device="meta" if which == "loaded_weight" else None)
    with pytest.raises(
        ValueError, match=f"{which} is on the meta device: expected memory with values, or for"
    ):
        layer.weight_loader(layer.w13_weight, loaded, "experts.0.w1.weight", "w1", 0)


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_tensors_are_refused(sparse):
    layer = FusedMoE(config())
    with pytest.raises(TypeError, match=r"loaded_weight is torch.sparse_\w+: expected a dense tensor"):
        layer.weight_loader(layer.w13_weight, sparse(torch.randn(I, H)), "experts.0.w1.weight", "w1", 0)


@pytest.mark.parametrize(
    ("shape", "name", "shard_id", "loaded", "message"),
    [
        ((), "input_scale", "w1", (), "param has shape (): expected the experts in its first dimension"),
        (
            (E,),
            "weight_scale",
            "w1",
            (),
            "param has () per expert: expected one value for each of gate and up",
        ),
        (
            (E, 1),
            "weight_scale",
            "w3",
            (),
            "param has (1,) per expert: expected one value for each of gate and up",
        ),
        (
            (E,),
            "bias",
            "w3",
            (I,),
            "param has () per expert: expected gate and up, as many each, in dimension -1",
        ),
        (
            (E, 0),
            "bias",
            "w1",
            (I,),
            "param has (0,) per expert: expected gate and up, as many each, in dimension -1",
        ),
        (
            (E, 2 * I + 1, H),
            "weight",
            "w1",
            (I, H),
            "param has (25, 16) per expert: expected gate and up, as many each, in dimension -2",
        ),
        (
            (E, 2 * I - 2, H),
            "weight",
            "w1",
            (I, H),
            "loaded_weight has (12, 16) for this rank: expected (11, 16)",
        ),
    ],
)
def test_tensors_without_room_for_a_shard_are_refused(shape, name, shard_id, loaded, message):
    param = torch.zeros(shape)
    param.quant_method = "tensor"
    with pytest.raises(ValueError) as caught:
        FusedMoE(config()).weight_loader(param, torch.ones(loaded), f"experts.0.w1.{name}", shard_id, 0)
    assert str(caught.value) == message and not param.any()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("expert_map", [None, torch.tensor([-1, 0, 1, -1])], ids=["all", "some"])
def test_parameters_of_other_experts_are_refused(expert_map, stacked):
    """A parameter of another layer, or of another rank, would take some of the experts."""
    layer = FusedMoE(config(), expert_map)
    param, loaded = torch.zeros(1, 2 * I, H), torch.ones(E, I, H)
    message = f"param has 1 experts: expected {E if expert_map is None else 2}, those here"
    with pytest.raises(ValueError, match=message):
        layer.weight_loader(param, loaded if stacked else loaded[2], "experts.w1.weight", "w1", 2)
    assert not param.any()


@pytest.mark.parametrize("held", [slice(0, E), slice(1, 3)])
def test_fused_checkpoints_have_biases_of_all_experts(held):
    expert_map = torch.full((E,), -1, dtype=torch.int32)
    expert_map[held] = torch.arange(held.stop - held.start, dtype=torch.int32)
    layer = FusedMoE(config(has_bias=True), None if held == slice(0, E) else expert_map)
    gate, up, down = torch.randn(E, I), torch.randn(E, I), torch.randn(E, H)
    layer.weight_loader(layer.w13_bias, gate, "experts.w1.bias", "w1", 0)
    layer.weight_loader(layer.w13_bias, up, "experts.w3.bias", "w3", 0)
    layer.weight_loader(layer.w2_bias, down, "experts.w2.bias", "w2", 0)
    assert torch.equal(layer.w13_bias, torch.cat([gate, up], 1)[held])
    assert torch.equal(layer.w2_bias, down[held])
    with pytest.raises(ValueError, match=r"loaded_weight has shape \(3, 12\): expected 4 experts"):
        layer.weight_loader(layer.w13_bias, gate[:3], "experts.w1.bias", "w1", 0)


def checkpoint(block: MoEBlock) -> dict[str, torch.Tensor]:
    stored = {"mlp.gate.weight": block.gate.weight.detach()}
    for expert, (gate_up, down) in enumerate(zip(block.experts.w13_weight, block.experts.w2_weight)):
        for name, tensor in (("gate", gate_up[:I]), ("up", gate_up[I:]), ("down", down)):
            stored[f"mlp.experts.{expert}.{name}_proj.weight"] = tensor.detach()
    return stored


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda x: x.to_sparse(), "torch.sparse_coo"),
        (lambda x: torch.nested.nested_tensor([x[:2], x[2:]]), "nested"),
    ],
)
def test_state_dicts_with_tensors_that_are_not_dense_are_refused_whole(made, kind):
    block = MoEBlock(config())
    stored = checkpoint(MoEBlock(config()))
    name = "mlp.experts.2.up_proj.weight"
    stored[name] = made(stored[name])
    before = {name: each.clone() for name, each in block.state_dict().items()}
    with pytest.raises(TypeError) as caught:
        load_checkpoint(block, stored, progress=False)
    assert str(caught.value) == f"state dict has {name!r}, which is {kind}: expected a dense tensor"
    assert all(torch.equal(before[name], each) for name, each in block.state_dict().items())


@pytest.mark.parametrize("change", [spectral_norm, partial(random_unstructured, amount=0.5)])
def test_what_is_computed_is_not_loaded(change):
    """It was written to, told a success, and computed again by the next forward."""
    layer = FusedMoE(config())
    change(layer, "w2_weight")
    with pytest.raises(ValueError, match="param is computed of other tensors: expected a parameter"):
        layer.weight_loader(layer.w2_weight, torch.randn(H, I), "experts.0.w2.weight", "w2", 0)


def tied(norm: bool) -> nn.Module:
    model = nn.Module()
    model.first = model.second = MoEBlock(config())
    if norm:
        model.norm = nn.LayerNorm(H)
    return model


@pytest.mark.parametrize("norm", [False, True])
def test_a_layer_of_two_names_is_loaded_once(norm):
    model, other = tied(norm), MoEBlock(config())
    stored = checkpoint(other)
    if norm:
        stored |= {"norm.weight": torch.full((H,), 2.0), "norm.bias": torch.full((H,), 3.0)}
    load_checkpoint(model, stored, progress=False)
    assert model.first is model.second
    assert all(torch.equal(each, other.state_dict()[name]) for name, each in model.first.state_dict().items())
    assert not norm or (torch.equal(model.norm.bias, stored["norm.bias"]) and model.norm.weight[0] == 2)
