"""Options that are numbers take finite ones, and neither True nor a text for one."""

import math

import pytest
import torch
from torch import nn

from layers import ExpertLora, ExpertsConfig, FusedMoE, MoEConfig, weight_decay_groups
from layers.lora import LowRank
from layers.serve.options import ServeOptions
from moe_ops import RoutingConfig


def load_adapter(scaling):
    lora = ExpertLora(FusedMoE(MoEConfig(2, 1, 4, 4)), 1, 1, torch.zeros(1, dtype=torch.int32))
    gate_up, down = (
        LowRank(torch.ones(2, 1, 4), torch.ones(2, 8, 1)),
        LowRank(torch.ones(2, 1, 4), torch.ones(2, 4, 1)),
    )
    lora.load_adapter(0, gate_up, down, scaling)
    assert math.isfinite(lora.scaling)


NUMBERS = {
    "scaling": load_adapter,
    "weight_decay": lambda value: weight_decay_groups(nn.Linear(1, 1), value),
    "post_norm_eps": lambda value: ExpertsConfig(post_norm_eps=value),
    "renorm_eps": lambda value: RoutingConfig(renorm_eps=value),
    "scale": lambda value: RoutingConfig(scale=value),
    "group_fill": lambda value: RoutingConfig(group_fill=value),
}
VALUES = [math.nan, math.inf, True, "1", torch.ones(2), 1j]


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number(name, value):
    NUMBERS[name](0.5)
    with pytest.raises((TypeError, ValueError), match=f"^{name}[ =].*: expected"):
        NUMBERS[name](value)


def test_a_scaling_that_is_a_tensor():
    load_adapter(torch.tensor([0.5]))
    with pytest.raises(ValueError, match="scaling=nan: expected a finite number"):
        load_adapter(torch.tensor(math.nan))


OF_TYPES = {
    "model": str,
    "host": str,
    "device": str,
    "dtype": str,
    "backend": (str, type(None)),
    "cuda_graphs": (bool, type(None)),
    "greedy": bool,
}


@pytest.mark.parametrize("value", [*VALUES, None], ids=str)
@pytest.mark.parametrize("name", OF_TYPES)
def test_options_of_a_server(name, value):
    if isinstance(value, OF_TYPES[name]):
        assert getattr(ServeOptions(**{"model": "model", name: value}), name) is value
    else:
        with pytest.raises(TypeError, match=f"^{name}=.*: expected"):
            ServeOptions(**{"model": "model", name: value})
