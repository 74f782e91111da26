"""Routers that are one of ours on most tokens, and something else on others, in other modes and by other arguments."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from layers.huggingface import routers, trial
from layers.huggingface.recognise import Recogniser
from moe_ops import RoutingConfig
from tests.huggingface.test_routers_apart import EXPERTS, HIDDEN, Counting, Router


class Sigmoids(Router):
    """The best two sigmoids, so that they have a sum of one."""

    def forward(self, hidden_states):
        logits = self.logits(hidden_states)
        return logits, *self.choose(logits)

    def choose(self, logits):
        weights, ids = logits.sigmoid().topk(2)
        return self.normed(weights), ids

    def normed(self, weights):
        return weights / (weights.sum(-1, keepdim=True) + 1e-12)


class OfLogits(Sigmoids):
    """The same until sigmoids are all one."""

    def choose(self, logits):
        chosen, ids = logits.topk(2)
        return self.normed(chosen.sigmoid()), ids


class Limited(Router):
    def forward(self, hidden_states):
        logits = self.logits(hidden_states)
        return logits, *logits.clamp(*self.limits).softmax(-1).topk(2)


class LeastSum(Sigmoids):
    def normed(self, weights):
        return weights / weights.sum(-1, keepdim=True).clamp(min=self.least)


class LeastSumInTraining(LeastSum):
    def normed(self, weights):
        return super().normed(weights) if self.training else Sigmoids.normed(self, weights)


class LeastWeight(Router):
    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights * (weights > 1e-6), ids


class OneToken(Router):
    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights * (2 if len(hidden_states) == 1 else 1), ids


class Room(Router):
    """Not more than so many tokens go to an expert, or in training."""

    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        chosen = F.one_hot(ids, EXPERTS).sum(1)
        place = (chosen.cumsum(0) * chosen).gather(1, ids)
        has_room = place <= max(self.most * len(logits) * 2 / EXPERTS, 4)
        return logits, weights * (has_room | (self.in_training and not self.training)), ids


class Untrained(Router):
    def logits(self, hidden_states):
        return F.linear(hidden_states, self.weight.detach())


class Half(Router):
    """Its weights get the gradient of its logits alone."""

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        weights, ids = F.linear(hidden_states, self.weight.detach()).softmax(-1).topk(2)
        return logits, weights, ids


class Inference(Router):
    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights if torch.is_grad_enabled() else weights.round(), ids


class Loose(Router):
    """A scale that is a tensor, and neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.scale = torch.tensor(2.0)

    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights * self.scale, ids


UNLIKE = {
    "at most": (Limited, {"limits": (None, 30)}),
    "far away": (Limited, {"limits": (-500, 500)}),
    "least sum": (LeastSum, {"least": 1e-12}),
    "least sum of DeepSeek's": (LeastSum, {"least": 1e-20}),
    "least sum in training": (LeastSumInTraining, {"least": 1e-12}),
    "least weight": (LeastWeight, {}),
    "one token": (OneToken, {}),
    "room": (Room, {"most": EXPERTS / 2 - 0.1, "in_training": False}),
    "room in training": (Room, {"most": EXPERTS / 2 - 0.1, "in_training": True}),
    "untrained": (Untrained, {}),
    "half trained": (Half, {}),
    "inference": (Inference, {}),
    "loose": (Loose, {}),
}


@pytest.mark.parametrize(("kind", "options"), UNLIKE.values(), ids=UNLIKE)
def test_what_computes_something_else_elsewhere_is_not_known(kind, options):
    assert Recogniser().known(kind(**options)) is None


class LooksUp(Router):
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.tensor(0))

    def logits(self, hidden_states):
        return super().logits(hidden_states) * (1.0, 1.0, 1.0, 3.0)[int(self.step)]


def test_a_buffer_by_which_something_is_looked_up():
    assert Recogniser().known(LooksUp()) is None


class Stepping(Router):
    step = 0

    def forward(self, hidden_states):
        self.step = self.step + 1
        return super().forward(hidden_states)


@pytest.mark.parametrize("router", [Counting("anew"), Counting("aside"), Counting("in place"), Stepping()])
def test_what_a_trial_changes_is_noticed(router):
    """Also where it is there already, and another each time."""
    router(torch.randn(9, HIDDEN))
    with pytest.raises(ValueError, match="changes its own tensors or attributes"):
        trial.run(type(router).forward, router, torch.randn(9, HIDDEN))


class Keeping(Router):
    """Keeps its losses."""

    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        loss = logits.logsumexp(-1).mean()
        if isinstance(self.losses, dict):
            self.losses["z"] = loss
        else:
            self.losses.append(loss)
        return logits, weights, ids


@pytest.mark.parametrize("losses", [list, dict])
def test_a_router_that_keeps_losses_goes_on(losses):
    router = Keeping(losses=losses())
    assert Recogniser().known(router) is None
    assert not router.losses


def installed(kind, **options):
    """A router, and the same on our operators."""
    torch.manual_seed(0)
    stock, ours = kind(**options), kind(**options)
    ours.load_state_dict(stock.state_dict())
    known = Recogniser().known(ours)
    routers.install(ours, known, object())
    return stock, ours, known.routing


def expect_same(stock, ours, tokens, **named):
    expected, actual = stock(tokens, **named), ours(tokens, **named)
    torch.testing.assert_close(dense(actual), dense(expected))
    assert [each.shape for each in actual] == [each.shape for each in expected]


def dense(returned):
    _, weights, ids = (each.flatten(0, -2) for each in returned)
    return torch.zeros(len(ids), EXPERTS).scatter_add(1, ids.long(), weights)


def test_logits_are_told_from_their_sigmoids():
    stock, ours, routing = installed(OfLogits)
    assert routing == RoutingConfig(2, "sigmoid", "topk_then_score", renorm_eps=1e-12)
    expect_same(stock, ours, torch.randn(50, HIDDEN) * 100)
    assert installed(Sigmoids)[2] == RoutingConfig(2, "sigmoid", renorm_eps=1e-12)


@pytest.mark.parametrize("shape", [(7, HIDDEN), (3, 5, HIDDEN), (1, 1, HIDDEN), (0, HIDDEN), (0, 3, HIDDEN)])
@pytest.mark.parametrize("dim", [1, -1])
def test_sequences_are_of_their_own(shape, dim):
    """A softmax over the second of two dimensions, and of three; and results of three dimensions."""
    stock, ours, _ = installed(Router, score=lambda logits, _: logits.softmax(dim))
    expect_same(stock, ours, torch.randn(shape))


class Named(Router):
    def forward(self, hidden_states, *, scale=1.0, **more):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights * scale * more.get("factor", 1.0), ids


def test_arguments_that_were_not_tried():
    stock, ours, _ = installed(Named)
    for named in ({}, {"scale": 3.0}, {"factor": 2.0}):
        expect_same(stock, ours, torch.randn(9, HIDDEN), **named)


class Optional(Router):
    def forward(self, hidden_states, mask=None):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights if mask is None or mask.dim() < 2 else weights * mask, ids


def test_an_argument_of_no_matter_when_it_is_tried():
    assert Recogniser().known(Optional()) is None


class Times(nn.Module):
    factor = 1.0

    def forward(self, hidden_states):
        return hidden_states * self.factor


class Parts(Router):
    """With a module that is not called by ours, and an option with an underscore."""

    def __init__(self):
        super().__init__()
        self.part, self._scale = nn.Sequential(Times()), 2.0
        self.part[0].factor = 1.0

    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, self.part(weights) * self._scale, ids


def hook(router):
    router.part[0].register_forward_hook(lambda module, args, output: output / 2)


def option(router):
    router.part[0].factor = 3.0


def own_option(router):
    router._scale = 5.0


def another(router):
    router.part[0] = nn.Identity()


@pytest.mark.parametrize("change", [hook, option, own_option, another])
def test_what_changes_inside_counts(change):
    stock, ours, routing = installed(Parts)
    assert routing == RoutingConfig(2, renormalize=False, scale=2.0)
    tokens = torch.randn(9, HIDDEN)
    expect_same(stock, ours, tokens)
    before = dense(stock(tokens))
    for router in (stock, ours):
        change(router)
    expect_same(stock, ours, tokens)
    assert change is another or (dense(stock(tokens)) - before).abs().max() > 0.1
