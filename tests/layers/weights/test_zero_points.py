"""Layers of integers of 4 bits with zero points: quantised, loaded as they are published, moved, compiled, refused."""

import copy

import pytest
import torch

import inductor_passes
from layers import (
    FusedMoE,
    MoEConfig,
    TensorShard,
    integers_of_awq,
    quantise_experts,
    zeros_of_compressed_tensors,
)
from layers.weights.scales import SCALES, WEIGHTS, ZERO_POINTS
from tests.helpers import assert_same
from tests.layers.weights.test_int4 import CHANNEL, GROUP, E, H, I, _layer, _quantised as symmetric
from tests.layers.weights.test_packed_integers import packed_by_awq, packed_by_compressed_tensors
from tests.layers.weights.test_scales import dequantised


def shifted(**named):
    """Weights on one side of 0 more than on the other."""
    experts = _layer(**named)
    with torch.no_grad():
        for name in WEIGHTS:
            getattr(experts, name).add_(0.7)
    return experts


def _quantised(*how, **named):
    experts = shifted(**named)
    quantise_experts(experts, *(how or GROUP), dtype=torch.uint4, zero_points=True)
    return experts


@pytest.mark.parametrize(("how", "groups"), [(GROUP, (2, 3)), (CHANNEL, (1, 1))], ids=["GROUP", "CHANNEL"])
def test_a_layer_is_that_of_the_weights_it_stands_for(how, groups):
    usual, x, logits = shifted(), torch.randn(9, H), torch.randn(9, E)
    experts, without = copy.deepcopy(usual), copy.deepcopy(usual)
    quantise_experts(experts, *how, dtype=torch.uint4, zero_points=True)
    quantise_experts(without, *how, dtype=torch.uint4)
    assert not hasattr(without, ZERO_POINTS[0])
    for name, rows, columns in zip(ZERO_POINTS, (2 * I, H), groups, strict=True):
        zero = experts.get_parameter(name)
        assert zero.shape == (E, rows, columns) and zero.dtype == torch.uint8 and not zero.requires_grad
        assert (zero < 8).float().mean() > 0.9  # what is below 0 takes fewer codes
    stood_for, less = dequantised(experts), dequantised(without)
    for name in WEIGHTS:
        before, after, other = (getattr(each, name) for each in (usual, stood_for, less))
        assert (after - before).norm() < 0.9 * (other - before).norm()
    with torch.no_grad():
        assert_same([experts(x, logits)], [stood_for(x, logits)], 1e-5)


def test_it_learns_around_its_weights_and_compiles_into_one_graph():
    experts = _quantised()
    x, logits = torch.randn(9, H, requires_grad=True), torch.randn(9, E, requires_grad=True)
    found = torch.autograd.grad(experts(x, logits).sum(), (x, logits, experts.w2_bias))
    stood_for = dequantised(experts)
    assert_same(found, torch.autograd.grad(stood_for(x, logits).sum(), (x, logits, stood_for.w2_bias)), 1e-5)
    with torch.no_grad():
        compiled = torch.compile(experts, fullgraph=True, options=inductor_passes.options())
        assert_same([compiled(x, logits)], [experts(x, logits)], 1e-5)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("packing", ["awq", "compressed-tensors"])
def test_published_tensors_are_loaded(packing, rank):
    """Of each expert and projection; a rank takes its part of weights, scales and zero points."""
    whole = FusedMoE(MoEConfig(E, 2, H, 2 * I), device="meta", dtype=torch.float16)
    part = FusedMoE(MoEConfig(E, 2, H, 2 * I), shard=TensorShard(rank, 2), device="meta", dtype=torch.float16)
    for layer in (whole, part):
        quantise_experts(layer, *GROUP, dtype=torch.uint4, zero_points=True)
        layer.to_empty(device="cpu")
    meant = {}
    for expert in range(E):
        for shard, name, rows, columns in (
            ("w1", "gate_proj", 2 * I, H), ("w3", "up_proj", 2 * I, H), ("w2", "down_proj", H, 2 * I),
        ):  # fmt: skip
            codes = torch.randint(0, 16, (rows, columns))
            zeros, scale = torch.randint(0, 16, (rows, columns // 32)), torch.rand(rows, columns // 32).half()
            spread = (each.repeat_interleave(32, 1) for each in (zeros, scale))
            meant[expert, shard] = (codes - next(spread)) * next(spread).float()
            if packing == "awq":
                qweight, qzeros = packed_by_awq(codes.t()), packed_by_awq(zeros.t())
                weight, scale, zero = integers_of_awq(qweight, qzeros, scale.t())
            else:
                weight = packed_by_compressed_tensors(codes).view(torch.uint8)
                zero = zeros_of_compressed_tensors(packed_by_compressed_tensors(zeros.t()).t(), rows)
            at = f"experts.{expert}.{name}"
            for layer in (whole, part):
                prefix = "w2" if shard == "w2" else "w13"
                for suffix, given in (("weight", weight), ("weight_scale", scale)):
                    param = layer.get_parameter(f"{prefix}_{suffix}")
                    layer.weight_loader(param, given, f"{at}.{suffix}", shard, expert)
                param = layer.get_parameter(f"{prefix}_weight_zero_point")
                named = f"{at}.{'qzeros' if packing == 'awq' else 'weight_zero_point'}"
                assert layer.weight_loader(param, zero, named, shard, expert, return_success=True)
    half = slice(rank * I, rank * I + I)
    for layer, of_rows in ((whole, slice(None)), (part, half)):
        up, down = (getattr(_stood_for(layer), name) for name in WEIGHTS)
        for expert in range(E):
            gate_up = torch.cat([meant[expert, shard][of_rows] for shard in ("w1", "w3")])
            assert torch.equal(up[expert], gate_up)
            assert torch.equal(down[expert], meant[expert, "w2"][:, of_rows])


def _stood_for(layer):
    usual = FusedMoE(layer.config, shard=layer.shard)
    from layers.quantised import scaled_linears
    from moe_ops.weight_formats import dequantised as dequantise

    with torch.no_grad():
        for name, linear in zip(WEIGHTS, scaled_linears(layer, layer.expert_weights()), strict=True):
            getattr(usual, name).copy_(dequantise(linear, torch.float32))
    return usual


def test_state_goes_through_a_file_s_dictionary_and_a_cast_changes_nothing():
    experts, again = _quantised(dtype=torch.bfloat16), _quantised(dtype=torch.bfloat16)
    again.load_state_dict(experts.state_dict())
    again.to(torch.float32)
    again.type(torch.float64)  # of all tensors, which `to` does of floats alone
    for name in (*WEIGHTS, *SCALES, *ZERO_POINTS):
        assert torch.equal(getattr(again, name), getattr(experts, name))
        assert getattr(again, name).dtype == getattr(experts, name).dtype
    again.float()
    x, logits = torch.randn(9, H), torch.randn(9, E)
    with torch.no_grad():
        assert_same([again(x, logits)], [dequantised(experts)(x, logits)], 1e-5)


def test_state_with_and_without_zero_points_is_not_mistaken():
    with pytest.raises(RuntimeError, match=r"Missing.*w13_weight_zero_point"):
        _quantised().load_state_dict(symmetric().state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected.*w13_weight_zero_point"):
        symmetric().load_state_dict(_quantised().state_dict())
    state = _quantised().state_dict()
    state["w2_weight_zero_point"] = state["w2_weight_zero_point"].int()
    message = r"w2_weight_zero_point has dtype torch\.int32: expected torch\.uint8, that of the module"
    with pytest.raises(RuntimeError, match=message):
        _quantised().load_state_dict(state)


def test_a_copy_without_attributes_is_loaded_by_the_kind_that_the_module_knows():
    experts = FusedMoE(MoEConfig(E, 2, H, I), device="meta")
    quantise_experts(experts, *GROUP, dtype=torch.uint4, zero_points=True)
    experts.to_empty(device="cpu")
    for name in ZERO_POINTS:
        vars(experts.get_parameter(name)).pop("quant_method", None)
    zero = torch.randint(0, 16, (I, 2), dtype=torch.uint8)
    experts.weight_loader(experts.w13_weight_zero_point, zero, "experts.1.up_proj.qzeros", "w3", 1)
    assert torch.equal(experts.w13_weight_zero_point[1, I:], zero)


def test_on_the_meta_device_only_sizes_change():
    experts = FusedMoE(MoEConfig(E, 2, H, I), device="meta", dtype=torch.bfloat16)
    quantise_experts(experts, *GROUP, dtype=torch.uint4, zero_points=True)
    here = _quantised(dtype=torch.bfloat16)
    for name in (*WEIGHTS, *SCALES, *ZERO_POINTS):
        ours, theirs = experts.get_parameter(name), here.get_parameter(name)
        assert (ours.is_meta, ours.shape, ours.dtype) == (True, theirs.shape, theirs.dtype)


REFUSED = {
    "MXFP4": (
        (*GROUP, torch.uint8, True), ValueError, r"zero_points=True with dtype=torch\.uint8: expected torch\.uint4",
    ),
    "8 bits": ((*CHANNEL, (1, 1), torch.int8, True), ValueError, r"zero_points=True with dtype=torch\.int8: expected"),
    "no flag": ((*GROUP, torch.uint4, 8), TypeError, "zero_points=8: expected bool, got int"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    (kind, block, dtype, zero_points), error, message = REFUSED[what]
    experts = _layer()
    with pytest.raises(error, match=message):
        quantise_experts(experts, kind, block, dtype=dtype, zero_points=zero_points)
    assert experts.w13_weight.dtype == torch.float32 and not hasattr(experts, "w13_weight_zero_point")
