"""Limits on what is between products: on numbers as small as usual they do nothing, on large ones they count."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from layers import huggingface
from layers.huggingface import blocks as known_blocks, gates, outside, stacking
from tests.coverage.cases import stock_model
from tests.huggingface import blocks
from tests.huggingface.loops import EXPERTS, HIDDEN, Collection, Expert, Loop, Shared, block
from tests.huggingface.remote import CalledExperts, DeepSeek, MiniMaxM2
from tests.huggingface.test_whole import PARTS, hidden, is_whole, ran

LIMIT = 20.0


def limited(gate, up):
    return gate.clamp(max=LIMIT) * up.clamp(-LIMIT, LIMIT)


class LimitedExpert(Expert):
    def forward(self, hidden_states):
        return self.w2(limited(self.act_fn(self.w1(hidden_states)), self.w3(hidden_states)))


@torch.no_grad()
def test_of_an_expert_that_is_a_module():
    own = block(Loop, expert=LimitedExpert)
    for each in own.experts.parameters():
        each.mul_(9)
    ours = copy.deepcopy(own)
    report = huggingface.patch(ours, stack_experts=True)
    assert report.experts == () and report.left[0][1].startswith("an expert is no MLP")
    tokens = torch.randn(3, 7, HIDDEN)
    assert torch.equal(ours(tokens)[0], own(tokens)[0])


@pytest.mark.parametrize("tokens", [1, 3, 9])
@torch.no_grad()
def test_of_a_shared_expert_alone(tokens):
    own = blocks.block("qwen3_next", "eager")
    kind = type(own.shared_expert)

    class Limited(kind):
        def forward(self, x):
            return self.down_proj(limited(self.act_fn(self.gate_proj(x)), self.up_proj(x)))

    own.shared_expert.__class__ = Limited
    for each in own.shared_expert.parameters():
        each.mul_(9)
    ours = copy.deepcopy(own)
    huggingface.patch(ours)
    given = hidden(1, tokens, blocks.HIDDEN)
    actual, operators = ran(ours, given)
    assert is_whole(ours) and operators == PARTS
    torch.testing.assert_close(actual, own(given), rtol=1e-4, atol=1e-4)


class LimitedCollection(Collection):
    """Around a gate that has none."""

    def middle(self, gate, up):
        return limited(gate, up)


def test_of_a_collection_around_its_gate():
    assert outside.collection_activation(Collection()) == "silu"
    assert outside.collection_activation(LimitedCollection()) is None


@pytest.mark.parametrize("limit", [20.0, 100.0, 300.0])
def test_of_a_gate_that_no_attribute_tells(limit):
    def gate(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up.clamp(-limit, limit)

    experts = nn.Module()
    assert gates.of_function(F.silu) is not None
    experts._apply_gate = gate
    assert gates.recognised(experts) is None


class MaskedExperts(nn.ModuleDict):
    """As Switch has them, with a limit on what they are given."""

    def __init__(self, most):
        super().__init__({f"expert_{each}": Expert() for each in range(EXPERTS)})
        self.most = most

    def forward(self, hidden_states, mask, weights):
        final = torch.zeros_like(hidden_states)
        for place, expert in enumerate(self.values()):
            token, slot = torch.where(mask[..., place])
            rows = hidden_states[token].clamp(-self.most, self.most)
            final.index_add_(0, token, expert(rows) * weights[token, slot, None])
        return final


def test_of_experts_told_by_a_mask():
    for most, is_masked in ((float("inf"), True), (LIMIT, False)):
        experts = MaskedExperts(most)
        mlp = stacking.known_mlp(experts["expert_0"])
        assert mlp is not None and stacking._is_masked(experts, mlp) is is_masked


def block_limits(kind, is_limited):
    """A block that limits its tokens to twice what is usual, where `is_limited` of them."""

    class Limited(kind):
        def forward(self, hidden_states):
            if is_limited(hidden_states):
                hidden_states = hidden_states.clamp(-8, 8)
            return super().forward(hidden_states)

    return Limited


WHERE = {"always": lambda tokens: True, "one token": lambda tokens: tokens.shape[:2] == (1, 1)}


@pytest.mark.parametrize("where", WHERE)
def test_of_a_block_with_a_list_of_experts(where):
    own = block(Loop)
    own.__class__ = block_limits(Loop, WHERE[where])
    report = huggingface.patch(own, stack_experts=True)
    assert report.experts == () and report.left[0][1].startswith("its output is not the sum")


def output_limits(kind, most):
    """A block whose whole output is limited."""

    class Limited(kind):
        def forward(self, hidden_states):
            returned = super().forward(hidden_states)
            if isinstance(returned, tuple):
                return returned[0].clamp(-most, most), *returned[1:]
            return returned.clamp(-most, most)

    return Limited


@pytest.mark.parametrize("most", [50.0, 1e4])
@pytest.mark.parametrize("kind", [Loop, Shared, DeepSeek])
def test_of_the_output_of_a_block(kind, most):
    """Far above what tokens of usual size give."""
    own = block(kind)
    own.__class__ = output_limits(kind, most)
    report = huggingface.patch(own, stack_experts=True)
    assert report.experts == () and report.left[0][1].startswith("its output is not the sum")


@pytest.mark.parametrize("most", [1e4, None])
def test_of_the_output_of_a_list_that_is_called(most):
    class Limited(CalledExperts):
        def forward(self, *args, **named):
            output = super().forward(*args, **named)
            return output if most is None else output.clamp(-most, most)

    own = block(MiniMaxM2)
    own.experts.__class__ = Limited
    assert huggingface.patch(own, stack_experts=True).experts == (() if most else ("experts",))


def test_of_a_block_outside_of_the_interface():
    own = stock_model("llama4").model.layers[0].feed_forward
    assert known_blocks.known_block(own) is not None
    own.__class__ = block_limits(type(own), WHERE["always"])
    assert known_blocks.known_block(own) is None
