"""Scales of weights in layers that were copied, came off the meta device or were reset."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from layers import FusedMoE, MoEConfig, WeightScale, add_weight_scales
from layers.parallel import ExpertParallel, ExpertTensorParallel
from moe_ops import Activation
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
