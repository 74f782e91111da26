"""Blocks that are a sum over experts for most tokens, and something else for others, in other modes and dtypes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from layers import huggingface
from moe_ops import RoutingConfig
from tests.helpers import relative_error
from tests.huggingface.loops import EXPERTS, HIDDEN, Expert, Loop, block
from tests.huggingface.remote import CalledExperts, MiniMaxM2


def hidden(*shape, seed=3):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


class Some(Loop):
    """Of the tokens of an expert `rows` are left."""

    def rows(self, tokens, expert):
        return tokens

    def routed(self, hidden_states, logits):
        weights, ids = self.weigh(logits)
        final = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(ids == expert)
            rows = self.rows(torch.arange(len(token)), expert)
            token, place = token[rows], place[rows]
            output = self.run(expert, hidden_states[token]) * weights[token, place, None]
            final = final.index_add(0, token, output)
        return final

    def run(self, expert, tokens):
        return self.experts[expert](tokens)


class Room(Some):
    def rows(self, tokens, expert):
        return tokens[:64]


class RoomInTraining(Room):
    def rows(self, tokens, expert):
        return super().rows(tokens, expert) if self.training else tokens


class Busy(Some):
    """Experts that only one of several tokens wants do not run."""

    def forward(self, hidden_states):
        self.__dict__["least"] = 2 if hidden_states.shape[:2].numel() > 1 else 0
        try:
            return super().forward(hidden_states)
        finally:
            del self.__dict__["least"]

    def rows(self, tokens, expert):
        return tokens if len(tokens) >= self.least else tokens[:0]


class ManyExperts(Some):
    """One of many does nothing."""

    def __init__(self):
        super().__init__()
        self.num_experts = 48
        self.gate = nn.Linear(HIDDEN, self.num_experts, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(self.num_experts)])

    def run(self, expert, tokens):
        return tokens if expert == 20 else super().run(expert, tokens)


class Inference(Loop):
    def forward(self, hidden_states):
        output, logits = super().forward(hidden_states)
        return output if torch.is_grad_enabled() else output.round(), logits


class Column(Loop):
    """One token each of several sequences."""

    def forward(self, hidden_states):
        output, logits = super().forward(hidden_states)
        return output * 2 if hidden_states.shape[:2].numel() > hidden_states.shape[1] == 1 else output, logits


class FrozenExpert(Expert):
    """By its code, not by its weights."""

    def forward(self, hidden_states):
        rows = self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states)
        return F.linear(rows, self.w2.weight.detach())


class Frozen(Loop):
    def __init__(self):
        super().__init__(FrozenExpert)


class FrozenGate(Loop):
    def forward(self, hidden_states):
        tokens = hidden_states.flatten(0, 1)
        logits = F.linear(tokens, self.gate.weight.detach())
        return self.routed(tokens, logits).view(hidden_states.shape), logits


class Loose(Loop):
    """A scale that is a tensor, and neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.scale = torch.tensor(2.0)

    def weigh(self, logits):
        weights, ids = super().weigh(logits)
        return weights * self.scale, ids


class LeastSum(Loop):
    def weigh(self, logits):
        weights, ids = logits.sigmoid().topk(self.top_k)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9), ids


class Limited(Loop):
    def weigh(self, logits):
        return super().weigh(logits.clamp(-40, 40))


KINDS = (
    *(Room, RoomInTraining, Busy, ManyExperts, Inference, Column, Frozen, FrozenGate, Loose, LeastSum),
    Limited,
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_computes_something_else_elsewhere_is_left_alone(kind):
    report = huggingface.patch(block(kind), stack_experts=True)
    assert report.experts == () and len(report.left) == 1


def test_what_makes_one_way_fail_is_asked_first_for_others():
    """Several ways to route give the same where blocks are tried first."""
    runs = []

    class Counted(ManyExperts):
        def forward(self, hidden_states):
            runs.append(hidden_states.shape)
            return super().forward(hidden_states)

    huggingface.patch(block(Counted), stack_experts=True)
    assert len(runs) < 200


def test_a_list_that_is_called_and_has_no_room_in_training():
    class Limited(CalledExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            output = super().forward(hidden_states, top_k_index, top_k_weights)
            return output * (2 if self.training and len(output) > 100 else 1)

    own = block(MiniMaxM2)
    own.experts.__class__ = Limited
    assert huggingface.patch(own, stack_experts=True).experts == ()


def test_the_reason():
    assert dict(huggingface.patch(block(Room), stack_experts=True).left) == {
        "": "for few tokens, many that want the same experts, some expert, or without gradients it gives something "
        "else than the sum over experts"
    }


def test_a_block_of_all_tokens_is_stacked():
    assert huggingface.patch(block(Some), stack_experts=True).experts == ("experts",)


class OfLogits(Loop):
    def weigh(self, logits):
        weights, ids = logits.topk(self.top_k)
        return weights.sigmoid(), ids


def test_logits_are_told_from_their_sigmoids():
    own, ours = block(OfLogits), block(OfLogits)
    computed = dict(huggingface.patch(ours, stack_experts=True).computed)
    assert computed["gate"] == RoutingConfig(2, "sigmoid", "topk_then_score", renormalize=False).spec
    tokens = 40 * hidden(1, 20)
    torch.testing.assert_close(ours(tokens)[0], own(tokens)[0], rtol=1e-4, atol=1e-3)


class Cast(Loop):
    """A gate in float32 beside experts in less (ERNIE 4.5)."""

    def logits(self, tokens):
        return self.gate(tokens.float())

    def forward(self, hidden_states):
        tokens = hidden_states.flatten(0, 1)
        logits = self.logits(tokens)
        return self.routed(tokens, logits).view(hidden_states.shape), logits


class CastBoth(Cast):
    def logits(self, tokens):
        return F.linear(tokens.float(), self.gate.weight.float())


@pytest.mark.parametrize(
    ("kind", "gate_dtype"), [(Cast, torch.float32), (CastBoth, torch.float32), (CastBoth, None)]
)
@torch.no_grad()
def test_gates_in_float32(kind, gate_dtype):
    own = block(kind).bfloat16()
    own.gate.to(gate_dtype)
    ours = copy.deepcopy(own)
    assert huggingface.patch(ours, stack_experts=True).experts
    tokens = hidden(1, 300).bfloat16()
    (output, logits), (expected, expected_logits) = ours(tokens), own(tokens)
    assert torch.equal(logits, expected_logits) and logits.dtype == torch.float32
    assert output.dtype == torch.bfloat16 and relative_error(output, expected) < 1e-2


class Parts(Loop):
    """A module that is not called when experts are stacked."""

    def __init__(self):
        super().__init__()
        self.last = nn.Sequential(nn.Dropout(0.0))

    def forward(self, hidden_states):
        output, logits = super().forward(hidden_states)
        return self.last(output), logits


def test_hooks_on_a_module_that_would_not_be_called():
    ours = block(Parts)
    ours.last[0].register_forward_hook(lambda module, args, output: output / 2)
    why = "last.0 has hooks or a forward of its own, and would not be called"
    assert huggingface.patch(ours, stack_experts=True).left == (("", why),)


def hook(module):
    module.register_forward_hook(lambda module, args, output: output / 2)


def drop(module):
    module.p = 0.5


@pytest.mark.parametrize("change", [hook, drop])
def test_what_changes_in_a_module_that_is_not_called(change):
    ours = block(Parts)
    assert huggingface.patch(ours, stack_experts=True).experts
    assert ours(hidden(1, EXPERTS))[0].abs().max() > 0
    change(ours.last[0])
    with pytest.raises(
        ValueError, match=r"last\.0 changed, or got hooks, after experts were stacked: expected unpatch"
    ):
        ours(hidden(1, EXPERTS))
