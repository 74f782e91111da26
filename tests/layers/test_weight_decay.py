"""Which parameters decay, and modules that can be drawn anew."""

import pytest
import torch
from torch import nn

from layers import (
    FusedMoE,
    MoEBlock,
    MoEConfig,
    Router,
    RouterConfig,
    SharedExpertConfig,
    SharedExperts,
    weight_decay_groups,
)

CONFIG = MoEConfig(
    8,
    2,
    16,
    24,
    has_bias=True,
    router=RouterConfig(has_bias=True),
    shared_experts=SharedExpertConfig(40, "sigmoid"),
)


def names_of(model, groups):
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return [sorted(name_of[parameter] for parameter in group["params"]) for group in groups]


def test_matrices_decay_and_biases_of_experts_do_not():
    block = MoEBlock(CONFIG)
    assert block.experts.w13_bias.ndim == 2
    groups = weight_decay_groups(block, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert names_of(block, groups) == [
        [
            "experts.w13_weight",
            "experts.w2_weight",
            "gate.weight",
            "shared_experts.down_proj.weight",
            "shared_experts.gate.weight",
            "shared_experts.gate_up_proj.weight",
        ],
        ["experts.w13_bias", "experts.w2_bias", "gate.bias"],
    ]


def test_frozen_norms_and_parametrised_biases():
    model = nn.ModuleDict(
        {"norm": nn.LayerNorm(16), "experts": FusedMoE(CONFIG), "embedding": nn.Embedding(4, 16)}
    )
    nn.utils.parametrize.register_parametrization(model["experts"], "w2_bias", nn.Identity())
    model["embedding"].requires_grad_(False)
    assert names_of(model, weight_decay_groups(model, 0.1)) == [
        ["experts.w13_weight", "experts.w2_weight"],
        ["experts.parametrizations.w2_bias.original", "experts.w13_bias", "norm.bias", "norm.weight"],
    ]


def test_a_step_without_gradients_shrinks_what_decays_alone():
    block = MoEBlock(CONFIG)
    before = {name: parameter.clone() for name, parameter in block.named_parameters()}
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(weight_decay_groups(block, 0.5), lr=0.1).step()
    for name, parameter in block.named_parameters():
        scale = 1.0 if name.endswith("bias") else 1 - 0.1 * 0.5
        torch.testing.assert_close(parameter, before[name] * scale)


@pytest.mark.parametrize(
    "make",
    [MoEBlock, FusedMoE, Router, lambda config: SharedExperts(config, config.shared_experts)],
    ids=["block", "experts", "router", "shared_experts"],
)
def test_reset_parameters_draws_what_the_constructor_draws(make):
    torch.manual_seed(3)
    module = make(CONFIG)
    drawn = {name: parameter.clone() for name, parameter in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    module.reset_parameters()
    bounds = {"w2": 24, "down_proj": 40}
    for name, parameter in module.named_parameters():
        fan_in = next((size for key, size in bounds.items() if key in name), 16)
        assert parameter.abs().max() <= fan_in**-0.5, name
        assert parameter.std() > 0.4 * fan_in**-0.5, name
        assert not torch.equal(parameter, drawn[name]), name
