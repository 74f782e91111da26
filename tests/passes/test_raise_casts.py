"""Casts: what rounds may go, in a layer that is raised; what makes other numbers is part of what is computed."""

import inspect

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import RELATIVE_NORM, relative_error
from tests.passes import stock
from tests.passes.capture import computed
from tests.passes.stock import EXPERTS, HIDDEN, TOP_K, swiglu
from tests.passes.test_before_autograd import RAISED, Run, check, float32, grads

DOUBLE = [each.double() for each in float32()]


def float8(tensor):
    return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


def integers(tensor):
    return (8 * tensor).to(torch.int32).to(tensor.dtype)


def bits(tensor):
    """The bits of a bfloat16, read as those of another dtype."""
    return tensor.to(torch.bfloat16).view(torch.float16).to(tensor.dtype)


def halves(tensor):
    return tensor.to(torch.float16).to(tensor.dtype)


def same(tensor):
    return tensor


def gathered(scores=same, hidden=same, activated=same, out=same, weighed=same, weights=same, total=same):
    """`stock.batched`, with a cast in one place."""

    def run(x, router, w13, w2):
        values, ids = scores(F.linear(x, router).softmax(-1)).topk(TOP_K)
        values = weights(values / values.sum(-1, keepdim=True))
        rows, experts = x.unsqueeze(1).expand(-1, TOP_K, -1).reshape(-1, HIDDEN), ids.reshape(-1)
        gate_up = hidden(torch.bmm(w13[experts], rows.unsqueeze(-1)).squeeze(-1))
        given = out(torch.bmm(w2[experts], activated(swiglu(gate_up)).unsqueeze(-1)).squeeze(-1))
        terms = weighed(given * values.reshape(-1, 1))
        return total(terms.view(-1, TOP_K, HIDDEN).sum(1))

    return run


def of_all(weights=same, column=same, out=same, weighed=same):
    """Einsums over all experts, whose weights are scattered."""

    def run(x, router, w13, w2):
        values, ids = stock.softmax_router(F.linear(x, router))
        dense = column(values.new_zeros(len(x), EXPERTS).scatter(1, ids, weights(values))).to(x.dtype)
        given = torch.einsum("tei,ehi->teh", swiglu(torch.einsum("th,eih->tei", x, w13)), w2)
        return weighed(out(given) * dense.unsqueeze(-1)).sum(1)

    return run


def in_turn(weights=same, column=same, out=same, weighed=same, total=same):
    """A loop over experts."""

    def run(x, router, w13, w2):
        values, ids = stock.softmax_router(F.linear(x, router))
        dense = column(values.new_zeros(len(x), EXPERTS).scatter(1, ids, weights(values))).to(x.dtype)
        summed = torch.zeros_like(x)
        for expert in range(EXPERTS):
            given = out(F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]))
            summed = total(summed + weighed(given * dense[:, expert, None]))
        return summed

    return run


def with_integers(x, router, w13, w2):
    """As `stock.looped`, with integers for weights."""
    (values, ids), total = stock.softmax_router(F.linear(x, router)), torch.zeros_like(x)
    weights = (8 * values).int()
    for expert in range(EXPERTS):
        weight = (weights * (ids == expert)).sum(-1, keepdim=True)
        total = total + F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]) * weight
    return total


def with_integers_of_all(x, router, w13, w2):
    """As `of_all`, with integers for weights."""
    values, ids = stock.softmax_router(F.linear(x, router))
    dense = (F.one_hot(ids, EXPERTS) * (8 * values).int().unsqueeze(-1)).sum(1)
    given = torch.einsum("tei,ehi->teh", swiglu(torch.einsum("th,eih->tei", x, w13)), w2)
    return (given * dense.unsqueeze(-1)).sum(1)


NO_SUM = "reads what experts give, not a weighted sum"
LEFT = {
    "float8 of what experts give": (gathered(out=float8), NO_SUM),
    "integers of what experts give": (gathered(out=lambda each: each.int().to(each.dtype)), NO_SUM),
    "float8 of what is weighed": (gathered(weighed=float8), NO_SUM),
    "integers for weights": (gathered(weights=lambda each: (8 * each).int()), "is no weight for each slot"),
    "integers for weights in a loop": (with_integers, "is not the sum of what experts give"),
    "integers for weights of all": (
        with_integers_of_all,
        "is not the sum of what experts give",
    ),
    "bits of what experts give": (gathered(out=bits), "aten.view.dtype reads what experts give"),
    "bits between the products": (gathered(activated=bits), "no gate leads to another"),
    "float8 of the weights of all": (
        of_all(column=float8),
        "is not the sum of what experts give",
    ),
    "integers of the weights of all": (
        of_all(column=integers),
        "is not the sum of what experts give",
    ),
    "float8 of what all experts give": (of_all(out=float8), "all experts at once"),
    "integers of what all experts give": (of_all(out=integers), "all experts at once"),
    "float8 of the weights of a loop": (
        in_turn(column=float8),
        "is not the sum of what experts give",
    ),
    "float8 of what an expert of a loop gives": (
        in_turn(out=float8),
        NO_SUM,
    ),
    "float8 of the terms of a loop": (in_turn(weighed=float8), NO_SUM),
    "float8 of the sum in a loop": (in_turn(total=float8), NO_SUM),
}
KEPT = {
    "float8 of weights": gathered(weights=float8),
    "integers of weights": gathered(weights=integers),
    "bits of weights": gathered(weights=bits),
    "float8 of weights that are scattered": of_all(weights=float8),
    "integers of weights in a loop": in_turn(weights=integers),
    "float8 in a gate": gathered(hidden=float8),
    "integers behind a gate": gathered(activated=integers),
    "float8 of the sum": gathered(total=float8),
}


@pytest.mark.parametrize("what", LEFT)
def test_a_cast_that_makes_other_numbers_of_what_is_summed_stays(what):
    function, reason = LEFT[what]
    result, out = computed(function, *DOUBLE, passes=(*RAISES, *FUSIONS))
    assert not result.log.raised and any(reason in each for each in result.reasons), result.reasons
    torch.testing.assert_close(out, function(*DOUBLE), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("what", KEPT)
def test_a_cast_that_makes_other_numbers_is_kept_in_a_layer_that_is_raised(what):
    result, out = computed(KEPT[what], *DOUBLE, passes=(*RAISES, *FUSIONS))
    assert next(each.kind for each in result.log.raised) == "experts"
    torch.testing.assert_close(out, KEPT[what](*DOUBLE), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cast", [float8, integers, bits])
def test_a_router_with_such_a_cast_stays(cast):
    function = gathered(scores=cast)
    result, out = computed(function, *DOUBLE, passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["experts"]
    torch.testing.assert_close(out, function(*DOUBLE), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "function",
    [gathered(out=float8), gathered(hidden=float8), gathered(weights=float8), in_turn(out=float8)],
    ids=["what experts give", "a gate", "weights", "a loop"],
)
def test_gradients_of_such_casts(function):
    check(function, DOUBLE)


ROUNDED = {
    **{
        f"{place} of a layer": gathered(**{place: halves}) for place in inspect.signature(gathered).parameters
    },
    **{f"{place} of all experts": of_all(**{place: halves}) for place in ("weights", "column", "out")},
    **{f"{place} of a loop": in_turn(**{place: halves}) for place in inspect.signature(in_turn).parameters},
}


@pytest.mark.parametrize("what", ROUNDED)
def test_a_cast_that_rounds_is_no_part_of_a_layer(what):
    result, out = computed(ROUNDED[what], *float32(), passes=(*RAISES, *FUSIONS))
    assert [each.kind for each in result.log.raised] == RAISED and result.ops() == ["fused_moe"]
    torch.testing.assert_close(out, ROUNDED[what](*float32()), rtol=0.01, atol=0.01)


def test_weights_that_are_stored_in_float8_are_read_as_they_are():
    """A loop's cast of each expert's is one of all of them."""
    x, router, *stored = float32()
    weights = [each.to(torch.float8_e4m3fn) for each in stored]

    def run(x, router, w13, w2):
        return stock.looped(x, router, Cast(w13), Cast(w2))

    class Cast:
        def __init__(self, tensor):
            self.tensor = tensor

        def __getitem__(self, expert):
            return self.tensor[expert].float()

    result, out = computed(run, x, router, *weights, passes=(*RAISES, *FUSIONS))
    assert [each.kind for each in result.log.raised] == RAISED
    torch.testing.assert_close(out, run(x, router, *weights), rtol=1e-4, atol=1e-4)


def rounded(x, router, w13, w2, is_before=False):
    """torchtitan: products in bfloat16, whatever the dtype of the model."""
    weights, ids = stock.softmax_router(F.linear(x, router))
    order, offsets = stock.sorted_slots(ids)
    scale, rows = weights.reshape(-1)[order].unsqueeze(-1), x[order // TOP_K]
    rows = (rows * scale if is_before else rows).bfloat16()
    hidden = swiglu(torch._grouped_mm(rows, w13.bfloat16().mT, offsets))
    out = torch._grouped_mm(hidden, w2.bfloat16().mT, offsets).type_as(x)
    return torch.zeros_like(x).index_add(0, order // TOP_K, out if is_before else out * scale)


def rounded_before(x, router, w13, w2):
    return rounded(x, router, w13, w2, is_before=True)


@pytest.mark.parametrize("function", [rounded, rounded_before])
def test_products_in_another_dtype_than_the_model(function):
    inputs = float32()
    result, out = computed(function, *inputs, passes=(*RAISES, *FUSIONS))
    assert [each.kind for each in result.log.raised] == RAISED and out.dtype == torch.float32
    torch.testing.assert_close(out, function(*inputs), rtol=0.02, atol=0.02)
    run = Run()
    expected = grads(function, inputs)
    for ours, wanted in zip(grads(run.compile(function), inputs), expected, strict=True):
        assert relative_error(ours, wanted.double()) <= RELATIVE_NORM[torch.bfloat16]
    assert run.raised == RAISED
