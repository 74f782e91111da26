"""RaiseExperts where rows are columns, `weight[ids] @ x.unsqueeze(-1)`: no view brings them into rows."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but
from tests.passes.capture import computed, rewrite
from tests.passes.spellings import of_best
from tests.passes.stock import HIDDEN, TOP_K, layer
from tests.passes.test_raise_forms_in_training import trained

PIPELINE = (*RAISES, *FUSIONS)
SIZES = ((7, torch.float32, False), (1, torch.float32, False), (9, torch.bfloat16, False))
OPEN = (9, torch.bfloat16, True)


def gate_of_columns(both, dim=-2):
    gate, up = both.chunk(2, dim)
    return F.silu(gate) * up


def of_one(gate=gate_of_columns, biased=lambda out, weight, ids: out):
    """Switch."""

    def run(x, router, w13, w2):
        weights, ids = F.linear(x, router).float().softmax(-1).max(-1)
        hidden = gate(biased(torch.bmm(w13[ids], x.unsqueeze(-1)), w13, ids))
        out = biased(torch.bmm(w2[ids], hidden), w2, ids)
        return (out.squeeze(-1) * weights.unsqueeze(-1)).to(x.dtype)

    return run


@of_best
def of_choices(x, weights, ids, w13, w2):
    out = w2[ids] @ gate_of_columns(w13[ids] @ x[:, None, :, None])
    return (out.squeeze(-1) * weights.unsqueeze(-1)).sum(1)


@of_best
def of_slots(x, weights, ids, w13, w2):
    rows, experts = x.repeat_interleave(TOP_K, 0).unsqueeze(-1), ids.flatten()
    out = torch.bmm(w2[experts], gate_of_columns(torch.bmm(w13[experts], rows), 1))
    return (out.view(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(1)


def with_biases(out, weight, ids):
    return out + weight[..., 0][ids].unsqueeze(-1)


FORMS = {
    "a top-1": of_one(),
    "a top-1 with biases": of_one(biased=with_biases),
    "choices": of_choices,
    "slots": of_slots,
}


@pytest.mark.parametrize(("what", "sizes"), mixed_but(OPEN, FORMS, SIZES), ids=str)
def test_every_form_is_raised(what, sizes):
    inputs = layer(*sizes)
    result, out = computed(FORMS[what], *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, FORMS[what](*(each.double() for each in inputs)))


def test_a_gate_without_a_name():
    function = of_one(lambda both: both[:, ::2].relu() * both[:, 1::2])
    inputs = layer(7, torch.float32)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe_formula"]
    assert_matches_oracle(out, function(*(each.double() for each in inputs)))


def test_gradients():
    trained(FORMS["slots"])


OTHER = {
    "rows told apart": (
        lambda both: gate_of_columns(both) * torch.arange(len(both))[:, None, None],
        "tells rows apart",
    ),
    "a softmax over columns": (lambda both: gate_of_columns(both).softmax(1), "the gate also reads"),
    "rows that meet": (lambda both: gate_of_columns(both).flip(0), "no gate leads to another"),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_does_something_else_stays(what):
    gate, reason = OTHER[what]
    result = rewrite(of_one(gate), *layer(7, torch.float32), passes=PIPELINE)
    assert not result.log.raised and not result.ops()
    assert any(reason in each for each in result.reasons), result.reasons


def test_columns_of_each_choice_stay():
    """[T, K, F, 1], out of one product of each token with the weights of all its choices."""

    def combine(x, weights, ids, w13, w2):
        hidden = torch.bmm(w13[ids].view(len(x), -1, HIDDEN), x.unsqueeze(-1)).view(len(x), TOP_K, -1, 1)
        out = w2[ids] @ gate_of_columns(hidden)
        return (out.squeeze(-1) * weights.unsqueeze(-1)).sum(1)

    function, inputs = of_best(combine), layer(7, torch.float32)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.reasons == ["the product with experts has shape [7, 3, 64, 1], not [rows, columns]"]
    assert_matches_oracle(out, function(*(each.double() for each in inputs)))
