"""Routers and experts that look alike, or nearly what ours are, and compute something else."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from layers import huggingface
from layers.huggingface import trial
from layers.huggingface.recognise import Recogniser
from moe_ops import RoutingConfig
from tests.huggingface.families import tiny_model, tokens

HIDDEN, EXPERTS = 32, 8


class Router(nn.Module):
    """Softmax, then the two best."""

    def __init__(self, **options):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.score = torch.softmax
        vars(self).update(options)

    def logits(self, hidden_states):
        return F.linear(hidden_states, self.weight)

    def forward(self, hidden_states):
        logits = self.logits(hidden_states)
        weights, ids = self.score(logits, -1).topk(2)
        return logits, weights, ids


PLAIN = RoutingConfig(2, renormalize=False)


class Scaled(Router):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights * self.scale, ids


class Tempered(Scaled):
    def logits(self, hidden_states):
        return super().logits(hidden_states) * self.scale

    def forward(self, hidden_states):
        return Router.forward(self, hidden_states)


@pytest.mark.parametrize("kind", [Scaled, Tempered])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_that_is_learned_is_no_option(kind, shape):
    assert Recogniser().known(kind(nn.Parameter(torch.full(shape, 3.0)))) is None
    buffered = kind(1.0)
    del buffered.scale
    buffered.register_buffer("scale", torch.full(shape, 3.0))
    assert Recogniser().known(buffered) is None
    assert Recogniser().known(kind(3.0)) is not None


class Counting(Router):
    """Counts who is chosen, as balancing without a loss does."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        load = F.one_hot(ids, EXPERTS).sum((0, 1))
        if self.how == "in place":
            self.load += load
        elif self.how == "aside":
            self.last = load
        elif self.how == "anew" or self.training:
            self.load = self.load + load
        return logits, weights, ids


class Inside(Router):
    """A module of its keeps what it saw last, as one with a hook for statistics does."""

    def __init__(self, what):
        super().__init__()
        self.seen = Keeping(what)

    def logits(self, hidden_states):
        return self.seen(super().logits(hidden_states))


class Keeping(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, logits):
        self.last = self.what(logits)
        return logits


@pytest.mark.parametrize("what", [torch.detach, len], ids=["a tensor", "a number"])
def test_what_a_module_inside_keeps_counts_too(what):
    assert Recogniser().known(Inside(what)) is None


def test_tensors_are_as_they_were_when_others_have_been_tried():
    tensor, seen = torch.arange(3.0), []
    assert trial.holds_whatever([tensor], lambda: bool(seen.append(tensor.tolist()) or True))
    assert seen == [[0.0] * 3, [1e6] * 3, [-1e6] * 3]
    assert not trial.holds_whatever([tensor], lambda: bool(tensor[0]))
    assert tensor.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("how", ["in place", "anew", "aside", "in training"])
def test_a_router_that_counts_keeps_counting(how):
    router = Counting(how)
    assert Recogniser().known(router) is None
    assert not router.load.any()


class Masked(Router):
    """Does without some experts, or has all count alike until it has made its first steps."""

    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("buffer", buffer)

    def logits(self, hidden_states):
        logits = super().logits(hidden_states)
        return logits.masked_fill(self.buffer == 0, -1e9) if self.buffer.dim() else logits

    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        is_warm = self.buffer.dim() or self.buffer >= 100
        return logits, weights if is_warm else weights * 0 + 0.5, ids


@pytest.mark.parametrize(
    "buffer", [torch.ones(EXPERTS), torch.ones(EXPERTS, dtype=torch.bool), torch.tensor(0), torch.tensor(500)]
)
def test_a_buffer_that_decides_is_not_overlooked(buffer):
    assert Recogniser().known(Masked(buffer)) is None


def test_a_buffer_that_nothing_reads_is_of_no_matter():
    router = Router()
    router.register_buffer("load", torch.zeros(EXPERTS))
    assert Recogniser().known(router).routing == PLAIN


class Refusing(Router):
    """DeepSeek-V3's published gate is for evaluation alone."""

    def forward(self, hidden_states):
        if self.when(self, hidden_states):
            raise AssertionError
        return super().forward(hidden_states)


@pytest.mark.parametrize(
    "when", [lambda self, _: self.training, lambda _, hidden_states: hidden_states.dtype != torch.float32]
)
def test_a_router_that_cannot_be_tried_is_left_alone(when):
    assert Recogniser().known(Refusing(when=when)) is None


def test_functions_and_configs_tell_routers_apart():
    recogniser, sigmoid = Recogniser(), lambda logits, _: logits.sigmoid()
    assert recogniser.known(Router()).routing == PLAIN
    assert recogniser.known(Router(score=sigmoid)).routing == RoutingConfig(2, "sigmoid", renormalize=False)

    class Configured(Router):
        def forward(self, hidden_states):
            logits, weights, ids = super().forward(hidden_states)
            return logits, weights / weights.sum(-1, keepdim=True) if self.config.norm else weights, ids

    for config, routing in (
        (SimpleNamespace(norm=True), RoutingConfig(2)),
        (SimpleNamespace(norm=False), PLAIN),
    ):
        assert recogniser.known(Configured(config=config)).routing == routing
    for options in ([True], [False]):
        found = recogniser.known(Listed(options=options))
        assert found.routing == (RoutingConfig(2) if options[0] else PLAIN)


class Listed(Router):
    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights / weights.sum(-1, keepdim=True) if self.options[0] else weights, ids


class Doubled(MixtralExperts):
    def forward(self, *args):
        return 2 * super().forward(*args)


class Gated(MixtralExperts):
    """Only its gate is its own, which transformers' interface asks for."""

    def _apply_gate(self, gate_up):
        return 3 * super()._apply_gate(gate_up)


@pytest.mark.parametrize("kind", [Doubled, Gated])
def test_a_forward_around_transformers_interface_is_kept(kind):
    model = tiny_model("mixtral", implementation="grouped_mm")
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = kind
    with torch.no_grad():
        expected = model(tokens(2, 7)).logits
        report = huggingface.patch(model)
        torch.testing.assert_close(model(tokens(2, 7)).logits, expected, atol=1e-5, rtol=1e-5)
    why = "Doubled has a forward of its own around transformers' experts interface"
    assert set(report.left) == {(f"model.layers.{i}.mlp.experts", why) for i in range(2) if kind is Doubled}
