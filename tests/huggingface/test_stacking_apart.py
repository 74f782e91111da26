"""Experts that are more than their weights (hooks, forwards of their own, other uses): their block stays as it is."""

import copy

import pytest
import torch
from torch import nn

from layers import huggingface
from layers.huggingface.stacked import StackedExperts
from tests.coverage.cases import outputs, stock_model
from tests.huggingface.loops import HIDDEN, INTER, Loop, block


class Model(nn.Module):
    """A block beside something that may hold one of its experts, or a weight."""

    def __init__(self):
        super().__init__()
        self.moe = block(Loop)
        self.dense = nn.Linear(HIDDEN, INTER, bias=False)

    def forward(self, hidden_states):
        return self.moe(hidden_states)[0].sum(-1) + self.dense(hidden_states).sum(-1)


def hidden():
    return torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(3))


def twice(model):
    model.moe.experts[2] = model.moe.experts[0]


def tied(model):
    model.moe.experts[2].w1.weight = model.moe.experts[0].w1.weight


def elsewhere(model):
    model.dense = model.moe.experts[5]


def weight_elsewhere(model):
    model.dense.weight = model.moe.experts[5].w3.weight


def list_elsewhere(model):
    model.experts = model.moe.experts


def own_forward(model):
    model.moe.experts[1].forward = torch.ones_like


def own_forward_inside(model):
    model.moe.experts[1].w1.forward = lambda rows: torch.ones(*rows.shape[:-1], INTER)


def hook(model):
    model.moe.experts[1].register_forward_hook(lambda module, args, output: output * 0)


def hook_inside(model):
    model.moe.experts[1].w1.register_forward_pre_hook(lambda module, args: (args[0] * 0,))


def backward_hook(model):
    for expert in model.moe.experts:
        expert.register_full_backward_hook(lambda module, inputs, outputs: None)


def state_dict_hook(model):
    model.moe.experts.register_state_dict_post_hook(lambda *args: None)


def weight_hook(model):
    model.moe.experts[1].w2.weight.register_hook(lambda gradient: gradient * 2)


def accumulated_hook(model):
    model.moe.experts[1].w2.weight.register_post_accumulate_grad_hook(lambda parameter: None)


PLACES, HOOKS = "is in more than one place of the model", "has hooks, which stacked experts would not run"
REASONS = {
    twice: f"experts.0 {PLACES}",
    tied: f"experts.0.w1.weight {PLACES}",
    elsewhere: f"experts.5 {PLACES}",
    weight_elsewhere: f"experts.5.w3.weight {PLACES}",
    list_elsewhere: f"experts {PLACES}",
    own_forward: "the forward of experts.1 has been replaced on the instance",
    own_forward_inside: "the forward of experts.1.w1 has been replaced on the instance",
    hook: f"experts.1 {HOOKS}",
    hook_inside: f"experts.1.w1 {HOOKS}",
    backward_hook: f"experts.0 {HOOKS}",
    state_dict_hook: f"experts {HOOKS}",
    weight_hook: f"experts.1.w2.weight {HOOKS}",
    accumulated_hook: f"experts.1.w2.weight {HOOKS}",
}


@pytest.mark.parametrize("change", REASONS)
def test_what_would_be_lost_is_left_alone(change):
    model = Model()
    change(model)
    expected, saved = model(hidden()), copy.deepcopy(model.state_dict())
    report = huggingface.patch(model, stack_experts=True)
    assert report.left == (("moe", REASONS[change]),) and report.experts == report.routers == ()
    assert torch.equal(model(hidden()), expected)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


HERE = "torch.float32 on cpu"
KINDS = {
    "frozen": (
        lambda model: model.moe.experts[1].requires_grad_(False),
        f"its experts' weights are {HERE} (frozen) and {HERE} (trained): expected one kind",
    ),
    "dtype": (
        lambda model: model.moe.experts[1].double(),
        f"its experts' weights are {HERE} (trained) and torch.float64 on cpu (trained): expected one kind",
    ),
    "meta": (
        lambda model: model.moe.experts.to("meta"),
        "its experts have hooks of accelerate, or weights on the meta device: expected weights that can be copied",
    ),
}


@pytest.mark.parametrize(("change", "reason"), KINDS.values(), ids=KINDS)
def test_weights_that_no_tensor_can_have_together_are_told(change, reason):
    model = Model()
    change(model)
    report = huggingface.patch(model, stack_experts=True)
    assert report.left == (("moe", reason),) and isinstance(model.moe.experts, nn.ModuleList)


def test_other_blocks_are_stacked():
    model = nn.Sequential(Model(), Model())
    hook(model[0])
    expected = model[0](hidden()), model[1](hidden())
    report = huggingface.patch(model, stack_experts=True)
    assert report.experts == ("1.moe.experts",) and report.left == (("0.moe", REASONS[hook]),)
    assert isinstance(model[1].moe.experts, StackedExperts)
    torch.testing.assert_close((model[0](hidden()), model[1](hidden())), expected, rtol=1e-5, atol=1e-4)


def test_blocks_that_have_the_same_experts_are_left_alone():
    model = nn.ModuleList([block(Loop), block(Loop)])
    model[1].experts = model[0].experts
    expected = [each(hidden())[0] for each in model]
    report = huggingface.patch(model, stack_experts=True)
    assert dict(report.left) == dict.fromkeys("01", REASONS[list_elsewhere])
    assert all(torch.equal(each(hidden())[0], one) for each, one in zip(model, expected, strict=True))


def test_an_activation_may_be_shared():
    own, ours = block(Loop), block(Loop)
    for expert in ours.experts:
        expert.act_fn = ours.gate.act_fn = ours.experts[0].act_fn
    assert huggingface.patch(ours, stack_experts=True).left == ()
    torch.testing.assert_close(ours(hidden())[0], own(hidden())[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_block_that_runs_unstacked_is_not_left():
    stock = stock_model("dbrx")
    mlps = [each for each in stock.modules() if hasattr(each, "v1")]
    for mlp in mlps:
        mlp.v1 = mlp.w1
    expected = outputs(stock, "dbrx")[0]
    report = huggingface.patch(stock, stack_experts=True)
    assert len(report.experts) == len(mlps) and report.left == ()
    assert all(mlp.v1 is mlp.w1 for mlp in mlps)
    torch.testing.assert_close(outputs(stock, "dbrx")[0], expected, rtol=1e-4, atol=1e-5)


class Scaled(Loop):
    """Its weights have a scale that is learned."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(5.0))

    def weigh(self, logits):
        weights, ids = super().weigh(logits)
        return weights * self.scale, ids


class Masked(Loop):
    """One of its experts is never chosen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.arange(self.num_experts) != 3)

    def weigh(self, logits):
        return super().weigh(logits.masked_fill(self.mask == 0, -1e9))


@pytest.mark.parametrize("kind", [Scaled, Masked])
def test_what_a_block_has_beside_its_gate_is_not_overlooked(kind):
    model = block(kind)
    expected = model(hidden())[0]
    assert not huggingface.patch(model, stack_experts=True).experts
    assert torch.equal(model(hidden())[0], expected)
