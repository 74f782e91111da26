"""Models that are changed inside `torch.inference_mode`, where a server may load them, and train or load later."""

import copy

import pytest
import torch

import layers
from layers import huggingface
from tests.huggingface.families import tiny_model, tokens
from tests.huggingface.loops import HIDDEN, Loop, block


def quantised(model):
    huggingface.quantise_experts(model, layers.WeightScale.CHANNEL, dtype=torch.float8_e4m3fn)


def adapted(model):
    huggingface.add_adapters(model, 2, 4, torch.zeros(10, dtype=torch.int32))


@pytest.mark.parametrize(
    "change", [lambda model: None, quantised, adapted], ids=["patch", "quantised", "adapted"]
)
def test_gradients_outside_of_it(change):
    model = tiny_model("qwen3_moe")
    with torch.inference_mode():
        huggingface.patch(model)
        change(model)
    model(input_ids=tokens(2, 5), labels=tokens(2, 5)).loss.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().max() > 0


def test_stacked_experts_train_and_load_outside_of_it():
    own, hidden = block(Loop), torch.randn(2, 9, HIDDEN)
    ours = copy.deepcopy(own)
    with torch.inference_mode():
        assert huggingface.patch(ours, stack_experts=True).experts
    ours.load_state_dict(own.state_dict())
    ours(hidden)[0].sum().backward()
    assert ours.experts.down_proj.grad.abs().max() > 0


def test_weights_that_were_made_in_it_are_stacked():
    with torch.inference_mode():
        own = block(Loop)
        ours = copy.deepcopy(own)
    assert huggingface.patch(ours, stack_experts=True).experts
    with torch.no_grad():
        hidden = torch.randn(2, 9, HIDDEN)
        torch.testing.assert_close(ours(hidden)[0], own(hidden)[0], rtol=1e-4, atol=1e-5)
