"""RaiseExperts knows rows by what random ids make of them: what the ids tried do not show is not taken for granted."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from inductor_passes.raising import indices
from tests.helpers import assert_matches_oracle
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import (
    EXPERTS,
    TOP_K,
    added_by_index,
    behind,
    grouped_with,
    layer,
    swiglu,
    weighed,
)
from tests.passes.test_raise_refusals import left


def _with_capacity(is_beyond):
    """Of each expert's tokens those that come too late, by their place, count as nothing."""

    def run(*inputs):
        known = {}

        def order_of(ids):
            of_expert = F.one_hot(ids.reshape(-1), EXPERTS)
            known["too many"] = is_beyond(((of_expert.cumsum(0) - 1) * of_expert).sum(-1))
            return stock.sorted_slots(ids)

        def weigh(out, weights, order):
            return weighed(out, weights, order).masked_fill(known["too many"][order].unsqueeze(-1), 0.0)

        return grouped_with(order=order_of, weigh=weigh, finish=added_by_index)(*inputs)

    return run


@pytest.mark.parametrize(
    "tokens, dynamic, rows",
    [(30, False, 20), (300, False, 110), (9, True, 64), (9, True, 5000), (10, True, 5000)],
)
def test_a_capacity_that_random_ids_do_not_reach_stays(tokens, dynamic, rows):
    assert (
        "aten.where.self reads what experts give"
        in left(_with_capacity(lambda places: places >= rows), *layer(tokens, dynamic=dynamic))[0]
    )


def test_a_capacity_that_nothing_is_compared_with_stays():
    """Of 256 rows, by a shift."""
    assert left(_with_capacity(lambda places: (places >> 8) > 0), *layer(9, dynamic=True))


def test_a_capacity_of_all_tokens_is_none():
    assert rewrite(_with_capacity(lambda places: places >= 30), *layer(30), passes=RAISES).log.raised


def test_a_tail_behind_another_size_stays():
    """That is 20 when it is traced, and so behind every slot; it may be less when the code runs."""

    def tailed(x, router, w13, w2, other):
        def gate(gate_up, rows):
            return swiglu(gate_up.masked_fill(behind(rows.shape[0], TOP_K * other.shape[0]), 0.0))

        return grouped_with(gate=gate)(x, router, w13, w2)

    other = torch.zeros(20)
    torch._dynamo.mark_dynamic(other, 0)
    (reason,) = left(tailed, *layer(9, dynamic=True), other)
    assert reason == "the gate also reads aten.ge.Scalar"


def test_what_depends_on_a_branch_is_not_computed():
    def steered(x, router, w13, w2, flag):
        def gate(gate_up, rows):
            (steps,) = torch.cond(flag > 0, lambda: (torch.ones(27, 1),), lambda: (torch.zeros(27, 1),), ())
            return swiglu(gate_up) * steps.to(x.dtype)

        return grouped_with(gate=gate)(x, router, w13, w2)

    (reason,) = left(steered, *layer(9), torch.ones(()))
    assert "the gate also reads cond" in reason


def test_rows_that_depend_on_a_branch_stay():
    def steered(x, router, w13, w2, flag):
        def rows(x, order):
            shift = torch.cond(flag > 0, lambda order: order + 1, lambda order: order - 1, (order,))
            return x[shift % x.shape[0]]

        return grouped_with(rows=rows)(x, router, w13, w2)

    (reason,) = left(steered, *layer(9), torch.ones(()))
    assert "not from tokens in expert order" in reason


def test_an_operator_of_others_is_not_run():
    """It may talk to other processes, which run no such thing while this one compiles."""
    calls = []

    @torch.library.custom_op("raise_samples::order_of", mutates_args=())
    def order_of(ids: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape)
        return ids.argsort()

    order_of.register_fake(torch.empty_like)

    def layer_of(*inputs):
        return grouped_with(
            order=lambda ids: (order_of(ids.reshape(-1)), stock.sorted_slots(ids)[1]), finish=added_by_index
        )(*inputs)

    (reason,) = left(layer_of, *layer(9))
    assert "not from tokens in expert order" in reason
    assert calls == []  # nor does the graph run, which is only looked at


def test_too_many_slots_are_not_tried(monkeypatch):
    monkeypatch.setattr(indices, "_MOST_SLOTS", 26)
    assert left(stock.grouped, *layer(9)) == ["expert ids of shape [9, 3] cannot be tried out"]


def test_sums_into_zeros_add_nothing():
    result = rewrite(grouped_with(finish=added_by_index), *layer(9), passes=(*RAISES, *FUSIONS))
    assert result.ops() == ["fused_moe"] and "full" not in result.after


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_limit_on_weights_shows_with_few_tokens(tokens):
    """Top-p: of two tokens, numbers that are the same in every sample may all lie on one side of it."""

    def run(x, router, w13, w2):
        probs, ids = F.linear(x, router).softmax(-1).sort(-1, descending=True)
        kept = probs * (probs.cumsum(-1) - probs < 0.6)
        dense = torch.zeros_like(probs).scatter(1, ids, kept)
        out = torch.einsum("tei,ehi->teh", swiglu(torch.einsum("th,eih->tei", x, w13)), w2)
        return torch.einsum("te,teh->th", dense, out)

    inputs = layer(tokens, torch.float32)
    result, out = computed(run, *inputs, passes=RAISES)
    assert result.log.raised
    assert_matches_oracle(out, run(*(each.double() for each in inputs)))
