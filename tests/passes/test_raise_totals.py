"""RaiseExperts on sums over experts that are written in any way: by choice, masked, stacked, picked."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but
from tests.passes import stock
from tests.passes.at_once import AT_ONCE, gathered, routed
from tests.passes.capture import computed, rewrite
from tests.passes.stock import EXPERTS, HIDDEN, TOP_K, layer, oracle, swiglu

PIPELINE = (*RAISES, *FUSIONS)
SIZES = ((7, torch.bfloat16, False), (1, torch.float32, False), (5, torch.float32, False))
OPEN = (5, torch.float32, True)


def expert(x, w13, w2, index):
    """Of all tokens."""
    return F.linear(swiglu(F.linear(x, w13[index])), w2[index])


def by_choice_and_expert(term, number=TOP_K):
    """Every token through every expert, once for each of its choices."""

    def run(x, weights, ids, w13, w2):
        total = torch.zeros_like(x)
        for k in range(number):
            for e in range(EXPERTS):
                total = term(total, ids[:, k, None] == e, weights[:, k, None], expert(x, w13, w2, e))
        return total

    return run


def by_expert_and_choice(x, weights, ids, w13, w2):
    total = torch.zeros_like(x)
    for e in range(EXPERTS):
        out = expert(x, w13, w2, e)
        for k in range(TOP_K):
            total += (ids[:, k, None] == e) * weights[:, k, None] * out
    return total


def weighed_behind(x, weights, ids, w13, w2):
    """Each choice is put together, then weighed."""
    total = torch.zeros_like(x)
    for k in range(TOP_K):
        chosen = sum(
            (ids[:, k] == e).unsqueeze(-1).to(x.dtype) * expert(x, w13, w2, e) for e in range(EXPERTS)
        )
        total = total + weights[:, k, None] * chosen
    return total


def where_any_chose(x, weights, ids, w13, w2, other=0.0):
    total = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = ids == e
        weight = (weights * mask).sum(-1, keepdim=True)
        total = total + torch.where(mask.any(-1, keepdim=True), expert(x, w13, w2, e) * weight, other)
    return total


def picked(pick):
    """Out of a stack of what all give."""

    def run(x, weights, ids, w13, w2):
        out = torch.stack([expert(x, w13, w2, e) for e in range(EXPERTS)], 1)
        return (pick(out, ids) * weights.unsqueeze(-1)).sum(1)

    return run


def stacked(finish, dim):
    """All that experts give in one tensor, weights [T, E] in another."""

    def run(x, weights, ids, w13, w2):
        dense = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
        return finish(torch.stack([expert(x, w13, w2, e) for e in range(EXPERTS)], dim), dense)

    return run


LOOPS = {
    **AT_ONCE,
    "masks by choice": by_choice_and_expert(lambda total, mask, weight, out: total + mask * weight * out),
    "where, by choice": by_choice_and_expert(
        lambda total, mask, weight, out: total + torch.where(mask, weight * out, 0.0)
    ),
    "where of the sum": by_choice_and_expert(
        lambda total, mask, weight, out: torch.where(mask, total + weight * out, total)
    ),
    "by expert and choice": by_expert_and_choice,
    "weighed behind": weighed_behind,
    "where any chose": where_any_chose,
    "picked out of all": picked(gathered),
    "stacked, weighed from the left": stacked(lambda out, dense: torch.einsum("te,teh->th", dense, out), 1),
    "stacked, weighed from the right": stacked(lambda out, dense: torch.einsum("eth,te->th", out, dense), 0),
    "stacked behind the columns": stacked(lambda out, dense: (out * dense.unsqueeze(1)).sum(-1), -1),
}


@pytest.mark.parametrize(("what", "sizes"), mixed_but(OPEN, LOOPS, SIZES), ids=str)
def test_loops_over_experts(what, sizes):
    inputs = layer(*sizes)
    result, out = computed(routed(LOOPS[what]), *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"] and not result.reasons
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, oracle(inputs, stock.looped))


@pytest.mark.parametrize("what", ["at once, over choices", "stacked, weighed from the right"])
def test_as_many_tokens_as_columns(what):
    """Which dimension is that of columns is told by strides."""
    inputs = layer(HIDDEN, torch.float32)
    result, out = computed(routed(LOOPS[what]), *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, oracle(inputs, stock.looped))


def masked(total, mask, weight, out):
    return total + mask * weight * out


def of_columns(total, mask, weight, out):
    """Columns of a row have weights of their own."""
    return total + mask * weight * torch.linspace(1, 2, HIDDEN) * out


def halves_exchanged(total, mask, weight, out):
    out = torch.cat([out[:, HIDDEN // 2 :], out[:, : HIDDEN // 2]], 1)
    return total + mask * weight * out


def columns_in_a_row(out, ids):
    """What the experts give as one row, turned by half of what one gives."""
    rows = out.flatten(1)
    rows = torch.cat([rows[:, HIDDEN:], rows[:, :HIDDEN]], 1)
    return gathered(rows.view(out.shape), ids)


NOT_THE_SUM = "is not the sum of what experts give, weighed by one tensor"
OTHER = {
    "a choice is left out": (by_choice_and_expert(masked, TOP_K - 1), NOT_THE_SUM),
    "a part of the first is read": (
        by_choice_and_expert(lambda total, mask, weight, out: masked(total + out[:, :1], mask, weight, out)),
        "aten.slice.Tensor reads what experts give, not a weighted sum",
    ),
    "something stands in for those who did not choose": (
        lambda *inputs: where_any_chose(*inputs, other=1.0),
        NOT_THE_SUM,
    ),
    "tokens stand in for those who did not choose": (
        lambda x, *inputs: where_any_chose(x, *inputs, other=x),
        NOT_THE_SUM,
    ),
    "columns have weights of their own": (by_choice_and_expert(of_columns), NOT_THE_SUM),
    "halves of columns are exchanged": (
        by_choice_and_expert(halves_exchanged),
        "reads what experts give, not a weighted sum",
    ),
    "other experts are picked": (picked(columns_in_a_row), NOT_THE_SUM),
    "columns of others, stacked behind them": (
        stacked(lambda out, dense: (out.reshape(len(out), EXPERTS, HIDDEN) * dense.unsqueeze(-1)).sum(1), -1),
        "is not the sum of what experts give",
    ),
    "a sum over columns": (
        stacked(
            lambda out, dense: (out * dense.unsqueeze(1)).sum(1, keepdim=True).expand_as(out).sum(-1), -1
        ),
        "",
    ),
    "other tokens are picked": (picked(lambda out, ids: gathered(out.flip(0), ids)), "come from nowhere"),
    "the product of what two give": (
        by_choice_and_expert(lambda total, mask, weight, out: (total + 1) * (1 + mask * weight * out) - 1),
        NOT_THE_SUM,
    ),
    "a token is left out": (
        by_choice_and_expert(
            lambda total, mask, weight, out: masked(
                total, mask * (torch.arange(len(out)) != 4)[:, None], weight, out
            )
        ),
        NOT_THE_SUM,
    ),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_is_another_sum_stays(what):
    combine, reason = OTHER[what]
    result = rewrite(routed(combine), *layer(5, torch.float32), passes=PIPELINE)
    assert not result.log.raised and not result.ops()
    assert any(reason in each for each in result.reasons), result.reasons


def summed(finish):
    """Products of sorted slots, back in their order: rows [T, K, H], weights [T, K]."""

    def combine(x, weights, ids, w13, w2):
        order, offsets = stock.sorted_slots(ids)
        out = swiglu(torch._grouped_mm(x[order // TOP_K], w13.mT, offsets))
        out = torch._grouped_mm(out, w2.mT, offsets)[order.argsort()]
        return finish(out.view(-1, TOP_K, HIDDEN), weights)

    return combine


def of_tokens(x, weights, ids, w13, w2):
    """A product with a mask [T, S] of the slots of each token."""
    order, offsets = stock.sorted_slots(ids)
    out = torch._grouped_mm(swiglu(torch._grouped_mm(x[order // TOP_K], w13.mT, offsets)), w2.mT, offsets)
    out = out * weights.reshape(-1)[order].unsqueeze(1)
    return F.one_hot(order // TOP_K, x.shape[0]).T.to(x.dtype) @ out


SUMS = {
    "column by column": summed(
        lambda out, weights: sum(out[:, k] * weights[:, k, None] for k in range(TOP_K))
    ),
    "unbound": summed(lambda out, weights: sum((out * weights.unsqueeze(-1)).unbind(1))),
    "a mean": summed(lambda out, weights: (out * weights.unsqueeze(-1)).mean(1) * TOP_K),
    "a product with a mask": of_tokens,
}


@pytest.mark.parametrize("what", SUMS)
def test_sums_of_slots(what):
    inputs = layer(7)
    result, out = computed(routed(SUMS[what]), *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"] and not result.reasons
    assert_matches_oracle(out, oracle(inputs, stock.looped))


OTHER_SUMS = {
    "a mean": (lambda out, weights: (out * weights.unsqueeze(-1)).mean(1), "aten.mean.dim reads"),
    "a column twice": (
        lambda out, weights: sum(out[:, k] * weights[:, k, None] for k in (0, 1, 1)),
        "what experts give is read by aten.select.int, aten.select.int",
    ),
    "weights of other columns": (
        lambda out, weights: sum(out[:, k] * weights[:, k - 1, None] for k in range(TOP_K)),
        "what experts give is read by aten.select.int, aten.select.int",
    ),
    "another number of columns": (
        lambda out, weights: (out * weights.unsqueeze(-1)).mean(1) * 2,
        "aten.mean.dim reads",
    ),
}


@pytest.mark.parametrize("what", OTHER_SUMS)
def test_other_sums_of_slots_stay(what):
    """And say where rows are read otherwise than one by one."""
    finish, reason = OTHER_SUMS[what]
    result = rewrite(routed(summed(finish)), *layer(5), passes=PIPELINE)
    assert all(each.kind != "experts" for each in result.log.raised)
    assert any(reason in each for each in result.reasons), result.reasons


def test_ids_out_of_range_are_not_tried_here():
    """Weights that are gathered by ids of somebody's, which are read as Python does."""

    def combine(x, weights, ids, w13, w2):
        ids = (x[:, :TOP_K] * 3).long()
        hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids]))
        out = torch.einsum("tki,tkhi->tkh", hidden, w2[ids])
        return sum(out[:, k] * weights[:, k, None] for k in range(TOP_K))

    result = rewrite(routed(combine), *layer(5), passes=PIPELINE)
    assert all(each.kind != "experts" for each in result.log.raised) and result.reasons


def test_rows_that_are_weighed_before_are_not_weighed_again():
    """Weights on what goes in, and once more on what comes out, where columns are added one by one."""

    def combine(x, weights, ids, w13, w2):
        order, offsets = stock.sorted_slots(ids)
        rows = x[order // TOP_K] * weights.reshape(-1)[order].unsqueeze(1)
        out = swiglu(torch._grouped_mm(rows, w13.mT, offsets))
        out = torch._grouped_mm(out, w2.mT, offsets)[order.argsort()].view(-1, TOP_K, HIDDEN)
        return sum(out[:, k] * weights[:, k, None] for k in range(TOP_K))

    result = rewrite(routed(combine), *layer(5), passes=PIPELINE)
    assert all(each.kind != "experts" for each in result.log.raised) and result.reasons


def test_weights_along_the_columns_are_none_of_tokens():
    """There are as many tokens as columns: sizes tell nothing."""

    def combine(x, weights, ids, w13, w2):
        total = torch.zeros_like(x)
        for k in range(TOP_K):
            for e in range(EXPERTS):
                total = total + ((ids[:, k] == e) * weights[:, k]) * expert(x, w13, w2, e)
        return total

    (reason,) = rewrite(routed(combine), *layer(HIDDEN), passes=PIPELINE).reasons
    assert NOT_THE_SUM in reason
