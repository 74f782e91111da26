"""Layers in 4 bits: quantised, made for a checkpoint as gpt-oss is published, moved, compiled, among ranks, refused."""

import copy

import pytest
import torch
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import inductor_passes
from layers import FusedMoE, MoEConfig, WeightScale, add_weight_scales, quantise_experts
from moe_ops import Activation
from moe_ops.pairs import PAIRS
from tests.helpers import assert_same
from tests.layers.weights.test_scales import dequantised

E, H, I = 6, 64, 96
GROUP = WeightScale.GROUP, (1, 32)


def _layer(device=None, **changed):
    experts = FusedMoE(MoEConfig(E, 2, H, I, has_bias=True, **changed), device=device)
    if device is None:
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.copy_(torch.randn_like(parameter))
    return experts


def _quantised(**changed):
    experts = _layer(**changed)
    quantise_experts(experts, *GROUP, dtype=PAIRS)
    return experts


def test_a_layer_is_that_of_the_weights_it_stands_for():
    usual = _layer()
    experts, x, logits = copy.deepcopy(usual), torch.randn(9, H), torch.randn(9, E)
    quantise_experts(experts, *GROUP, dtype=PAIRS)
    assert (experts.w13_weight.shape, experts.w2_weight.shape) == ((E, 2 * I, H // 2), (E, H, I // 2))
    assert (experts.w13_weight_scale.shape, experts.w2_weight_scale.shape) == ((E, 2 * I, 2), (E, H, 3))
    stood_for = dequantised(experts)
    for name in ("w13_weight", "w2_weight"):
        before, after = getattr(usual, name), getattr(stood_for, name)
        assert 0.1 < (after - before).norm() / before.norm() < 0.13
    shared = torch.randn(9, H)
    with torch.no_grad():
        assert_same([experts(x, logits, shared)], [stood_for(x, logits, shared)], 1e-5)


def test_it_learns_around_its_weights():
    experts = _quantised()
    x, logits = torch.randn(9, H, requires_grad=True), torch.randn(9, E, requires_grad=True)
    asked = x, logits, experts.w2_bias
    found = torch.autograd.grad(experts(x, logits).sum(), asked)
    stood_for = dequantised(experts)
    assert_same(found, torch.autograd.grad(stood_for(x, logits).sum(), (x, logits, stood_for.w2_bias)), 1e-5)


def test_it_compiles_into_one_graph():
    experts, x, logits = _quantised(), torch.randn(9, H), torch.randn(9, E)
    with torch.no_grad():
        compiled = torch.compile(experts, fullgraph=True, options=inductor_passes.options())
        assert_same([compiled(x, logits)], [experts(x, logits)], 1e-5)


def test_gpt_oss_as_it_is_published():
    """Blocks and scales go into a layer made for them, which computes what transformers does with them in bfloat16."""
    config = GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=2)
    published = {}
    for name, rows, columns in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        published[f"{name}_blocks"] = torch.randint(0, 256, (E, rows, columns // 32, 16), dtype=PAIRS)
        published[f"{name}_scales"] = torch.randint(118, 124, (E, rows, columns // 32), dtype=PAIRS)
        published[f"{name}_bias"] = torch.randn(E, rows)
    stock = GptOssExperts(config)
    activation = Activation("swiglu_oai", interleaved=True)
    ours = _layer("meta", activation=activation)
    quantise_experts(ours, *GROUP, dtype=PAIRS)
    state = {}
    for name, mine in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        blocks, scales, bias = (published[f"{name}_{part}"] for part in ("blocks", "scales", "bias"))
        state |= {f"{mine}_weight": blocks.flatten(2), f"{mine}_weight_scale": scales, f"{mine}_bias": bias}
        with torch.no_grad():
            getattr(stock, name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            getattr(stock, f"{name}_bias").copy_(bias)
    ours.load_state_dict(state, assign=True)
    x, logits = torch.randn(9, H), torch.randn(9, E)
    with torch.no_grad():
        _, weights, ids = ours.route(logits)
        assert_same([ours(x, logits)], [stock(x, ids.long(), weights)], 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_cast_changes_neither_numbers_nor_exponents(dtype):
    experts = _quantised()
    before = {name: each.clone() for name, each in experts.state_dict().items()}
    experts.to(dtype)
    for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
        assert torch.equal(getattr(experts, name), before[name])
    assert experts.w13_bias.dtype == dtype
    assert experts(torch.randn(3, H).to(dtype), torch.randn(3, E)).dtype == dtype


def test_weights_of_16_bits_are_not_loaded_as_if_they_were_numbers_of_4():
    state = _layer().state_dict()
    with pytest.raises(
        RuntimeError, match=r"w13_weight has dtype torch\.float32: expected torch\.uint8, that of the"
    ):
        _quantised().load_state_dict(state, strict=False)


def test_exponents_begin_as_one():
    experts = _layer()
    add_weight_scales(experts, *GROUP, dtype=PAIRS)
    for reset in (False, True):
        if reset:
            experts.w13_weight_scale.zero_(), experts.w2_weight_scale.zero_()
            experts.reset_parameters()
        assert (experts.w13_weight_scale == 127).all() and (experts.w2_weight_scale == 127).all(), reset


def test_scales_beside_weights_in_4_bits():
    """Of a layer whose weights are pairs already."""
    experts = _quantised()
    add_weight_scales(experts, *GROUP, dtype=PAIRS)
    assert (experts.w13_weight_scale.shape, experts.w2_weight_scale.shape) == ((E, 2 * I, 2), (E, H, 3))
    assert experts(torch.randn(3, H), torch.randn(3, E)).isfinite().all()


REFUSED = {
    "another kind": (
        (WeightScale.CHANNEL,),
        {},
        r"CHANNEL.*with weights of 4 bits: expected GROUP of a multiple of 32",
    ),
    "groups of 16": (
        (WeightScale.GROUP, (1, 16)),
        {},
        r"block=\(1, 16\) with weights of 4 bits: expected GROUP of",
    ),
    "quantised rows": (
        GROUP,
        {"rows": "quantised"},
        "rows='quantised' with weights of 4 bits: expected 'exact'",
    ),
    "no block": ((WeightScale.GROUP, None), {}, r"block=None: expected \(rows, columns\)"),
    "rows alone": ((WeightScale.GROUP, (1,)), {}, r"block=\(1,\): expected \(rows, columns\)"),
    "empty rows": (GROUP, {"rows": ""}, "rows='': expected one of 'quantised', 'exact', 'static'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    given, named, message = REFUSED[what]
    experts = _layer()
    with pytest.raises(ValueError, match=message):
        quantise_experts(experts, *given, dtype=PAIRS, **named)
    assert experts.w13_weight.dtype == torch.float32 and not hasattr(experts, "w13_weight_scale")


def test_it_is_quantised_once():
    with pytest.raises(
        ValueError, match=r"w13_weight has dtype torch\.uint8: expected weights that are not quantised"
    ):
        quantise_experts(_quantised(), *GROUP, dtype=PAIRS)
