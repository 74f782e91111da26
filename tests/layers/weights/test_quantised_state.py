"""Quantised layers in what is done to modules: state dicts, casts, sharding, adapters; and what quantising keeps."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

from layers import (
    FusedMoE,
    MoEConfig,
    WeightScale,
    add_weight_scales,
    quantise_experts,
    quantising,
)
from tests.helpers import assert_same
from tests.layers.test_fsdp import mesh  # noqa: F401  # a fixture

E, H, I = 6, 10, 12
X, LOGITS = torch.randn(5, H), torch.randn(5, E)
DTYPES = {"float8": torch.float8_e4m3fn, "int8": torch.int8, "float32": None}


def _layer(dtype=None):
    experts = FusedMoE(MoEConfig(E, 2, H, I))
    if dtype is not None:
        quantise_experts(experts, WeightScale.CHANNEL, dtype=dtype, rows="exact")
    return experts


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("ours", DTYPES)
def test_weights_of_other_dtypes_are_not_loaded_as_if_they_were_ours(ours, given):
    """448 in float8 is no number of int8: torch copies it all the same, and all keys match."""
    experts, other = _layer(DTYPES[ours]), _layer(DTYPES[given])
    if ours == given:
        experts.load_state_dict(other.state_dict())
        assert_same([experts(X, LOGITS)], [other(X, LOGITS)])
        return
    state = {f"experts.{name}": each for name, each in other.state_dict().items()}
    with pytest.raises(
        RuntimeError, match=r"experts.w2_weight has dtype torch.\w+: expected torch.\w+, that of the"
    ):
        nn.ModuleDict({"experts": experts}).load_state_dict(state, strict=False)


@pytest.mark.parametrize("assign", [False, True])
def test_numbers_that_are_others_without_what_is_beside_them_are_not_loaded_alone(assign):
    """The numbers of both are bytes."""
    ours, other = (FusedMoE(MoEConfig(E, 2, 64, 32)) for _ in range(2))
    for experts, has_zeros in ((ours, False), (other, True)):
        kind = WeightScale.GROUP, (1, 32)
        quantise_experts(experts, *kind, dtype=torch.uint4, zero_points=has_zeros)
    told = "experts.w2_weight_zero_point is of weights that are stored otherwise: expected none"
    state = {f"experts.{name}": each for name, each in other.state_dict().items()}
    with pytest.raises(RuntimeError, match=told):
        nn.ModuleDict({"experts": ours}).load_state_dict(state, strict=False, assign=assign)
    scales = {name: each for name, each in ours.state_dict().items() if name.endswith("scale")}
    with pytest.raises(RuntimeError, match="w13_weight_scale is of weights"):
        _layer().load_state_dict(scales, strict=False, assign=assign)


def test_what_is_assigned_has_its_own_dtype():
    experts, other = _layer(torch.int8), _layer(torch.float8_e4m3fn)
    experts.load_state_dict(other.state_dict(), assign=True)
    assert_same([experts(X, LOGITS)], [other(X, LOGITS)])


def test_weights_of_16_bits_beside_scales_are_cast():
    experts = _layer()
    add_weight_scales(experts, WeightScale.CHANNEL)
    experts.to(torch.bfloat16)
    assert experts.w13_weight.dtype == experts.w2_weight.dtype == torch.bfloat16
    assert experts.w13_weight_scale.dtype == experts.w2_weight_scale.dtype == torch.float32


def test_one_weight_at_a_time(monkeypatch):
    """Where w2 is quantised, w13 is there in 8 bits only."""
    experts, alive, real = _layer(), [], quantising.quantised_weight
    wide = weakref.ref(experts.w13_weight)

    def quantised_weight(*args):
        gc.collect()
        alive.append(wide() is not None)
        return real(*args)

    monkeypatch.setattr(quantising, "quantised_weight", quantised_weight)
    quantise_experts(experts, WeightScale.CHANNEL)
    assert alive == [True, False]


def _sharded(experts, mesh):  # noqa: F811
    fully_shard(experts, mesh=mesh)


def _parametrised(experts, mesh):  # noqa: F811
    parametrize.register_parametrization(experts, "w2_weight", nn.Identity())


@pytest.mark.parametrize("change", [_sharded, _parametrised])
def test_weights_that_are_no_plain_parameters_are_left_alone(change, mesh):  # noqa: F811
    experts = _layer()
    expected = experts(X, LOGITS)
    change(experts, mesh)
    with pytest.raises(
        ValueError, match=r"w\d+_weight is sharded or parametrised: expected a plain parameter"
    ):
        quantise_experts(experts, WeightScale.CHANNEL)
    assert experts.quantisation is None
    assert_same([experts(X, LOGITS)], [expected])
