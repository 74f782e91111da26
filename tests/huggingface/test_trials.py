"""What tests share of trials is what these would find."""

import copy

import pytest
import torch
from torch import nn

from tests.huggingface import trials
from tests.huggingface.families import tiny_model


class Block(nn.Module):
    def __init__(self, size=100):
        super().__init__()
        self.linear = nn.Linear(size, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.options = {"limit": 1.0}

    def forward(self, x):
        return self.linear(x)


def another_size(block):
    return Block(101)


def another_option(block):
    block.options["limit"] = 2.0
    return block


def another_class(block):
    block.linear.__class__ = type("Linear", (nn.Linear,), {})
    return block


def another_number(block):
    block.scale.data += 1
    return block


def another_dtype(block):
    return block.bfloat16()


def a_hook(block):
    block.linear.register_forward_hook(lambda *_: None)
    return block


def something_unknown(block):
    block.something = object()
    return block


CHANGES = (
    another_size,
    another_option,
    another_class,
    another_number,
    another_dtype,
    a_hook,
    something_unknown,
)


@pytest.fixture
def tried():
    """Modules of which a trial has been run."""
    return []


@pytest.fixture
def trial(tried):
    return trials.once(lambda block: tried.append(block) or len(tried))


def test_alike_modules_are_tried_once(trial, tried):
    assert trial(Block()) == trial(Block()) == 1
    block = tiny_model("gpt_oss").model.layers[0].mlp
    assert trial(block) == trial(copy.deepcopy(block)) == 2
    assert len(tried) == 2


@pytest.mark.parametrize("change", CHANGES)
def test_others_are_tried(trial, tried, change):
    trial(Block())
    assert trial(change(Block())) == 2


def test_what_is_not_known_is_tried_each_time(trial, tried):
    for _ in range(2):
        trial(something_unknown(Block()))
    assert len(tried) == 2


def test_other_code_is_tried(trial, monkeypatch):
    trial(Block())
    monkeypatch.setattr(Block, "forward", lambda self, x: x)
    assert trial(Block()) == 2


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        lambda: torch.device("cpu"),
        torch.overrides.BaseTorchFunctionMode,
    ],
)
def test_it_is_tried_in_each_mode(trial, mode):
    block = Block()
    trial(block)
    with mode():
        assert trial(block) == 2


def test_a_config_with_another_option_is_tried(trial):
    experts = tiny_model("mixtral").model.layers[0].mlp.experts
    trial(experts)
    experts.config.num_experts_per_tok = 1
    assert trial(experts) == 2
