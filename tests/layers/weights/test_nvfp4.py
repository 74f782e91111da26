"""Layers in NVFP4: quantised, loaded as ModelOpt and compressed-tensors publish weights, cast, moved, refused."""

import copy

import pytest
import torch

import inductor_passes
from layers import FusedMoE, MoEConfig, WeightScale, add_weight_scales, quantise_experts
from moe_ops import Activation
from moe_ops.nvfp4 import NUMBERS
from tests.helpers import assert_same
from tests.kernels.test_scaled_nvfp4 import FLOAT8, dense, made
from tests.layers.weights.test_scales import dequantised

E, H, I = 6, 64, 96
GROUP = WeightScale.GROUP, (1, 16)
PARAMETERS = tuple(
    f"{name}_{part}" for part in ("weight", "weight_scale", "weight_scale_2") for name in ("w13", "w2")
)
ACTIVATIONS = {"halves": "silu", "in turns": Activation("silu", interleaved=True), "no gate": "relu2"}


def _layer(device=None, **changed):
    experts = FusedMoE(MoEConfig(E, 2, H, I, **{"has_bias": True} | changed), device=device)
    if device is None:
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.copy_(torch.randn_like(parameter))
    return experts


def _quantised(**changed):
    experts = _layer(**changed)
    quantise_experts(experts, *GROUP, dtype=NUMBERS)
    return experts


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_layer_is_that_of_the_weights_it_stands_for(name):
    usual = _layer(activation=ACTIVATIONS[name])
    experts, x, logits = copy.deepcopy(usual), torch.randn(9, H), torch.randn(9, E)
    quantise_experts(experts, *GROUP, dtype=NUMBERS)
    halves = 1 if name == "no gate" else 2
    assert (experts.w13_weight.shape, experts.w2_weight.shape) == ((E, halves * I, H // 2), (E, H, I // 2))
    assert (experts.w13_weight_scale.shape, experts.w2_weight_scale.shape) == ((E, halves * I, 4), (E, H, 6))
    assert (experts.w13_weight_scale_2.shape, experts.w2_weight_scale_2.shape) == ((E, halves), (E,))
    stood_for = dequantised(experts)
    for weight in ("w13_weight", "w2_weight"):
        before, after = getattr(usual, weight), getattr(stood_for, weight)
        assert 0.07 < (after - before).norm() / before.norm() < 0.11
    with torch.no_grad():
        assert_same([experts(x, logits)], [stood_for(x, logits)], 1e-5)
        compiled = torch.compile(experts, fullgraph=True, options=inductor_passes.options())
        assert_same([compiled(x, logits)], [experts(x, logits)], 1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_published_tensors(name):
    """Gate and up have a global scale each, which may differ; those of compressed-tensors are one over it."""
    experts = _layer("meta", activation=ACTIVATIONS[name], has_bias=False)
    quantise_experts(experts, *GROUP, dtype=NUMBERS)
    experts.to_empty(device="cpu")
    usual = FusedMoE(experts.config)
    shards = {"w1": ("w13", I, H), "w3": ("w13", I, H), "w2": ("w2", H, I)}
    if name == "no gate":
        del shards["w3"]
    for expert in range(E):
        for shard, (prefix, rows, columns) in shards.items():
            pairs, scale = made(1, rows, columns, (1, 16))
            outer = torch.rand(()) + 0.5
            published = {"weight": pairs[0], "weight_scale": scale[0], "weight_scale_2": outer}
            for part, tensor in published.items():
                parameter = getattr(experts, f"{prefix}_{part}")
                experts.weight_loader(parameter, tensor, f"experts.{expert}.x.{part}", shard, expert)
            whole = dense(pairs, scale, (1, 16), outer.view(1, 1))[0].float()
            usual.weight_loader(getattr(usual, f"{prefix}_weight"), whole, "experts.x.weight", shard, expert)
    x, logits = torch.randn(9, H), torch.randn(9, E)
    with torch.no_grad():
        assert_same([experts(x, logits)], [usual(x, logits)], 1e-5)
    given = torch.rand(1), "experts.0.x.weight_global_scale", "w2", 0
    with pytest.raises(
        ValueError, match=r"weight_global_scale is what weights are divided by: expected 1 / it, as"
    ):
        experts.weight_loader(experts.w2_weight_scale_2, *given)


@pytest.mark.parametrize("is_copied", [False, True])
def test_scales_are_loaded_by_their_kinds(is_copied):
    """A copy has no attributes: of those the module knows it."""
    experts = _quantised()
    for name in PARAMETERS if is_copied else ():
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name).detach(), requires_grad=False))
    parameter = experts.w13_weight_scale_2
    experts.weight_loader(parameter, torch.tensor(3.0), "experts.2.up_proj.weight_scale_2", "w3", 2)
    assert parameter[2, 1] == 3 and (parameter == 3).sum() == 1


def test_it_learns_around_its_weights():
    experts = _quantised()
    x, logits = torch.randn(9, H, requires_grad=True), torch.randn(9, E, requires_grad=True)
    asked = x, logits, experts.w2_bias
    found = torch.autograd.grad(experts(x, logits).sum(), asked)
    stood_for = dequantised(experts)
    assert_same(found, torch.autograd.grad(stood_for(x, logits).sum(), (x, logits, stood_for.w2_bias)), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_cast_changes_neither_numbers_nor_scales(dtype):
    experts = _quantised()
    before = {name: each.clone() for name, each in experts.state_dict().items()}
    experts.to(dtype)
    for name in PARAMETERS:
        found = getattr(experts, name)
        assert found.dtype == before[name].dtype and torch.equal(found.float(), before[name].float())
    assert experts.w13_bias.dtype == dtype
    assert experts(torch.randn(3, H).to(dtype), torch.randn(3, E)).dtype == dtype


def test_a_state_dict_comes_and_goes():
    experts, other = _quantised(), _quantised()
    other.load_state_dict(experts.state_dict())
    x, logits = torch.randn(3, H), torch.randn(3, E)
    with torch.no_grad():
        assert torch.equal(other(x, logits), experts(x, logits))
    usual = _layer()
    given = usual.state_dict() | {"w13_weight_scale_2": torch.ones(E, 2)}
    with pytest.raises(RuntimeError, match=r"w13_weight_scale_2 is of weights that are stored otherwise"):
        usual.load_state_dict(given, strict=False)


def test_scales_begin_as_one():
    experts = _layer()
    add_weight_scales(experts, *GROUP, dtype=FLOAT8)
    experts.reset_parameters()
    for scale in (experts.w13_weight_scale, experts.w2_weight_scale):
        assert scale.dtype == FLOAT8 and (scale.float() == 1).all()
    empty = _layer("meta")
    quantise_experts(empty, *GROUP, dtype=NUMBERS)
    assert empty.w13_weight_scale_2.is_meta and empty.quantisation.global_scales


def test_experts_that_move_take_all_of_theirs():
    experts = _quantised()
    moved = experts.get_expert_weights()
    assert sum(each.shape[1] for each in moved) == sum(p[0].numel() for p in experts.parameters())


REFUSED = {
    "another kind": ((WeightScale.CHANNEL,), {}, "CHANNEL.*with weights of 4 bits: expected GROUP of a multiple of 16"),
    "groups of 8": ((WeightScale.GROUP, (1, 8)), {}, r"block=\(1, 8\) with weights of 4 bits: expected GROUP of"),
    "quantised rows": (GROUP, {"rows": "quantised"}, "rows='quantised' with weights of 4 bits: expected 'exact'"),
    "zero points": (GROUP, {"zero_points": True}, r"zero_points=True with dtype=torch\.float4_e2m1fn_x2: expected"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    given, named, message = REFUSED[what]
    experts = _layer()
    with pytest.raises(ValueError, match=message):
        quantise_experts(experts, *given, dtype=NUMBERS, **named)
    assert experts.w13_weight.dtype == torch.float32 and not hasattr(experts, "w13_weight_scale")
