"""Routers and gates are known by what they compute: what is told apart, and what is not taken for something else."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from layers import huggingface
from layers.huggingface import gates, trial
from layers.huggingface.linear_router import Linear
from layers.huggingface.recognise import Recogniser
from moe_ops import RoutingConfig
from tests.coverage.cases import is_installed, stock_model

HIDDEN, EXPERTS = 48, 12


class Router(nn.Module):
    """Sigmoid scores, a bias for selection, groups; each part may be written otherwise."""

    def __init__(self, **options):
        super().__init__()
        self.top_k, self.groups, self.kept = 3, 4, 2
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.bias = nn.Parameter(torch.randn(EXPERTS))
        self.fill, self.eps, self.scale = float("-inf"), 1e-20, 1.5
        vars(self).update(options)

    def logits(self, tokens):
        return F.linear(tokens.float(), self.weight.float())

    def choose(self, scores):
        biased = scores + self.bias
        best = biased.view(-1, self.groups, EXPERTS // self.groups).topk(2, -1)[0].sum(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(self.kept, -1)[1], 1.0).bool()
        mask = kept.repeat_interleave(EXPERTS // self.groups, 1)
        return biased.masked_fill(~mask, self.fill).topk(self.top_k, -1)[1]

    def forward(self, hidden_states):
        logits = self.logits(hidden_states)
        scores = logits.sigmoid()
        ids = self.choose(scores)
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + self.eps) * self.scale
        return logits, weights, ids


GROUPED = {"num_groups": 4, "topk_groups": 2, "group_score": "top2_sum"}


@pytest.mark.parametrize(
    ("options", "routing"),
    [
        ({}, RoutingConfig(3, "sigmoid", renorm_eps=1e-20, scale=1.5, **GROUPED)),
        ({"fill": 0.0}, RoutingConfig(3, "sigmoid", renorm_eps=1e-20, scale=1.5, group_fill=0.0, **GROUPED)),
        ({"eps": 1e-6}, RoutingConfig(3, "sigmoid", renorm_eps=1e-6, scale=1.5, **GROUPED)),
        ({"eps": 0.0, "scale": 1.0}, RoutingConfig(3, "sigmoid", **GROUPED)),
        ({"kept": 4}, RoutingConfig(3, "sigmoid", renorm_eps=1e-20, scale=1.5)),
        (
            {"kept": 3},
            RoutingConfig(3, "sigmoid", renorm_eps=1e-20, scale=1.5, **{**GROUPED, "topk_groups": 3}),
        ),
    ],
)
def test_options_are_told_apart(options, routing):
    known = Recogniser().known(Router(**options))
    assert known.routing == routing
    assert known.details == Linear(
        "weight", "", "1.0", "bias", torch.float32, None, ("logits", "weights", "ids"), (2,)
    )


def test_a_router_that_chooses_all():
    """Its weights have the shape of its logits, and what it chooses by is of no matter."""
    known = Recogniser().known(Router(top_k=EXPERTS, kept=4))
    assert known.routing == RoutingConfig(EXPERTS, "sigmoid", "topk_then_score", renorm_eps=1e-20, scale=1.5)
    assert known.details.returned == ("logits", "weights", "ids")


class Rounding(Router):
    def logits(self, tokens):
        return F.linear(tokens, self.weight).float()


class Multiplied(Router):
    def logits(self, tokens):
        return F.linear(tokens.float(), self.weight.float()) * 0.25


class Reordered(Router):
    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return ids, weights, logits


class Flattening(Router):
    def forward(self, hidden_states):
        batch, length, size = hidden_states.shape
        return super().forward(hidden_states.view(batch * length, size))


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (Rounding, {"product_dtype": None, "logits_dtype": torch.float32}),
        (Multiplied, {"multiplier": "0.25"}),
        (Reordered, {"returned": ("ids", "weights", "logits")}),
        (Flattening, {}),
    ],
)
def test_how_logits_are_computed_is_told_apart(kind, changed):
    details = Recogniser().known(kind()).details
    expected = {"product_dtype": torch.float32, "logits_dtype": None, "multiplier": "1.0",
                "returned": ("logits", "weights", "ids"), **changed}  # fmt: skip
    assert {name: getattr(details, name) for name in expected} == expected


class Capped(Router):
    def logits(self, tokens):
        return super().logits(tokens / 3).tanh() * 3


class Unlike(Router):
    """The last expert counts half."""

    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights * torch.where(ids == EXPERTS - 1, 0.5, 1.0), ids


class Detached(Router):
    def forward(self, hidden_states):
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights.detach(), ids


class Noisy(Router):
    def forward(self, hidden_states):
        noise = torch.rand_like(hidden_states) if self.training else 1.0
        return super().forward(hidden_states * noise)


class Neighbours(Router):
    """Reads the token before."""

    def forward(self, hidden_states):
        return super().forward(hidden_states + 0.01 * hidden_states.roll(1, 0))


class Unchosen(Router):
    """The second best instead of the best."""

    def choose(self, scores):
        return (scores + self.bias).topk(self.top_k + 1, -1)[1][:, 1:]


class Least(Router):
    def choose(self, scores):
        return (scores + self.bias).topk(self.top_k, -1, largest=False)[1]


class Clipped(Router):
    """Only where logits are far from zero."""

    def logits(self, tokens):
        return super().logits(tokens).clamp(min=-30)


class Other(Router):
    def forward(self, hidden_states):
        return super().forward(hidden_states)[0]


@pytest.mark.parametrize(
    "kind", [Capped, Unlike, Detached, Noisy, Neighbours, Unchosen, Least, Clipped, Other]
)
def test_what_computes_something_else_is_not_known(kind):
    assert Recogniser().known(kind()) is None


class Given(Router):
    """Its bias comes with the call."""

    def __init__(self):
        super().__init__()
        del self.bias

    def forward(self, hidden_states, expert_bias=None):
        self.__dict__["bias"] = 0 if expert_bias is None else expert_bias
        try:
            return super().forward(hidden_states)
        finally:
            del self.__dict__["bias"]


def test_a_bias_that_comes_with_the_call():
    known = Recogniser().known(Given())
    assert known.details.correction == ""
    tokens, bias = torch.randn(20, HIDDEN), torch.randn(EXPERTS)
    stock, ours = Given(), Given()
    ours.load_state_dict(stock.state_dict())
    huggingface.routers.install(ours, known, object())
    for arguments in ((bias,), ()):
        _, weights, ids = stock(tokens, *arguments)
        _, our_weights, our_ids = ours(tokens, *arguments)
        expected = torch.zeros(20, EXPERTS).scatter(1, ids, weights)
        torch.testing.assert_close(torch.zeros(20, EXPERTS).scatter(1, our_ids.long(), our_weights), expected)
    assert torch.equal(ours(tokens, expert_bias=bias)[2], ours(tokens, bias)[2])


class Nested(Router):
    def __init__(self):
        super().__init__()
        self.product = nn.Linear(HIDDEN, EXPERTS, bias=False)
        del self.weight

    def logits(self, tokens):
        return self.product(tokens)


def test_a_trial_leaves_the_router_and_the_generator_alone():
    router = Nested()
    state = torch.get_rng_state()
    before = {name: value.clone() for name, value in router.state_dict().items()}
    calls = []
    for module in router.modules():
        module.register_forward_hook(lambda *args: calls.append(args))
    with torch.no_grad(), torch.device("meta"):
        assert Recogniser().known(router) is not None
    assert torch.equal(torch.get_rng_state(), state) and router.training and not calls
    assert all(torch.equal(value, before[name]) for name, value in router.state_dict().items())


def test_alike_routers_are_tried_once(monkeypatch):
    tried = []
    own = trial.skeleton
    monkeypatch.setattr(trial, "skeleton", lambda *args: (tried.append(args), own(*args))[1])
    recogniser = Recogniser()
    first, count = recogniser.known(Router(scale=2.125)), len(tried)  # of no other test
    assert count and recogniser.known(Router(scale=2.125)) is first and len(tried) == count
    assert recogniser.known(Router(scale=2.25)) is not first and len(tried) > count


GATES = {
    "deepseek_v4": "silu;limit=10.0",
    "minimax_m3_vl": "swiglu_oai",
    "beam": "silu",
    "lfm2_moe": "silu",
    "inkling2": None,
    "muse_spark": None,
}


@pytest.mark.parametrize("name", GATES)
def test_gates_that_a_family_writes_itself(name):
    if not is_installed(name):
        pytest.skip("not in this transformers")
    model = stock_model(name)
    report = huggingface.patch(model)
    specs = [spec for path, spec in report.computed if path.endswith("experts")]
    assert set(specs) == ({GATES[name]} if GATES[name] else set())


class Gate(nn.Module):
    """Experts that differ from a clamped SiLU by what `change` does to the result."""

    def __init__(self, change):
        super().__init__()
        self.limit, self.has_gate, self.change = 7.0, True, change

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        activated = F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)
        return self.change(activated, gate)


@pytest.mark.parametrize(
    ("change", "known"),
    [
        (lambda out, gate: out, True),
        (lambda out, gate: out * 1.0001, False),
        (lambda out, gate: torch.where(gate > 50, out * 2, out), False),
        (lambda out, gate: torch.where(gate == 0, out + 1, out), False),
        (lambda out, gate: out.flip(-1), False),
        (lambda out, gate: out[:, 1:], False),
        (lambda out, gate: out[None], False),
    ],
)
def test_gates_are_told_apart(change, known):
    found = gates.recognised(Gate(change))
    assert (found is not None) == known
    assert not known or found.spec == "silu;limit=7.0"


def test_rows_are_compared_by_their_own_size():
    small = torch.tensor([[1.0, 1.0], [1e-12, 1e-12]], dtype=torch.float64)
    assert trial.close(small * (1 + 1e-10), small)
    assert not trial.close(small * torch.tensor([[1.0], [1.1]]), small)


SPECIAL = {
    "gemma4": "top_k=2",
    "deepseek_v4.hash": "top_k=2;score_fn=sqrtsoftplus;renorm_eps=1e-20;scale=2.5",
    "inkling": "top_k=2;score_fn=sigmoid;renormalize=False",
    "zaya": "top_k=1;renormalize=False",
    "phimoe": "top_k=2",
}


def router_of(name):
    model = stock_model(name)
    found = [each for path, each in model.named_modules() if path.split(".")[-1] in ("router", "gate")]
    return found[-1]


@pytest.mark.parametrize("name", SPECIAL)
def test_routers_that_do_more(name):
    assert Recogniser().known(router_of(name)).routing.spec == SPECIAL[name]


@pytest.mark.parametrize("name", SPECIAL)
def test_routers_that_look_like_those_and_compute_something_else(name):
    router = router_of(name)
    own = type(router).forward

    class Changed(type(router)):
        def forward(self, *args):
            logits, weights, *rest = own(self, *args)
            return logits, weights * 0.999, *rest

    router.__class__ = Changed
    assert Recogniser().known(router) is None


def test_phimoe_trains_by_its_own_code():
    router = router_of("phimoe")
    router.router_jitter_noise = 2.0  # so that it samples
    known = Recogniser().known(router)
    huggingface.routers.install(router, known, object())
    tokens = torch.randn(9, 64)
    torch.manual_seed(0)
    expected = type(router).forward(router.train(), tokens.clone())
    torch.manual_seed(0)
    actual = router(tokens.clone())
    assert all(map(torch.equal, actual, expected))
    evaluated = router.eval()(tokens.clone())
    assert not torch.equal(evaluated[2].long(), expected[2])
