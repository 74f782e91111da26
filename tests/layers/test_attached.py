"""What is set on a layer and cannot be used is refused when it is set, by its name."""

import copy

import pytest
import torch
from torch import nn

from layers import ExpertLora, FusedMoE, MoEConfig, RoutedExpertsCapture

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
