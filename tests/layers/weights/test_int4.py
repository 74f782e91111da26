"""Layers of integers of 4 bits: quantised, loaded as they are published, moved, compiled, refused."""

import copy

import pytest
import torch

import inductor_passes
from layers import FusedMoE, MoEConfig, TensorShard, WeightScale, quantise_experts
from moe_ops.pairs import PAIRS
from tests.helpers import assert_same
from tests.layers.weights.test_scales import dequantised

E, H, I = 6, 64, 96
GROUP = WeightScale.GROUP, (1, 32)
CHANNEL = (WeightScale.CHANNEL,)


def _layer(device=None, hidden=H, dtype=None, **named):
    experts = FusedMoE(MoEConfig(E, 2, hidden, I, has_bias=True), device=device, dtype=dtype, **named)
    if device is None:
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.copy_(torch.randn_like(parameter))
    return experts


def _quantised(*how, **named):
    experts = _layer(**named)
    quantise_experts(experts, *(how or GROUP), dtype=torch.uint4)
    return experts


@pytest.mark.parametrize(("how", "scales"), [(GROUP, (2, 3)), (CHANNEL, (1, 1))], ids=["GROUP", "CHANNEL"])
def test_a_layer_is_that_of_the_weights_it_stands_for(how, scales):
    usual = _layer()
    experts, x, logits = copy.deepcopy(usual), torch.randn(9, H), torch.randn(9, E)
    quantise_experts(experts, *how, dtype=torch.uint4)
    assert (experts.w13_weight.shape, experts.w2_weight.shape) == ((E, 2 * I, H // 2), (E, H, I // 2))
    found = experts.w13_weight_scale.shape, experts.w2_weight_scale.shape
    assert found == ((E, 2 * I, scales[0]), (E, H, scales[1]))
    stood_for = dequantised(experts)
    for name in ("w13_weight", "w2_weight"):
        before, after = getattr(usual, name), getattr(stood_for, name)
        assert 0.05 < (after - before).norm() / before.norm() < 0.12
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
@pytest.mark.parametrize("how", [GROUP, CHANNEL], ids=["GROUP", "CHANNEL"])
def test_tensors_of_compressed_tensors_are_loaded(how, rank):
    """Eight integers in an int32, seen as bytes, and scales; a rank takes its part of both."""
    whole, shard = _quantised(*how, dtype=torch.bfloat16), TensorShard(rank, 2)
    config = MoEConfig(E, 2, H, 2 * I, has_bias=True)
    ours = FusedMoE(config, shard=shard, device="meta", dtype=torch.bfloat16)
    quantise_experts(ours, *how, dtype=torch.uint4)
    ours.to_empty(device="cpu")
    width = 32 if how is GROUP else None
    for expert in range(E):
        for shard_id, name, rows, columns in (
            ("w1", "gate_proj", 2 * I, H), ("w3", "up_proj", 2 * I, H), ("w2", "down_proj", H, 2 * I),
        ):  # fmt: skip
            packed = torch.randint(-(2**31), 2**31, (rows, columns // 8)).to(torch.int32)
            scale = torch.rand(rows, columns // width if width else 1).bfloat16()
            param = "w2" if shard_id == "w2" else "w13"
            weight, scales = getattr(ours, f"{param}_weight"), getattr(ours, f"{param}_weight_scale")
            at = f"experts.{expert}.{name}"
            ours.weight_loader(weight, packed.view(torch.uint8), f"{at}.weight_packed", shard_id, expert)
            ours.weight_loader(scales, scale, f"{at}.weight_scale", shard_id, expert)
            half = slice(rank * I, rank * I + I)
            if shard_id == "w2":
                assert torch.equal(weight[expert], packed.view(torch.uint8)[:, rank * I // 2 :][:, : I // 2])
                part = scale if width is None else scale[:, rank * I // 32 :][:, : I // 32]
                assert torch.equal(scales[expert], part)
            else:
                rows_here = slice(0, I) if shard_id == "w1" else slice(I, 2 * I)
                assert torch.equal(weight[expert, rows_here], packed.view(torch.uint8)[half])
                assert torch.equal(scales[expert, rows_here], scale[half])
    assert (ours.w13_weight.shape, ours.w13_weight_scale.dtype) == (whole.w13_weight.shape, torch.bfloat16)
    with pytest.raises(TypeError, match=r"weight_packed has dtype torch\.int32: expected torch\.uint8"):
        ours.weight_loader(ours.w2_weight, packed, "experts.0.down_proj.weight_packed", "w2", 0)


def test_state_goes_through_a_file_s_dictionary_and_a_cast_changes_nothing():
    experts, again = _quantised(dtype=torch.bfloat16), _quantised(dtype=torch.bfloat16)
    again.load_state_dict(experts.state_dict())
    again.to(torch.float32)
    for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
        assert torch.equal(getattr(again, name), getattr(experts, name))
    assert again.w13_weight_scale.dtype == torch.bfloat16 and again.w13_bias.dtype == torch.float32
    x, logits = torch.randn(9, H), torch.randn(9, E)
    with torch.no_grad():
        assert_same([again(x, logits)], [dequantised(experts)(x, logits)], 1e-5)


def test_exponents_are_not_loaded_as_if_they_were_scales():
    of_powers = _layer()
    quantise_experts(of_powers, *GROUP, dtype=PAIRS)
    for state, module, kinds in (
        (of_powers.state_dict(), _quantised(), (r"torch\.uint8", r"torch\.float32")),
        (_quantised().state_dict(), of_powers, (r"torch\.float32", r"torch\.uint8")),
    ):
        message = "w2_weight_scale has dtype {}: expected {}, that of the module".format(*kinds)
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict(state)


REFUSED = {
    "matrices": (((WeightScale.TENSOR,), {}), "TENSOR.*with weights of 4 bits: expected GROUP of a multiple of 32"),
    "groups of 16": (
        ((WeightScale.GROUP, (1, 16)), {}), r"block=\(1, 16\) with weights of 4 bits: expected GROUP of",
    ),
    "quantised rows": ((GROUP, {"rows": "quantised"}), "rows='quantised' with weights of 4 bits: expected 'exact'"),
    "odd": ((CHANNEL, {"hidden": 63}), "hidden_size is 63: expected an even number with weights of 4 bits"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    (given, named), message = REFUSED[what]
    experts = _layer(hidden=named.pop("hidden", H))
    with pytest.raises(ValueError, match=message):
        quantise_experts(experts, *given, dtype=torch.uint4, **named)
    assert experts.w13_weight.dtype == torch.float32 and not hasattr(experts, "w13_weight_scale")
