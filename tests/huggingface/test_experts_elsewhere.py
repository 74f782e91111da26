"""Gates, experts and whole blocks that are ours for most numbers, and something else for others and in other modes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations import use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock

from layers import huggingface
from layers.huggingface import blocks, gates, outside, recognise
from tests.coverage.cases import stock_model
from tests.huggingface.families import HIDDEN, pair, tokens
from tests.huggingface.loops import EXPERTS, Collection
from tests.huggingface.test_whole import PARTS, WHOLE, hidden, is_whole, mixtral, ran

LIMIT = 7.0


class Straight(torch.autograd.Function):
    """A limit that gradients pass."""

    @staticmethod
    def forward(ctx, values):
        return values.clamp(max=LIMIT)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Gate(nn.Module):
    def __init__(self, formula):
        super().__init__()
        self.has_gate, self.limit, self.formula, self.seen = True, LIMIT, formula, []

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return self.formula(self, gate, up)


def silu(gate, up):
    return F.silu(gate) * up


GATES = {
    "no gradient of the gate": lambda self, gate, up: silu(gate.detach(), up),
    "no gradient of up": lambda self, gate, up: silu(gate, up.detach()),
    "straight through": lambda self, gate, up: silu(Straight.apply(gate), up.clamp(-LIMIT, LIMIT)),
    "dropout": lambda self, gate, up: F.dropout(silu(gate, up), 0.5, self.training),
    "in training": lambda self, gate, up: silu(gate, up) * (2 if self.training else 1),
    "without gradients": lambda self, gate, up: silu(gate, up if torch.is_grad_enabled() else up.round()),
    "far away": lambda self, gate, up: silu(gate, up.clamp(-2e4, 2e4)),
    "far below": lambda self, gate, up: torch.where(gate < -5000, up, silu(gate, up)),
    "few rows": lambda self, gate, up: silu(gate, up) * (2 if len(gate) < 3 else 1),
    "kept": lambda self, gate, up: (self.seen.append(gate), silu(gate, up))[1],
}


@pytest.mark.parametrize("formula", GATES.values(), ids=GATES)
def test_gates_that_are_something_else_elsewhere(formula):
    experts = Gate(formula)
    assert gates.recognised(experts) is None and not experts.seen
    assert gates.recognised(Gate(lambda self, gate, up: silu(gate, up))).spec == "silu"


def test_an_activation_with_dropout_drops():
    stock, ours = pair("mixtral")
    for model in (stock, ours):
        for name, each in model.named_modules():
            if name.endswith(".experts"):
                each.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5)).eval()
    huggingface.patch(ours)
    expected = stock(tokens(2, 6)).logits
    torch.testing.assert_close(ours(tokens(2, 6)).logits, expected)
    for model in (stock, ours):
        assert (model.train()(tokens(2, 6)).logits - expected).abs().max() > 0.01


class OtherNames(Collection):
    def forward(self, tokens, ids, weights):
        return super().forward(tokens, ids, weights)


COLLECTIONS = {
    "weights without gradient": {"weight": lambda self, weights: weights.detach()},
    "experts without gradient": {"up": lambda self, expert: self.gate_up_proj[expert].detach()},
    "in training": {"returned": lambda self, output: output * (2 if self.training else 1)},
    "without gradients": {
        "returned": lambda self, output: output if torch.is_grad_enabled() else output.round()
    },
    "one token": {"returned": lambda self, output: output * (2 if len(output) == 1 else 1)},
    "least weight": {"weight": lambda self, weights: weights * (weights > 1e-3)},
    "room": {"chosen": lambda self, ids, expert: tuple(each[:30] for each in torch.where(ids == expert))},
    "last expert": {"up": lambda self, expert: self.gate_up_proj[expert] * (1 + (expert == EXPERTS - 1))},
}


@pytest.mark.parametrize("methods", COLLECTIONS.values(), ids=COLLECTIONS)
def test_collections_that_are_something_else_elsewhere(methods):
    assert outside.collection_activation(Collection()) == "silu"
    assert outside.collection_activation(type("Other", (Collection,), methods)()) is None


def test_collections_that_are_called_by_other_names():
    assert outside.Collection.is_kind(Collection()) and not outside.Collection.is_kind(OtherNames())


class LimitedExperts(MixtralExperts):
    """Whose own code limits what transformers' interface does not."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            rows = F.linear(self.act_fn(gate) * up.clamp(-0.1, 0.1), self.down_proj[expert])
            final.index_add_(0, token, rows * top_k_weights[token, place, None])
        return final


@pytest.mark.parametrize("implementation", ["eager", None, "batched_mm"])
@torch.no_grad()
def test_experts_whose_own_code_is_not_the_interface_s(implementation):
    kind = use_experts_implementation(type("Decorated", (LimitedExperts,), {}))
    stock, ours = pair("mixtral")
    for model in (stock, ours):
        model.config._experts_implementation_internal = implementation
        for name, each in model.named_modules():
            if name.endswith(".experts"):
                each.__class__ = kind
    report = huggingface.patch(ours)
    torch.testing.assert_close(ours(tokens(2, 6)).logits, stock(tokens(2, 6)).logits, rtol=1e-4, atol=1e-5)
    why = "Decorated's own code, which runs as 'eager', is not what transformers' interface runs"
    assert set(dict(report.left).values()) == (set() if implementation == "batched_mm" else {why})


class Callable:
    def __call__(self, *args):
        return args[0]


def test_a_forward_that_is_no_function():
    assert not outside.Collection.is_kind(type("Odd", (Collection,), {"forward": Callable()})())


BLOCKS = {
    "in training": lambda block, tokens, output: output * (2 if block.training else 1),
    "one token": lambda block, tokens, output: output * (2 if tokens.shape[:2].numel() == 1 else 1),
    "many tokens": lambda block, tokens, output: output * (2 if tokens.shape[:2].numel() > 100 else 1),
}


@pytest.mark.parametrize("change", BLOCKS.values(), ids=BLOCKS)
def test_blocks_that_are_something_else_elsewhere(change):
    own = stock_model("llama4").model.layers[0].feed_forward
    assert blocks.known_block(own) is not None
    kind = type(own)

    class Other(kind):
        def forward(self, hidden_states):
            output, logits = kind.forward(self, hidden_states)
            return change(self, hidden_states, output), logits

    own.__class__ = Other
    assert blocks.known_block(own) is None


class Limited(MixtralSparseMoeBlock):
    def forward(self, hidden_states):
        return super().forward(hidden_states).clamp(-1e4, 1e4)


class Loose(MixtralSparseMoeBlock):
    """A count of steps, in a tensor that is neither parameter nor buffer."""

    def __init__(self, config):
        super().__init__(config)
        self.step = torch.tensor(5)

    def forward(self, hidden_states):
        return super().forward(hidden_states) * (1 if self.step < 1000 else 2)


class Stepping(Loose):
    """In a buffer."""

    def __init__(self, config):
        super().__init__(config)
        del self.step
        self.register_buffer("step", torch.tensor(5))


class Inference(MixtralSparseMoeBlock):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * (1 if torch.is_grad_enabled() else 2)


class Column(MixtralSparseMoeBlock):
    def forward(self, hidden_states):
        is_column = hidden_states.shape[:2].numel() > hidden_states.shape[1] == 1
        return super().forward(hidden_states) * (2 if is_column else 1)


@pytest.mark.parametrize("kind", [Limited, Stepping, Loose, Inference, Column])
@torch.no_grad()
def test_whole_blocks_that_are_something_else_elsewhere(kind):
    stock, ours = mixtral(kind)
    assert not is_whole(ours)
    output, operators = ran(ours, hidden(5, 1, HIDDEN))
    assert operators == PARTS
    torch.testing.assert_close(output, stock(hidden(5, 1, HIDDEN)))


class Hooked(MixtralSparseMoeBlock):
    """With a place for hooks."""

    def __init__(self, config):
        super().__init__(config)
        self.last = nn.Identity()

    def forward(self, hidden_states):
        return self.last(super().forward(hidden_states))


@torch.no_grad()
def test_hooks_beside_router_and_experts():
    stock, ours = mixtral(Hooked)
    assert ran(ours, hidden(2, 5, HIDDEN))[1] == WHOLE
    for block in (stock, ours):
        block.last.register_forward_hook(lambda module, args, output: output / 2)
    output, operators = ran(ours, hidden(2, 5, HIDDEN))
    assert operators == PARTS
    torch.testing.assert_close(output, stock(hidden(2, 5, HIDDEN)))


def test_gates_of_alike_layers_are_tried_once(monkeypatch):
    tried, own = [], recognise.settled_activation
    monkeypatch.setattr(
        recognise, "settled_activation", lambda experts: (tried.append(experts), own(experts))[1]
    )
    report = huggingface.patch(stock_model("gpt_oss"))
    specs = {spec for path, spec in report.computed if path.endswith("experts")}
    assert len(report.experts) >= 2 and len(tried) == len(specs) == 1
