"""Layers that multiply all tokens with all experts, where a backward follows: raised before autograd, or left."""

import pytest
import torch
from torch.nn import functional as F

import inductor_passes
from tests.helpers import relative_error, usually
from tests.passes import stock
from tests.passes.stock import EXPERTS, softmax_router, swiglu
from tests.passes.strangers import STRANGERS
from tests.passes.test_before_autograd import ALLOWED, FORWARD, RAISED, Run, check, float32, grads

NAMES = (
    "einsums over all experts, weights scattered",
    "a loop with biases",
    "a loop that cuts gate and up out of `w13[e]`",
    "tokens [B, S, H] and ids [B, S, K]",
)


LOOPS = [name for name in NAMES if "[B, S, K]" not in name]


@pytest.mark.parametrize(
    ("name", "dynamic"),
    usually(
        [*((name, False) for name in NAMES), *((name, True) for name in LOOPS)],
        [
            ("einsums over all experts, weights scattered", False),
            ("a loop with biases", True),
        ],
    ),
)
def test_gradients(name, dynamic):
    function, inputs, run = STRANGERS[name].run, float32(7), Run()
    exact = grads(function, [each.double() for each in inputs])
    for ours, expected in zip(grads(run.compile(function), inputs, dynamic), exact, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == RAISED and not run.refused
    assert run.graphs[0] == FORWARD


def looped(weight_of=lambda w: w, hidden_of=lambda h: h, column_of=lambda c: c, rows_of=lambda x: x):
    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):
            column = column_of((weights * (ids == expert)).sum(-1, keepdim=True))
            hidden = hidden_of(swiglu(F.linear(rows_of(x), w13[expert])))
            total = total + F.linear(hidden, weight_of(w2[expert])) * column
        return total + x + router.sum() + w13.sum() + w2.sum()

    return run


@pytest.mark.parametrize("name", usually(NAMES, LOOPS[1:]))
def test_where_no_size_is_known_values_are_right(name):
    assert not check(STRANGERS[name].run, float32(7), dynamic=True).raised


STOPPED = {
    "at a weight": {"weight_of": torch.detach},
    "at the gate": {"hidden_of": torch.detach},
    "at the weights of a router": {"column_of": torch.detach},
    "at the tokens": {"rows_of": torch.detach},
}


@pytest.mark.parametrize("where", usually(STOPPED, ["at the gate", "at the weights of a router"]))
def test_gradients_that_stop_inside_stop(where):
    check(looped(**STOPPED[where]), float32(5))


def test_explain_says_why_a_layer_stays():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            _, *weights = map(torch.nn.Parameter, stock.layer(5, torch.float32))
            self.router, self.w13, self.w2 = weights

        def forward(self, x):
            return STRANGERS["experts choose their tokens"].run(x, self.router, self.w13, self.w2)

    report = inductor_passes.explain(Model(), stock.layer(5, torch.float32).hidden_states)
    assert not report.raised and "not all of them all tokens" in report.refused[0].reason
    assert len([each for each in report.refused if "picks the tokens" in each.reason]) == 1
