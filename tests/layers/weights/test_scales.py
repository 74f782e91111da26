"""Scales of weights in layers that were copied, came off the meta device or were reset."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import inductor_passes
from layers import (
    FusedMoE,
    LocalPrepareAndFinalize,
    ModularKernel,
    MoEConfig,
    StandardExperts,
    WeightScale,
    add_weight_scales,
    quantise_experts,
)
from layers.config import ExpertsConfig
from layers.parallel import ExpertParallel, ExpertTensorParallel
from layers.quantised import scaled_linears
from moe_ops import Activation
from moe_ops.arguments import SharedExpert
from moe_ops.weight_formats import dequantised as dequantise
from tests.helpers import assert_same
from tests.layers.test_fsdp import mesh  # noqa: F401  # a fixture

E, H, I = 6, 10, 12


def with_scales(kind, device=None):
    experts = FusedMoE(MoEConfig(E, 2, H, I), device=device)
    add_weight_scales(experts, kind)
    return experts


def assigned(experts, kind):
    empty = with_scales(kind, "meta")
    empty.load_state_dict(experts.state_dict(), assign=True)
    return empty


PASSED_ON = {
    "copied": lambda experts, kind: copy.deepcopy(experts),
    "emptied": lambda experts, kind: with_scales(kind, "meta").to_empty(device="cpu"),
    "assigned": assigned,
}


@pytest.mark.parametrize("pass_on", PASSED_ON)
@pytest.mark.parametrize("kind", [WeightScale.TENSOR, WeightScale.CHANNEL])
def test_scales_know_their_kind(kind, pass_on):
    experts = PASSED_ON[pass_on](with_scales(kind), kind)
    up, down = torch.rand(E, I, 1), torch.rand(E, H, 1)
    if kind is WeightScale.TENSOR:
        up, down = up[:, 0, 0], down[:, 0, 0]
    for expert in range(E):
        experts.weight_loader(experts.w13_weight_scale, up[expert], "up.weight_scale", "w3", expert)
        experts.weight_loader(experts.w2_weight_scale, down[expert], "down.weight_scale", "w2", expert)
    found = experts.w13_weight_scale[:, 1] if kind is WeightScale.TENSOR else experts.w13_weight_scale[:, I:]
    assert torch.equal(found, up) and torch.equal(experts.w2_weight_scale, down)


def test_a_parameter_of_one_s_own_has_no_kind():
    experts, own = with_scales(WeightScale.TENSOR), nn.Parameter(torch.zeros(E, 2))
    with pytest.raises(ValueError, match="quant_method=None of the scale: expected one of 'tensor'"):
        experts.weight_loader(own, torch.ones(()), "weight_scale", "w1", 0)


def test_scales_are_reset_to_one():
    experts = with_scales(WeightScale.CHANNEL)
    with torch.no_grad():
        experts.w13_weight_scale.zero_()
    experts.reset_parameters()
    assert (experts.w13_weight_scale == 1).all() and (experts.w2_weight_scale == 1).all()


@pytest.mark.parametrize("style", [ExpertParallel, ExpertTensorParallel])
def test_layers_among_ranks_get_no_scales(style, mesh):  # noqa: F811
    experts = FusedMoE(MoEConfig(E, 2, H, I))
    parallelize_module(experts, mesh, style())
    with pytest.raises(ValueError, match=r"module is sharded by layers\.parallel: expected no scales"):
        add_weight_scales(experts, WeightScale.CHANNEL)
    assert not hasattr(experts, "w13_weight_scale")


@pytest.mark.parametrize("name", ["qweight", "qzeros"])
def test_integers_that_pack_alternating_rows_are_refused(name):
    """Eight rows of the gate in an integer, as AWQ packs them, do not alternate with rows of the up projection."""
    experts = FusedMoE(MoEConfig(E, 2, H, 16, activation=Activation("silu", interleaved=True)))
    packed = nn.Parameter(torch.zeros(E, H, 32 // 8, dtype=torch.int32), requires_grad=False)
    packed.is_transposed, packed.quant_method = True, "group"
    with pytest.raises(ValueError, match=r"activation\.interleaved=True: expected False, .*packed integers"):
        experts.weight_loader(
            packed, torch.ones(H, 2, dtype=torch.int32), f"experts.0.up_proj.{name}", "w3", 0
        )
    assert not packed.any()
    columns = nn.Parameter(
        torch.zeros(E, 5, 32, dtype=torch.int32), requires_grad=False
    )  # packed the other way
    columns.is_transposed, columns.quant_method = True, "group"
    experts.weight_loader(columns, torch.ones(5, 16, dtype=torch.int32), f"experts.0.up_proj.{name}", "w3", 0)
    assert columns[0, 0].tolist() == [0, 1] * 16


KINDS = {"TENSOR": (128, 128), "CHANNEL": (128, 128), "GROUP": (1, 2), "BLOCK": (4, 5)}


def quantisable(**changed):
    config = MoEConfig(E, 2, H, I, has_bias=True, **changed)
    experts = FusedMoE(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return experts


def dequantised(experts):
    """A layer with the weights that a quantised one stands for."""
    usual = FusedMoE(experts.config)
    with torch.no_grad():
        for name, linear in zip(
            ("w13", "w2"), scaled_linears(experts, experts.expert_weights()), strict=True
        ):
            getattr(usual, f"{name}_weight").copy_(dequantise(linear, torch.float32))
            getattr(usual, f"{name}_bias").copy_(linear.bias)
    return usual


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_layer_is_that_of_the_weights_it_stands_for(kind, dtype):
    usual = quantisable()
    experts, x, logits = copy.deepcopy(usual), torch.randn(9, H), torch.randn(9, E)
    quantise_experts(experts, WeightScale[kind], KINDS[kind], dtype=dtype, rows="exact")
    assert experts.w13_weight.dtype == experts.w2_weight.dtype == dtype
    stood_for = dequantised(experts)
    for name in ("w13_weight", "w2_weight"):
        before, after = getattr(usual, name), getattr(stood_for, name)
        assert 1e-4 < (after - before).norm() / before.norm() < (0.02 if dtype == torch.int8 else 0.04)
    assert_same([experts(x, logits)], [stood_for(x, logits)], 1e-5)
    shared = torch.randn(9, H)
    assert_same([experts(x, logits, shared)], [stood_for(x, logits, shared)], 1e-5)
    experts.quantisation = dataclasses.replace(experts.quantisation, rows="quantised")
    with torch.no_grad():
        expected, found = stood_for(x, logits), experts(x, logits)
    assert 1e-4 < (found - expected).norm() / expected.norm() < (0.03 if dtype == torch.int8 else 0.08)


@pytest.mark.parametrize("scaled", [add_weight_scales, quantise_experts])
def test_blocks_are_those_of_deepseek_unless_it_is_told(scaled):
    experts = FusedMoE(MoEConfig(2, 1, 258, 256), device="meta")
    scaled(experts, WeightScale.BLOCK)
    assert experts.quantisation.block == (128, 128)
    assert experts.w2_weight_scale.shape == (2, 3, 2)


def test_a_quantised_layer_compiles_into_one_graph():
    experts, x, logits = quantisable(), torch.randn(9, H), torch.randn(9, E)
    quantise_experts(experts, WeightScale.CHANNEL)
    with torch.no_grad():
        compiled = torch.compile(experts, fullgraph=True, options=inductor_passes.options())
        assert_same([compiled(x, logits)], [experts(x, logits)], 1e-5)


def test_a_quantised_checkpoint_is_loaded_into_a_layer_made_for_it():
    made = quantisable()
    quantise_experts(made, WeightScale.BLOCK, (4, 5), dtype=torch.int8)
    experts = FusedMoE(made.config, device="meta")
    quantise_experts(experts, WeightScale.BLOCK, (4, 5), dtype=torch.int8)
    experts.to_empty(device="cpu")
    for expert in range(E):
        for shard, rows in (("w1", slice(0, I)), ("w3", slice(I, 2 * I))):
            blocks = slice(rows.start // 4, rows.stop // 4)
            given = made.w13_weight[expert, rows], made.w13_weight_scale[expert, blocks]
            experts.weight_loader(experts.w13_weight, given[0], "up.weight", shard, expert)
            experts.weight_loader(experts.w13_weight_scale, given[1], "up.weight_scale", shard, expert)
            experts.weight_loader(experts.w13_bias, made.w13_bias[expert, rows], "up.bias", shard, expert)
        for name in ("w2_weight", "w2_weight_scale", "w2_bias"):
            experts.weight_loader(getattr(experts, name), getattr(made, name)[expert], name, "w2", expert)
    x, logits = torch.randn(5, H), torch.randn(5, E)
    with torch.no_grad():
        assert torch.equal(experts(x, logits), made(x, logits))


def test_what_quantised_experts_refuse():
    experts = quantisable()
    quantise_experts(experts, WeightScale.CHANNEL)
    with pytest.raises(
        ValueError, match=r"w13_weight has dtype torch.float8_e4m3fn: expected weights that are not"
    ):
        quantise_experts(experts, WeightScale.CHANNEL)
    with pytest.raises(
        ValueError, match=r"w13_weight has dtype torch.float8_e4m3fn: expected weights that are not"
    ):
        experts.reset_parameters()
    with pytest.raises(TypeError, match=r"dtype=torch.float16: expected torch.float8_e4m3fn or torch.int8"):
        quantise_experts(quantisable(), WeightScale.CHANNEL, dtype=torch.float16)
    with pytest.raises(ValueError, match="rows='some': expected one of 'quantised', 'exact', 'static'"):
        quantise_experts(quantisable(), WeightScale.CHANNEL, rows="some")
    with pytest.raises(ValueError, match="emit='fused' with quantised experts: expected 'auto' or 'stages'"):
        quantise_experts(quantisable(emit="fused"), WeightScale.CHANNEL)
    with pytest.raises(
        ValueError, match="intermediate_size of the shard is 12: expected a multiple of the block's 8"
    ):
        quantise_experts(untouched := quantisable(), WeightScale.BLOCK, (8, 5))
    assert untouched.quantisation is None and untouched(torch.randn(2, H), torch.randn(2, E)).isfinite().all()
    with pytest.raises(ValueError, match="gate and up rows in turns: expected one of CHANNEL and GROUP"):
        quantise_experts(quantisable(activation=Activation(interleaved=True)), WeightScale.TENSOR)
    with pytest.raises(ValueError, match="post_norm_eps=1e-05 with quantised experts: expected None"):
        quantise_experts(quantisable(experts=ExpertsConfig(post_norm_eps=1e-5)), WeightScale.CHANNEL)


def test_scales_beside_weights_of_16_bits_are_not_passed_over():
    with pytest.raises(
        TypeError, match=r"w13 has dtype torch.float32: expected torch.float8_e4m3fn or torch.int8"
    ):
        with_scales(WeightScale.CHANNEL)(torch.randn(3, H), torch.randn(3, E))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_cast_changes_neither_weights_of_8_bits_nor_their_scales(cast, dtype):
    experts = quantisable()
    quantise_experts(experts, WeightScale.CHANNEL, dtype=dtype)
    before = copy.deepcopy(experts)
    torch.nn.Sequential(experts).to(cast)
    assert experts.w13_bias.dtype == experts.w2_bias.dtype == cast
    for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
        kept, found = getattr(before, name), getattr(experts, name)
        assert found.dtype == kept.dtype and torch.equal(found.float(), kept.float())
    x, logits = torch.randn(5, H), torch.randn(5, E)
    with torch.no_grad():
        expected, found = before(x, logits), experts(x.to(cast), logits)
    assert found.dtype == cast and (found - expected).norm() < 0.05 * expected.norm()


def test_a_shared_expert_does_not_overlap_with_quantised_ones():
    experts = quantisable()
    quantise_experts(experts, WeightScale.CHANNEL)
    shared = SharedExpert(torch.randn(8, H), torch.randn(H, 4), None, "silu")
    with pytest.raises(
        ValueError, match=r"beside lora or quantised experts: expected shared_experts.overlap=False"
    ):
        experts(torch.randn(3, H), torch.randn(3, E), shared)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("rows", ["quantised", "exact"])
def test_a_modular_kernel_of_quantised_experts(rows, chunk_size):
    experts = quantisable(experts=ExpertsConfig(chunk_size=chunk_size))
    quantise_experts(experts, WeightScale.CHANNEL, rows=rows)
    kernel = ModularKernel(LocalPrepareAndFinalize(), StandardExperts(experts))
    x, logits = torch.randn(5, H), torch.randn(5, E)
    with torch.no_grad():
        torch.testing.assert_close(kernel(x, logits), experts(x, logits))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_weights_that_stay_uncast_move(dtype):
    experts = quantisable()
    quantise_experts(experts, WeightScale.CHANNEL)
    experts.to("meta", dtype)
    assert {each.device.type for each in experts.parameters()} == {"meta"}
    assert experts.w13_weight.dtype == torch.float8_e4m3fn
