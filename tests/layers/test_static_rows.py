"""Layers in 8 bits whose rows have scales that a checkpoint brings."""

import copy

import pytest
import torch

import moe_ops
from layers import (
    BatchedExperts,
    BatchedPrepareAndFinalize,
    FusedMoE,
    LocalPrepareAndFinalize,
    ModularKernel,
    MoEConfig,
    StandardExperts,
    WeightScale,
    huggingface,
    quantise_experts,
)
from layers.weights.scales import INPUT_SCALES
from tests.helpers import relative_error
from tests.layers.lora import Adapter, attach, make_adapters

E, K, H, I, T = 6, 2, 32, 16, 9
DTYPES = (torch.float8_e4m3fn, torch.int8)


def _layer(kind=WeightScale.CHANNEL, dtype=torch.float8_e4m3fn, **options):
    torch.manual_seed(5)
    layer = FusedMoE(MoEConfig(E, K, H, I, has_bias=True, **options))
    quantise_experts(layer, kind, (8, 16), dtype=dtype, rows="static")
    with torch.no_grad():
        layer.w13_input_scale.uniform_(0, 0.02)
        layer.w2_input_scale.uniform_(0, 0.002)
    return layer


def _routed(layer):
    logits = torch.randn(T, E)
    return torch.randn(T, H), logits, layer.route(logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [WeightScale.TENSOR, WeightScale.CHANNEL, WeightScale.BLOCK])
def test_values(kind, dtype):
    """Those of the operator with the largest scale of each product, to the bit."""
    layer = _layer(kind, dtype)
    x, logits, routed = _routed(layer)
    blocks = {WeightScale.TENSOR: ((I, H), (H, I)), WeightScale.BLOCK: ((8, 16), (8, 16))}
    of_w13, of_w2 = blocks.get(kind, ((1, H), (1, I)))
    up, down = layer.w13_weight_scale, layer.w2_weight_scale
    if kind is WeightScale.TENSOR:
        up, down = up[..., None], down[:, None, None]
    weights = (
        moe_ops.ScaledWeight(layer.w13_weight, up, of_w13),
        moe_ops.ScaledWeight(layer.w2_weight, down, of_w2),
    )
    named = {"w13_bias": layer.w13_bias, "w2_bias": layer.w2_bias}
    rows = moe_ops.InputScales(layer.w13_input_scale.max()[None], layer.w2_input_scale.max()[None])
    given = x, *weights, routed.topk_weights, routed.topk_ids
    expected = moe_ops.scaled_fused_experts(*given, **named, rows=rows)
    found = layer(x, logits)
    assert torch.equal(found, expected) and expected.any()
    assert not torch.equal(found, moe_ops.scaled_fused_experts(*given, **named))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, logits), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["silu", "relu2"])
def test_a_loop_over_a_checkpoint_fills_them(name):
    """Of matrices and of input scales, of which gate and up have one each; replicas are told more than once."""
    layer = FusedMoE(
        MoEConfig(E, K, H, I, activation=moe_ops.Activation(name), num_redundant_experts=2), device="meta"
    )
    quantise_experts(layer, WeightScale.TENSOR, rows="static")
    layer.to_empty(device="cpu")
    for each in INPUT_SCALES:
        layer.get_parameter(each).fill_(float("nan"))
    mapping = layer.make_expert_params_mapping("w1", "w2", "w3", E, 2)
    parameters, told = dict(layer.named_parameters()), {}
    for param, weight, expert, shard in mapping:
        if shard == "w3" and name == "relu2":
            continue
        told[expert % E, shard] = 0.5 + expert % E + 0.1 * int(shard[1])
        loaded = torch.tensor(told[expert % E, shard])
        parameter = parameters[param.removeprefix("experts.") + "input_scale"]
        assert layer.weight_loader(parameter, loaded, f"experts.{weight}input_scale", shard, expert, True)
    shards = ("w1", "w3") if name == "silu" else ("w1",)
    assert torch.equal(layer.w13_input_scale, torch.tensor([[told[e, s] for s in shards] for e in range(E)]))
    assert torch.equal(layer.w2_input_scale, torch.tensor([told[e, "w2"] for e in range(E)]))


def test_scales_of_experts_that_are_elsewhere_are_loaded_too():
    layer = FusedMoE(MoEConfig(E, K, H, I), expert_map=torch.tensor([-1, 0, -1, 1, -1, 2]))
    quantise_experts(layer, WeightScale.CHANNEL, rows="static")
    for expert in range(E):
        value = torch.tensor([1.0 + expert])
        layer.weight_loader(layer.w2_input_scale, value, f"experts.{expert}.w2.input_scale", "w2", expert)
    assert layer.w2_input_scale.tolist() == [1, 2, 3, 4, 5, 6]
    for expert in (E, -1, True, "0"):
        with pytest.raises(ValueError, match=r"expert_id=.*: expected an expert in \[0, 6\)"):
            layer.weight_loader(layer.w2_input_scale, value, "w2.input_scale", "w2", expert)


@torch.no_grad()
def test_parts_of_a_layer_add_up_to_it():
    whole, (x, logits) = _layer(), (torch.randn(T, H), torch.randn(T, E))
    parts = []
    for first in (0, 3):
        held = torch.full((E,), -1)
        held[first : first + 3] = torch.arange(3)
        part = FusedMoE(whole.config, expert_map=held)
        quantise_experts(part, WeightScale.CHANNEL, rows="static")
        for name, parameter in whole.named_parameters():
            given = parameter if name in INPUT_SCALES else parameter[first : first + 3]
            part.get_parameter(name).copy_(given)
        parts.append(part(x, logits))
    assert relative_error(sum(parts), whole(x, logits)) < 1e-6


def test_casts_and_copies_and_state_dicts_leave_them():
    layer = _layer()
    expected = {name: layer.get_parameter(name).clone() for name in INPUT_SCALES}
    other = FusedMoE(layer.config)
    quantise_experts(other, WeightScale.CHANNEL, rows="static")
    assert all((other.get_parameter(name) == 1).all() for name in INPUT_SCALES)
    other.load_state_dict(layer.state_dict())
    for each in (other, copy.deepcopy(layer), layer.to(torch.bfloat16)):
        assert all(torch.equal(each.get_parameter(name), expected[name]) for name in INPUT_SCALES)
    usual = FusedMoE(layer.config)
    quantise_experts(usual, WeightScale.CHANNEL)
    with pytest.raises(RuntimeError, match="w13_input_scale is of weights that are stored otherwise"):
        usual.load_state_dict(layer.state_dict(), strict=False)
    assert (
        len(layer.get_expert_weights()) == 6
    )  # what moves with an expert: weights, biases, scales of weights


@torch.no_grad()
def test_modular_experts_and_adapters():
    """Of both products; adapters that change nothing leave what there was."""
    layer = _layer()
    x, logits, _ = _routed(layer)
    expected = layer(x, logits)
    standard = ModularKernel(LocalPrepareAndFinalize(), StandardExperts(layer))
    batched = ModularKernel(BatchedPrepareAndFinalize(), BatchedExperts(layer))
    for kernel in (standard, batched):
        assert relative_error(kernel(x, logits), expected) < 1e-6
    usual = FusedMoE(layer.config)
    adapters = [
        Adapter(*(low._replace(b=0 * low.b) for low in each[:2]), 1.0) for each in make_adapters(usual)
    ]
    attach(layer, adapters, torch.arange(T) % 4 - 1)
    assert relative_error(layer(x, logits), expected) < 1e-6


def test_what_is_refused():
    for dtype in (torch.uint8, torch.uint4):
        with pytest.raises(ValueError, match="rows='static' with weights of 4 bits: expected 'exact'"):
            quantise_experts(
                FusedMoE(MoEConfig(E, K, H, 32)), WeightScale.GROUP, (1, 32), dtype=dtype, rows="static"
            )
    with pytest.raises(ValueError, match="rows='some': expected one of 'quantised', 'exact', 'static'"):
        quantise_experts(FusedMoE(MoEConfig(E, K, H, I)), WeightScale.CHANNEL, rows="some")
    with pytest.raises(ValueError, match="rows='static': expected one of"):
        huggingface.quantise_experts(
            torch.nn.Linear(2, 2), WeightScale.CHANNEL, dtype=torch.int8, rows="static"
        )
