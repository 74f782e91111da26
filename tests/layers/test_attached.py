"""What is set on a layer and cannot be used is refused when it is set, by its name."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from layers import ExpertLora, FusedMoE, MoEBlock, MoEConfig, RoutedExpertsCapture, RouterConfig
from moe_ops import RoutingConfig

T, E, H, I = 5, 4, 32, 16
WRONG = {
    "a number": 3,
    "a text": "x",
    "an object": object(),
    "a tensor": torch.ones(2),
    "False": False,
    "a class": RoutedExpertsCapture,
}


def layer(hidden_size=H, intermediate_size=I):
    return FusedMoE(MoEConfig(E, 2, hidden_size, intermediate_size))


def lora(of):
    return ExpertLora(of, 2, 4, torch.zeros(T, dtype=torch.int32))


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("name", ["lora", "capture", "routing_override"])
def test_other_types(name, value):
    module = layer()
    with pytest.raises(TypeError, match=f"^{name}=.*: expected None or a"):
        setattr(module, name, value)
    assert getattr(module, name) is None


def test_modules_that_are_no_adapters():
    with pytest.raises(TypeError, match="lora=<Linear>: expected None or an ExpertLora, got Linear"):
        layer().lora = nn.Linear(2, 2)


@pytest.mark.parametrize(("sizes", "part"), [((H, 8), "w13"), ((16, I), "w13"), ((H, 48), "w13")])
def test_adapters_of_other_sizes(sizes, part):
    with pytest.raises(ValueError, match=rf"lora changes {part} of \[.*\] features: expected \[32, 32\]"):
        layer().lora = lora(layer(*sizes))


def test_what_can_be_used():
    module = layer()
    module.lora, module.capture = lora(module), [].append
    module.routing_override = lambda tokens, logits: logits.softmax(-1).topk(2)
    assert copy.deepcopy(module)(torch.randn(T, H), torch.randn(T, E)).shape == (T, H)
    module.lora = module.capture = module.routing_override = None
    assert module.lora is None


@pytest.mark.parametrize("kind", [FusedMoE, MoEBlock])
def test_a_config_stays_the_one_that_a_layer_was_built_by(kind):
    module = kind(MoEConfig(E, 2, H, I))
    for name, value in (
        ("activation", "gelu"),
        ("router", RouterConfig(scale_on="output")),
        ("emit", "fused"),
    ):
        with pytest.raises(
            ValueError, match=f"^config changes {name}: expected .* {kind.__name__} was built by"
        ):
            module.config = replace(module.config, **{name: value})
    with pytest.raises(TypeError, match="config=2: expected MoEConfig"):
        module.config = 2
    module.config = copy.deepcopy(module.config)
    assert module.config == MoEConfig(E, 2, H, I)


def test_another_config_around_the_same_weights():
    block, tokens = MoEBlock(MoEConfig(E, 2, H, I)), torch.randn(T, H)
    with pytest.raises(ValueError, match=r"config changes top_k, routing: expected .* load_state_dict"):
        block.experts.config = replace(block.config, top_k=1, routing=RoutingConfig(1))
    other = MoEBlock(replace(block.config, top_k=1, routing=RoutingConfig(1)), device="meta")
    other.load_state_dict(block.state_dict(), assign=True)
    expert = block.gate(tokens).argmax(1)
    gate, up = torch.einsum("tih,th->ti", block.experts.w13_weight[expert], tokens).chunk(2, 1)
    expected = torch.einsum("thi,ti->th", block.experts.w2_weight[expert], nn.functional.silu(gate) * up)
    torch.testing.assert_close(other(tokens), expected)
    torch.testing.assert_close(other.forward_with_routing(tokens)[0], expected)
