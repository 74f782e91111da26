"""Experts that are modules of their own become two tensors, where their block is one that we can rebuild."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from layers import huggingface
from layers.huggingface.stacked import StackedExperts
from moe_ops import RoutingConfig
from tests.coverage.cases import is_installed, outputs, stock_model
from tests.helpers import relative_error
from tests.huggingface.loops import (
    EXPERTS,
    HIDDEN,
    INTER,
    Expert,
    FunctionalExpert,
    GatedShared,
    Loop,
    Noisy,
    Scaled,
    Shared,
    Shifted,
    Squared,
    block,
)
from tests.huggingface.test_raised import Log, raised

KINDS = (Loop, Shared, GatedShared)
ROUTINGS = {
    Loop: RoutingConfig(2),
    Shared: RoutingConfig(2, "sigmoid", renormalize=False),
    GatedShared: RoutingConfig(2),
}


def hidden(tokens=9):
    return torch.randn(2, tokens, HIDDEN, generator=torch.Generator().manual_seed(3))


def results(module, inputs):
    returned = module(inputs)
    return returned if isinstance(returned, tuple) else (returned,)


def stacked(kind):
    module = block(kind)
    report = huggingface.patch(module, stack_experts=True)
    assert (report.experts, report.routers, report.left) == (("experts",), ("gate",), ())
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_a_stacked_block_computes_the_same(kind):
    own, ours = block(kind), stacked(kind)
    assert isinstance(ours.experts, StackedExperts)
    assert ours.experts.gate_up_proj.shape == (EXPERTS, 2 * INTER, HIDDEN)
    for tokens in (9, 1, 0):
        expected, actual = results(own, hidden(tokens)), results(ours, hidden(tokens))
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_says_what_a_block_computes(kind):
    computed = dict(huggingface.patch(block(kind), stack_experts=True).computed)
    assert computed == {"experts": "silu", "gate": ROUTINGS[kind].spec}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    own, ours = block(kind), stacked(kind)
    for module in (own, ours):
        (results(module, hidden())[0] * torch.linspace(0, 1, HIDDEN)).sum().backward()
    grads = dict(ours.named_parameters())
    for name, parameter in own.named_parameters():
        if not name.startswith("experts."):
            assert relative_error(grads[name].grad, parameter.grad) < 1e-5, name
    for part in ours.experts.moe_ops_parts:
        actual = part.of(ours.experts.get_parameter(part.parameter).grad)
        expected = own.experts.get_parameter(part.name).grad
        torch.testing.assert_close(actual, torch.zeros_like(actual) if expected is None else expected)


def test_weights_are_freed():
    module = block(Loop)
    weights = [each.weight for each in module.experts.modules() if isinstance(each, nn.Linear)]
    huggingface.patch(module, stack_experts=True)
    assert {weight.numel() for weight in weights} == {0}
    assert [name for name, _ in module.named_parameters()] == [
        "gate.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_keep_their_names(kind):
    own, ours = block(kind), stacked(kind)
    saved = ours.state_dict()
    assert saved.keys() == own.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in own.state_dict().items())
    other = block(kind)
    for parameter in other.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    ours.load_state_dict(other.state_dict())
    torch.testing.assert_close(results(ours, hidden())[0], results(other, hidden())[0], rtol=1e-5, atol=1e-5)


def test_a_part_of_a_state_dict_leaves_the_rest():
    ours = stacked(Loop)
    before = ours.experts.gate_up_proj.detach().clone()
    ours.load_state_dict({"experts.3.w1.weight": torch.zeros(INTER, HIDDEN)}, strict=False)
    after = ours.experts.gate_up_proj.detach()
    assert after[3, :INTER].eq(0).all() and torch.equal(after[3, INTER:], before[3, INTER:])
    assert torch.equal(after[:3], before[:3]) and torch.equal(after[4:], before[4:])


def test_unpatching_brings_the_list_back():
    own, ours = block(Loop), stacked(Loop)
    huggingface.unpatch(ours)
    assert isinstance(ours.experts, nn.ModuleList)
    assert torch.equal(ours(hidden())[0], own(hidden())[0])
    assert ours.state_dict().keys() == own.state_dict().keys()
    assert huggingface.patch(ours, stack_experts=True).experts == ("experts",)


def test_to_take_an_expert_the_list_comes_first():
    ours = stacked(Loop)
    with pytest.raises(ValueError, match=r"to take one: expected layers.huggingface.unpatch\(model\) first"):
        ours.experts[0]


def test_copies_and_pickles():
    own, ours = block(Loop), stacked(Loop)
    expected = ours(hidden())[0]
    assert torch.equal(copy.deepcopy(ours)(hidden())[0], expected)
    revived = pickle.loads(pickle.dumps(ours))
    with pytest.raises(ValueError, match=r"own code, as out of a pickle: expected layers.huggingface.patch"):
        revived(hidden())
    assert huggingface.patch(revived, stack_experts=True).routers == ("gate",)
    assert torch.equal(revived(hidden())[0], expected)
    huggingface.unpatch(revived)
    torch.testing.assert_close(revived(hidden())[0], own(hidden())[0])


@pytest.mark.parametrize("mode", [True, False])
def test_modes_are_kept(mode):
    ours = block(Loop).train(not mode)
    huggingface.patch(ours, stack_experts=True)
    assert {each.training for each in ours.modules()} == {not mode}
    huggingface.unpatch(ours.train(mode))
    assert {each.training for each in ours.modules()} == {mode}


def test_a_mode_of_one_expert_is_kept():
    ours = block(Loop).train()
    ours.experts[3].eval()
    huggingface.patch(ours, stack_experts=True)
    huggingface.unpatch(ours)
    modes = {name: each.training for name, each in ours.experts.named_children()}
    assert modes == {str(expert): expert != 3 for expert in range(EXPERTS)}


def test_frozen_weights_stay_frozen():
    module = block(Loop).requires_grad_(False)
    huggingface.patch(module, stack_experts=True)
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_without_being_asked_nothing_is_stacked():
    module = block(Loop)
    report = huggingface.patch(module)
    assert report.experts == () and isinstance(module.experts, nn.ModuleList)
    ((_, reason),) = report.left
    assert "stack_experts=True" in reason


class OtherExpert(Expert):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.01


class OtherActivation(Expert):
    def __init__(self):
        super().__init__()
        self.act_fn = nn.Tanh()


class Thresholded(Loop):
    """Some tokens have fewer experts."""

    def weigh(self, logits):
        weights, ids = super().weigh(logits)
        return weights.masked_fill(weights < 0.3, 0), ids


NO_SUM, NO_MLP = "its output is not the sum over experts by a RoutingConfig", "an expert is no MLP"


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (Squared, {}, NO_SUM),
        (Noisy, {}, "in training it gives something else"),
        (Scaled, {}, NO_SUM),
        (Shifted, {}, NO_SUM),
        (Thresholded, {}, "no gate or router gives logits"),
        (Loop, {"expert": OtherExpert}, NO_MLP),
        (Loop, {"expert": functools.partial(Expert, bias=True)}, NO_MLP),
    ],
)
def test_what_computes_something_else_is_left_alone(kind, options, reason):
    own, module = block(kind, **options), block(kind, **options)
    report = huggingface.patch(module, stack_experts=True)
    assert report.experts == report.routers == ()
    assert [why.startswith(reason) for _, why in report.left] == [True], report.left
    assert isinstance(module.experts, nn.ModuleList)
    assert torch.equal(module(hidden())[0], own(hidden())[0])


def test_an_activation_of_ones_own_is_kept():
    own, module = block(Loop, expert=OtherActivation), block(Loop, expert=OtherActivation)
    report = huggingface.patch(module, stack_experts=True)
    assert report.experts == ("experts",) and not report.left and "of their own" in str(report)
    expected, given = hidden().requires_grad_(), hidden().requires_grad_()
    torch.testing.assert_close(module(given), own(expected), rtol=1e-4, atol=1e-5)
    module(given)[0].sin().sum().backward()
    own(expected)[0].sin().sum().backward()
    assert relative_error(given.grad, expected.grad) < 1e-5


def test_experts_by_name_that_have_another_loop_say_so():
    module = block(Loop)
    module.experts = torch.nn.ModuleDict({str(each): one for each, one in enumerate(module.experts)})
    report = huggingface.patch(module, stack_experts=True)
    assert report.left == (
        ("", "its experts are called neither with ids and weights nor with a mask and weights"),
    )


def test_a_list_of_unlike_experts_is_left_alone():
    module = block(Loop)
    module.experts[5] = FunctionalExpert()
    report = huggingface.patch(module, stack_experts=True)
    assert report.experts == () and report.left == (("", "its experts are not alike"),)


@torch.no_grad()
def test_compiled_it_is_one_operator():
    own, ours = block(Loop), stacked(Loop)
    log = Log()
    compiled = raised(ours, log)
    torch.testing.assert_close(compiled(hidden())[0], own(hidden())[0], rtol=1e-5, atol=1e-5)
    assert [*map(str, log.operators)] == ["moe.fused_moe.default"]


def test_adapters_for_stacked_experts():
    ours = stacked(Loop)
    adapters = huggingface.add_adapters(ours, 1, 4, torch.zeros(18, dtype=torch.int32))
    assert list(adapters) == ["experts"]


@pytest.mark.parametrize("name", ["dbrx", "switch_transformers"])
@torch.no_grad()
def test_families_with_separate_weights(name):
    stock = stock_model(name)
    ours = copy.deepcopy(stock)
    report = huggingface.patch(ours, stack_experts=True)
    assert len(report.experts) == (2 if name == "dbrx" else 4)
    expected = outputs(stock, name)[0]
    torch.testing.assert_close(outputs(ours, name)[0], expected, rtol=1e-4, atol=1e-5)
    saved = ours.state_dict()
    assert saved.keys() == stock.state_dict().keys()
    assert all(torch.equal(saved[key], value) for key, value in stock.state_dict().items())
    for parameter in ours.parameters():
        parameter.zero_()
    ours.load_state_dict(stock.state_dict())
    torch.testing.assert_close(outputs(ours, name)[0], expected, rtol=1e-4, atol=1e-5)
    revived = pickle.loads(pickle.dumps(ours))
    if name == "dbrx":
        with pytest.raises(ValueError, match=r"as out of a pickle: expected layers.huggingface.patch"):
            outputs(revived, name)
    huggingface.patch(revived, stack_experts=True)
    torch.testing.assert_close(outputs(revived, name)[0], expected, rtol=1e-4, atol=1e-5)
    huggingface.unpatch(ours)
    assert torch.equal(outputs(ours, name)[0], expected)


@torch.no_grad()
def test_tokens_over_the_capacity_of_an_expert_get_none():
    if not is_installed("flint"):
        pytest.skip("older versions drop no token")
    stock = stock_model("switch_transformers", expert_capacity=1)
    ours = copy.deepcopy(stock)
    assert len(huggingface.patch(ours, stack_experts=True).experts) == 4
    expected = outputs(stock, "switch_transformers")[0]
    assert not torch.equal(expected, outputs(stock_model("switch_transformers"), "switch_transformers")[0])
    torch.testing.assert_close(outputs(ours, "switch_transformers")[0], expected, rtol=1e-4, atol=1e-5)
