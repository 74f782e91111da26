"""Remote code whose gates choose experts themselves, that returns more than logits, or calls its list of experts."""

import copy
import pickle
from collections import namedtuple

import pytest
import torch
from torch import nn

from layers import huggingface
from layers.huggingface import forwards
from layers.huggingface.stacked import StackedExperts
from tests.coverage.cases import stock_model
from tests.helpers import relative_error
from tests.huggingface.loops import HIDDEN, FunctionalExpert, Loop, Shared, block
from tests.huggingface.remote import (
    Accumulated,
    Afmoe,
    Bailing,
    Biased,
    Configured,
    DeepSeek,
    DeepSeekV3,
    MiniMaxM2,
    NemotronH,
    OtherName,
    returning,
)
from tests.huggingface.test_raised import Log, raised

CHOOSE = {
    DeepSeek: "gate",
    Configured: "gate",
    DeepSeekV3: "gate",
    Bailing: "gate",
    NemotronH: "gate",
    Afmoe: "router",
}
OWN_GATE = "it chooses experts itself, by its own code"
TRAINED = (DeepSeek, Bailing, NemotronH, Afmoe, Biased, MiniMaxM2)


def hidden(length=9):
    return torch.randn(2, length, HIDDEN, generator=torch.Generator().manual_seed(3))


def flat(returned):
    return [leaf for each in returned for leaf in flat(each)] if isinstance(returned, tuple) else [returned]


def form(returned):
    return tuple(map(form, returned)) if isinstance(returned, tuple) else type(returned)


def stacked(kind):
    module = block(kind)
    report = huggingface.patch(module, stack_experts=True)
    assert report.experts == ("experts",) and isinstance(module.experts, StackedExperts)
    return module, report


def assert_alike(ours, own, inputs):
    expected, actual = own(inputs), ours(inputs)
    assert form(actual) == form(expected)
    torch.testing.assert_close(flat(actual), flat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [*CHOOSE, Biased, MiniMaxM2])
@torch.no_grad()
def test_values(kind):
    own, (ours, _) = block(kind), stacked(kind)
    for length in (9, 1, 33):
        assert_alike(ours, own, hidden(length))
    assert_alike(ours, own, hidden()[:, :1].expand(2, 9, HIDDEN).contiguous())  # most experts get no token


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", TRAINED)
def test_gradients(kind, training):
    """DeepSeek's: of the shared expert alone in evaluation, and with the gate's loss in training."""
    own, ours = block(kind).train(training), stacked(kind)[0].train(training)
    expected, given = hidden().requires_grad_(), hidden().requires_grad_()
    for module, inputs in ((own, expected), (ours, given)):
        (flat(module(inputs))[0] * torch.linspace(0, 1, HIDDEN)).sum().backward()
    assert relative_error(given.grad, expected.grad) < 1e-5
    for name, parameter in own.named_parameters():
        if not name.startswith("experts."):
            gradient = ours.get_parameter(name).grad
            assert (gradient is None) == (parameter.grad is None), name
            assert gradient is None or relative_error(gradient, parameter.grad) < 1e-5, name
    for part in ours.experts.moe_ops_parts:
        gradient, expected = (
            ours.experts.get_parameter(part.parameter).grad,
            own.experts.get_parameter(part.name).grad,
        )
        if gradient is None:
            assert expected is None
        else:
            actual = part.of(gradient)
            torch.testing.assert_close(actual, torch.zeros_like(actual) if expected is None else expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Accumulated, DeepSeek, Bailing])
def test_what_16_bits_give(kind, dtype, training):
    """float32, where the block's own code leaves its sum so."""
    own, ours = (each.to(dtype).train(training) for each in (block(kind), stacked(kind)[0]))
    expected, actual = (flat(module(hidden().to(dtype)))[0] for module in (own, ours))
    assert actual.dtype == expected.dtype == (dtype if kind is Bailing else torch.float32)
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.1)
    assert flat(ours.double()(hidden().double()))[0].dtype == torch.float64


@pytest.mark.parametrize("kind", CHOOSE)
def test_gates_that_choose_are_told_to_stay(kind):
    _, report = stacked(kind)
    assert report.left == ((CHOOSE[kind], OWN_GATE),) and report.routers == ()


def test_a_block_that_hands_on_its_choice_is_told_to_route():
    _, report = stacked(MiniMaxM2)
    assert report.left == (
        ("gate", "it gives logits alone: its block makes weights of them, by its own code"),
    )


def test_a_bias_of_the_block_is_a_correction_bias():
    _, report = stacked(Biased)
    assert dict(report.computed)["gate"] == "top_k=2;score_fn=sigmoid;renormalize=False" and not report.left


def test_what_fails_in_training_fails_with_stacked_experts():
    ours, _ = stacked(DeepSeekV3)
    with pytest.raises(ValueError, match=r"own code fails in training.*: expected eval\(\)"):
        ours.train()(hidden())


@pytest.mark.parametrize("kind", [*CHOOSE, Biased, MiniMaxM2])
def test_there_and_back(kind):
    own, (ours, _) = block(kind), stacked(kind)
    assert all(torch.equal(ours.state_dict()[name], each) for name, each in own.state_dict().items())
    assert_alike(copy.deepcopy(ours), own, hidden())
    revived = pickle.loads(pickle.dumps(ours))
    if kind is not MiniMaxM2:  # it calls its experts as it did
        with pytest.raises(ValueError, match="as out of a pickle: expected layers"):
            revived(hidden())
    huggingface.patch(revived, stack_experts=True)
    assert_alike(revived, own, hidden())
    huggingface.unpatch(revived)
    torch.testing.assert_close(flat(revived(hidden())), flat(own(hidden())), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "operators"),
    [
        (DeepSeek, ["fused_moe"]),
        (DeepSeekV3, ["fused_moe"]),
        (NemotronH, ["topk_routing", "fused_experts"]),
        (MiniMaxM2, ["fused_moe"]),
    ],
)
@torch.no_grad()
def test_compiled_it_is_one_graph(kind, operators):
    """What a gate computes is a router's, of which the passes make an operator."""
    own, (ours, _) = block(kind), stacked(kind)
    log = Log()
    compiled = raised(ours, log)
    assert_alike(compiled, own, hidden())
    assert [*map(str, log.operators)] == [f"moe.{name}.default" for name in operators]


def test_compiled_training_has_the_loss():
    own, ours = block(DeepSeek).train(), stacked(DeepSeek)[0].train()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for module in (own, compiled):
        module(hidden()).sin().sum().backward()
    assert relative_error(ours.gate.weight.grad, own.gate.weight.grad) < 1e-5


RETURNED = {
    "alone in a tuple": lambda output, logits: (output,),
    "none": lambda output, logits: (output, None),
    "a number": lambda output, logits: (output, 0.0),
    "logits by sequence": lambda output, logits: (output, logits.view(*output.shape[:2], -1)),
    "both": lambda output, logits: (output, (logits, None), logits),
}


@pytest.mark.parametrize("change", RETURNED.values(), ids=RETURNED)
def test_what_is_returned_beside_the_output(change):
    kind = returning(change)
    own, (ours, _) = block(kind), stacked(kind)
    for length in (9, 1):
        assert_alike(ours, own, hidden(length))


Returned = namedtuple("Returned", ("output", "logits"))
NO_SUM = "its output is not the sum over experts by a RoutingConfig"
OTHERS = {
    "a tensor of its own": (lambda output, logits: (output, logits.exp()), NO_SUM),
    "a number that depends": (lambda output, logits: (output, float(logits.detach().sum())), NO_SUM),
    "an object": (lambda output, logits: (output, {"logits": logits}), NO_SUM),
    "a list": (lambda output, logits: [output, logits], "its own code cannot be tried: it returns a list"),
    "names": (Returned, "its own code cannot be tried: it returns a Returned"),
    "logits before": (lambda output, logits: (logits, output), "no gate or router gives logits"),
    "an error": (lambda output, logits: output.mm(logits), "its own code cannot be tried: RuntimeError("),
}


@pytest.mark.parametrize(("change", "reason"), OTHERS.values(), ids=OTHERS)
def test_other_things_are_left_alone(change, reason):
    module = block(returning(change))
    report = huggingface.patch(module, stack_experts=True)
    assert report.experts == () and isinstance(module.experts, nn.ModuleList)
    assert [why.startswith(reason) for _, why in report.left] == [True], report.left


class Jittered(Loop):
    """It changes what it is given, in training, in place."""

    def forward(self, hidden_states):
        if self.training:
            hidden_states *= torch.empty_like(hidden_states).uniform_(0.9, 1.1)
        return super().forward(hidden_states)


class Lossy(DeepSeek):
    """A loss that counts twice."""

    def forward(self, hidden_states):
        output = super().forward(hidden_states)
        return output + (self.gate(hidden_states)[2] if self.training else 0)


@pytest.mark.parametrize("kind", [Jittered, Lossy])
def test_what_trains_otherwise_is_left_alone(kind):
    report = huggingface.patch(block(kind), stack_experts=True)
    assert report.left == (
        ("", "in training it gives something else than the sum over experts that it gives in evaluation"),
    )


def test_experts_called_in_another_way_are_left_alone():
    module = block(OtherName)
    report = huggingface.patch(module, stack_experts=True)
    assert report.experts == () and len(report.left) == 1
    assert isinstance(module.experts, nn.ModuleList)


class LoudExpert(FunctionalExpert):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1000


class FarGate(nn.Linear):
    """Logits far apart."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) * 8


class Loud(Shared):
    """Beside the output of its shared expert the smallest weights are rounded to nothing."""

    def __init__(self):
        super().__init__()
        self.gate, self.shared_experts = FarGate(HIDDEN, self.num_experts, bias=False), LoudExpert()
        self.bias = nn.Parameter(torch.zeros(self.num_experts))

    def weigh(self, logits):
        scores = logits.softmax(-1)
        _, ids = (scores + self.bias).topk(self.top_k, dim=-1)
        return scores.gather(1, ids), ids


def test_weights_that_are_small_beside_a_shared_expert():
    _, report = stacked(Loud)
    assert dict(report.computed)["gate"] == "top_k=2;renormalize=False"


class Limited(Loop):
    """Keeps its output to what float16 has."""

    def routed(self, hidden_states, logits):
        return super().routed(hidden_states, logits).clamp(-65504, 65504)


def test_a_limit_far_beyond_what_experts_usually_give_is_not_overlooked():
    report = huggingface.patch(block(Limited), stack_experts=True)
    assert not report.experts and "not the sum over experts" in str(report.left[0])


class Masked(Loop):
    """Its caller may have more to say."""

    def forward(self, hidden_states, mask=None):
        return super().forward(hidden_states if mask is None else hidden_states * mask)


def test_more_arguments_are_not_left_out():
    report = huggingface.patch(block(Masked), stack_experts=True)
    assert report.left == (("", "its forward takes more than hidden states: mask"),)


class Taking(Loop):
    """Nothing, for all that can be seen, or nothing at all."""

    def forward(*args):
        return Loop.forward(*args)


class Container(Loop):
    def forward(self):
        raise AssertionError


def test_any_signature_can_be_read():
    assert huggingface.patch(block(Taking), stack_experts=True).experts == ("experts",)
    ((_, why),) = huggingface.patch(block(Container), stack_experts=True).left
    assert why.startswith("its own code cannot be tried: TypeError(")


class Named(Loop):
    def forward(self, x):
        return super().forward(x)


def test_its_argument_keeps_its_name():
    own, (ours, _) = block(Named), stacked(Named)
    torch.testing.assert_close(ours(x=hidden()), own(x=hidden()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dbrx", "qwen3_moe"])
def test_families_that_return_something_else_are_no_error(name):
    stock = stock_model(name)
    blocks = [each for each in stock.modules() if hasattr(each, "experts")]
    own = type(blocks[0])
    other = type("Other", (own,), {"forward": lambda self, states: (own.forward(self, states), None)})
    for each in blocks:
        each.__class__ = other
    report = huggingface.patch(stock, stack_experts=True)
    assert not any(forwards.is_replaced(each) for each in blocks) and (report.left or name != "dbrx")
