"""Layers whose rows have scales that a checkpoint brings, among ranks: all have those of all experts."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module

from layers import FusedMoE, MoEConfig, WeightScale, quantise_experts
from layers.parallel import ExpertParallel, ExpertRebalancer, ExpertTensorParallel
from layers.weights.scales import INPUT_SCALES
from tests.helpers import relative_error
from tests.layers.parallel.test_quantised import STYLES, E, H, I, K, mesh_of_all, tokens_of
from tests.layers.parallel.world import on_ranks


def _layer():
    torch.manual_seed(3)
    layer = FusedMoE(MoEConfig(E, K, H, I, has_bias=True))
    quantise_experts(layer, WeightScale.CHANNEL, rows="static")
    with torch.no_grad():
        layer.w13_input_scale.uniform_(0, 0.02)
        layer.w2_input_scale.uniform_(0, 0.002)
    return layer


@on_ranks(2)
@pytest.mark.parametrize("style", [*STYLES, "tensor"])
def test_values(style):
    layer, styles = _layer(), STYLES | {"tensor": ExpertTensorParallel()}
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), styles[style])
    hidden, logits = tokens_of(0 if style in ("allreduce", "tensor") else dist.get_rank())
    with torch.no_grad():
        found, expected = sharded(hidden, logits), layer(hidden, logits)
    assert found.shape == expected.shape and (not len(hidden) or relative_error(found, expected) < 1e-5)
    for name in INPUT_SCALES:
        assert torch.equal(sharded.get_parameter(name), layer.get_parameter(name))


@on_ranks(2)
def test_experts_change_places_and_leave_them():
    layer, (hidden, logits) = _layer(), tokens_of(0)
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), ExpertParallel("allreduce"))
    ExpertRebalancer(sharded).place("round_robin")
    assert not sharded.balancing.is_initial()
    with torch.no_grad():
        assert relative_error(sharded(hidden, logits), layer(hidden, logits)) < 1e-5
    value, held = torch.tensor([7.0]), sharded.balancing.held()
    for place in range(E):  # as weights are loaded
        sharded.weight_loader(sharded.w2_input_scale, value + place, "2.w2.input_scale", "w2", place)
    assert sharded.w2_input_scale[held].tolist() == [7.0 + place for place in range(E)]
