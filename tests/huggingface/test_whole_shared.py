"""Patched blocks that compute their sum themselves: what becomes of the expert that every token visits."""

import copy

import pytest
import torch
from torch import nn

from layers import huggingface
from tests.huggingface import blocks
from tests.huggingface.test_whole import PARTS, TOGETHER, hidden, is_whole, ran


class Shared(nn.Module):
    """A shared expert that says when it is called."""

    def __init__(self, own):
        super().__init__()
        self.own, self.calls = own, 0

    def forward(self, hidden_states):
        self.calls += 1
        return self.own(hidden_states)


@torch.no_grad()
def test_modules_that_every_token_visits_are_called():
    """Whatever they are by then: quantised ones, wrapped ones."""
    ours = blocks.block("qwen3_next", "eager")
    huggingface.patch(ours)
    expected, before = ran(ours, hidden(2, 5, blocks.HIDDEN))
    for name in ("shared_expert", "shared_expert_gate"):
        setattr(ours, name, Shared(getattr(ours, name)))
    actual, operators = ran(ours, hidden(2, 5, blocks.HIDDEN))
    assert operators == before
    assert (ours.shared_expert.calls, ours.shared_expert_gate.calls) == (1, 1)
    assert torch.equal(actual, expected)


class DoubledSilu(nn.SiLU):
    """An activation of one's own."""

    def forward(self, x):
        return 2 * super().forward(x)


OF_SHARED = {
    "hook": lambda shared: shared.register_forward_hook(lambda *_: None),
    "hook inside": lambda shared: shared.up_proj.register_forward_hook(lambda _, args, out: out * 2),
    "module inside": lambda shared: setattr(shared, "up_proj", nn.Identity()),
    "activation": lambda shared: setattr(shared, "act_fn", DoubledSilu()),
    "option": lambda shared: setattr(shared, "hidden_size", 7),
    "transposed": lambda shared: setattr(
        shared.up_proj, "weight", nn.Parameter(shared.up_proj.weight.detach().t().contiguous().t())
    ),
}


@pytest.mark.parametrize("name", OF_SHARED)
@torch.no_grad()
def test_a_shared_expert_that_has_changed_is_called(name):
    ours = blocks.block("qwen3_next", "eager")
    ours.shared_expert.down_proj = nn.Linear(blocks.HIDDEN, blocks.HIDDEN, bias=False)
    ours.shared_expert.gate_proj, ours.shared_expert.up_proj = (
        nn.Linear(blocks.HIDDEN, blocks.HIDDEN, bias=False) for _ in range(2)
    )
    stock = copy.deepcopy(ours)
    huggingface.patch(ours)
    assert ran(ours, hidden(1, 3, blocks.HIDDEN))[1] == TOGETHER
    for block in (stock, ours):
        OF_SHARED[name](block.shared_expert)
    actual, operators = ran(ours, hidden(1, 3, blocks.HIDDEN))
    assert operators == PARTS
    torch.testing.assert_close(actual, stock(hidden(1, 3, blocks.HIDDEN)).to(actual.dtype))


@torch.no_grad()
def test_weights_of_another_dtype_end_in_the_modules_own_error():
    ours = blocks.block("qwen3_next", "eager")
    huggingface.patch(ours)
    ours.shared_expert.double()
    with pytest.raises(RuntimeError, match="same dtype"):
        ours(hidden(1, 3, blocks.HIDDEN))


class Halved(nn.Linear):
    """On small sizes it does what a linear module does."""

    def forward(self, input):
        return super().forward(input) * (0.5 if input.shape[-1] == blocks.HIDDEN else 1.0)


@torch.no_grad()
def test_shared_experts_that_are_more_than_linear_modules_are_called():
    """A bias, a scale, a class of its own, another activation than that of the routed experts."""
    for change in (
        lambda shared: setattr(shared, "up_proj", Halved(blocks.HIDDEN, shared.up_proj.out_features, False)),
        lambda shared: setattr(shared, "up_proj", nn.Linear(blocks.HIDDEN, shared.up_proj.out_features)),
        lambda shared: shared.register_parameter("scale", nn.Parameter(torch.ones(1))),
        lambda shared: setattr(shared, "act_fn", nn.GELU()),
    ):
        ours = blocks.block("qwen3_next", "eager")
        change(ours.shared_expert)
        huggingface.patch(ours)
        assert is_whole(ours) and ours.moe_ops_whole.parts.mlp is None
        assert ran(ours, hidden(1, 3, blocks.HIDDEN))[1] == PARTS


@torch.no_grad()
def test_a_weight_of_each_column_is_none_of_a_token():
    stock = blocks.block("qwen3_next", "eager")
    stock.shared_expert_gate = nn.Linear(blocks.HIDDEN, blocks.HIDDEN, bias=False)
    ours = copy.deepcopy(stock)
    huggingface.patch(ours)
    actual, operators = ran(ours, hidden(1, 3, blocks.HIDDEN))
    assert is_whole(ours) and operators == PARTS
    torch.testing.assert_close(actual, stock(hidden(1, 3, blocks.HIDDEN)))


@torch.no_grad()
def test_what_is_emitted_for_a_shared_expert():
    for emit, operators in (
        ("fused", TOGETHER),
        ("stages", {"moe.topk_routing": 1, "moe.fused_experts_with_shared": 0}),
    ):
        ours = blocks.block("qwen3_next", "eager")
        huggingface.patch(ours, emit=emit)
        found = ran(ours, hidden(1, 3, blocks.HIDDEN))[1]
        assert {name: found.get(name, 0) for name in operators} == operators
