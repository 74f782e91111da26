"""Sums and slots in other forms, where a backward follows: raised before autograd, with the gradients they had."""

import pytest
import torch
from torch.nn import functional as F

from tests.helpers import relative_error
from tests.passes import stock
from tests.passes.spellings import of_best, of_expert
from tests.passes.stock import softmax_router
from tests.passes.test_before_autograd import ALLOWED, RAISED, Run, check, float32, grads
from tests.passes.test_raise_by_choice import gathered
from tests.passes.test_raise_totals import LOOPS, routed
from tests.passes.test_raise_turns import in_turn


def of_glu(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    return stock.batched_experts(x, weights, ids, w13, w2, F.glu)


FORMS = {
    "choices in turn": in_turn(),
    "masks by choice": routed(LOOPS["masks by choice"]),
    "where of the sum": routed(LOOPS["where of the sum"]),
    "slots by choice": gathered(),
}


def trained(function):
    """With the gradients that it has in float64."""
    inputs, run = float32(7), Run()
    exact = grads(function, [each.double() for each in inputs])
    for ours, expected in zip(grads(run.compile(function), inputs), exact, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == RAISED
    return run


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    assert not trained(FORMS[form]).refused


@pytest.mark.filterwarnings("error:erase_node")
def test_a_gate_of_glu():
    """It has no name among ours, and no formula is fused in training."""
    (reason,) = trained(of_glu).refused
    assert "not from gated_activation" in reason


def looped(gate):
    """All tokens through all experts, with gates that have no name; up comes before gate."""

    def combine(x, weights, ids, w13, w2):
        total = torch.zeros_like(x)
        for expert in range(stock.EXPERTS):
            up, left = F.linear(x, w13[expert]).chunk(2, -1)
            total = total + F.linear(gate(left) * (up + 1), w2[expert]) * of_expert(weights, ids, expert)
        return total

    return of_best(combine)


@pytest.mark.parametrize("gate", [F.silu, F.softplus, F.mish, F.elu, F.celu], ids=lambda gate: gate.__name__)
def test_gradients_of_large_numbers_in_the_gate_of_a_loop_are_finite(gate):
    """Which is written anew, for any number of rows."""
    trained(looped(lambda left: gate(500 * left)))


CORNERS = {F.relu6: 0.0, F.hardtanh: 1.0, F.hardsigmoid: 3.0}


@pytest.mark.parametrize("gate", CORNERS, ids=lambda gate: gate.__name__)
def test_gradients_at_the_corner_of_a_gate(gate):
    """Those of a clamp are one there. Experts see zeros, and the router sees the rest of a token."""
    inputs = float32(7)
    inputs.hidden_states[:, stock.EXPERTS :] = 0.0
    inputs.w13[..., : stock.EXPERTS] = 0.0
    assert check(looped(lambda left: gate(left + CORNERS[gate])), inputs).raised == RAISED


def test_a_choice_whose_gradient_stops_is_left():
    """All choices have the same numbers, and one of them gives no gradient."""
    kept = in_turn(bias=lambda out, expert, k: out if k else out.detach())
    run = check(kept, float32(7))
    assert not run.raised and run.refused
