"""RaiseExperts writes rows in another order than the model has them: what depends on where they lie stays."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle
from tests.passes import stock
from tests.passes.capture import computed
from tests.passes.stock import HIDDEN, INTERMEDIATE, TOP_K, gathered_with, grouped_with, layer
from tests.passes.test_raise_refusals import left

PIPELINE = (*RAISES, *FUSIONS)


def in_gate(change):
    """What stands between the products, [S, 2I, 1] before: each row changed."""

    def activate(gate_up):
        gate, up = gate_up.squeeze(-1).chunk(2, dim=-1)
        return change(F.silu(gate), up).unsqueeze(-1)

    return {"activate": activate}


def by_token(rows):
    return rows.view(-1, TOP_K, INTERMEDIATE)


APART = {
    "scaled by its place": (
        lambda gate, up: gate * up * torch.arange(up.shape[0]).unsqueeze(-1),
        "the gate tells rows apart by where they lie: aten.unsqueeze",
    ),
    "scaled by its place among the experts of its token": (
        lambda gate, up: (by_token(gate * up) * torch.arange(TOP_K).view(1, -1, 1)).flatten(0, 1),
        "the gate tells rows apart by where they lie: aten.view",
    ),
    "times the first row": (
        lambda gate, up: gate * up[:1],
        "the gate takes some rows from others: aten.slice.Tensor",
    ),
    "times the first of its token": (
        lambda gate, up: (by_token(gate) * by_token(up).select(1, 0).unsqueeze(1)).flatten(0, 1),
        "the gate takes some rows from others: aten.select.int",
    ),
    "times a part of the rows": (
        lambda gate, up: gate * up.split(1)[0],
        "the gate takes some rows from others: aten.split.Tensor",
    ),
    "rows of a token as one": (
        lambda gate, up: (gate.reshape(9, -1) * up.reshape(9, -1)).view(27, -1),
        "the gate shows rows as [9, 96], several as one",
    ),
}


@pytest.mark.parametrize("what", APART)
def test_a_gate_that_tells_rows_apart_stays(what):
    change, reason = APART[what]
    (found,) = left(gathered_with(**in_gate(change)), *layer(9))
    assert found == reason


ALONE = {
    "scaled column by column": lambda gate, up: gate * up * torch.arange(INTERMEDIATE),
    "in columns of two": lambda gate, up: (gate.unflatten(-1, (-1, 2)) * up.unflatten(-1, (-1, 2))).flatten(
        -2
    ),
    "by token": lambda gate, up: (by_token(gate) * by_token(up)).flatten(0, 1),
    "plus a number": lambda gate, up: gate * (up + torch.full((up.shape[0], 1), 0.5).to(up.dtype)),
}


@pytest.mark.parametrize("what", ALONE)
def test_a_gate_of_each_row_alone_is_raised(what):
    inputs = layer(9)
    function = gathered_with(**in_gate(ALONE[what]))
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    torch.testing.assert_close(out, function(*inputs), rtol=0.03, atol=0.03)


def as_many_columns_as_slots(inputs):
    return inputs._replace(w2=inputs.w2[:, : 9 * TOP_K].contiguous())


def test_weights_along_the_columns_are_no_weights_of_rows():
    def summed(out, weights):
        return (out * weights.reshape(1, -1)).view(-1, TOP_K, 9 * TOP_K).sum(1)

    (reason,) = left(gathered_with(sum=summed), *as_many_columns_as_slots(layer(9)))
    assert reason == "aten.view is no weight for each slot"


def test_weights_along_the_columns_of_sorted_rows():
    def finish(out, inverse, x, order):
        return torch.zeros(9, 9 * TOP_K, dtype=out.dtype).index_add(0, order // TOP_K, out)

    def weigh(out, weights, order):
        return (out * weights.reshape(-1)[order]).to(out.dtype)

    (reason,) = left(grouped_with(weigh=weigh, finish=finish), *as_many_columns_as_slots(layer(9)))
    assert "is no weight for each slot" in reason


def _added(into, index, out):
    return into.index_add(0, index, out)


def _put(into, index, out):
    return into.index_put((index,), out, accumulate=True)


def _scattered(into, index, out):
    return into.scatter_add(0, index.view(-1, 1).expand(-1, HIDDEN), out)


@pytest.mark.parametrize(
    "add, rows, columns", [(_added, 11, 0), (_put, 11, 0), (_scattered, 11, 0), (_scattered, 9, 4)]
)
def test_a_sum_with_more_rows_or_columns_than_the_layer_stays(add, rows, columns):
    def finish(out, inverse, x, order):
        return add(torch.zeros(rows, HIDDEN + columns, dtype=out.dtype), order // TOP_K, out)

    (reason,) = left(grouped_with(finish=finish), *layer(9))
    assert "reads what experts give, not a weighted sum" in reason


@pytest.mark.parametrize("add", [_added, _put, _scattered])
def test_a_sum_added_to_what_is_there_is_raised(add):
    """torchtitan adds to what its shared experts give."""

    def finish(out, inverse, x, order):
        return add(x.sin(), order // TOP_K, out.to(x.dtype)) * 2

    inputs = layer(9)
    result, out = computed(grouped_with(finish=finish), *inputs, passes=PIPELINE)
    assert len(result.log.raised) == 2 and not result.reasons
    exact = (inputs.hidden_states.double().sin() + stock.oracle(inputs, stock.grouped)) * 2
    assert_matches_oracle(out, exact)


def test_a_sum_that_keeps_its_dimension_is_raised():
    def finish(out, inverse, x, order):
        return out[inverse].view(-1, TOP_K, HIDDEN).sum(1, keepdim=True).squeeze(1).to(x.dtype)

    inputs = layer(9)
    result, out = computed(grouped_with(finish=finish), *inputs, passes=PIPELINE)
    assert len(result.log.raised) == 2
    assert_matches_oracle(out, stock.oracle(inputs, stock.grouped))


def test_a_sum_added_to_what_reads_a_product_stays():
    """It would be computed twice."""

    def run(x, router, w13, w2):
        weights, ids = stock.softmax_router(F.linear(x, router))
        gate_up = torch.einsum("th,tkih->tki", x, w13[ids])
        out = torch.einsum("tki,tkhi->tkh", stock.swiglu(gate_up), w2[ids]) * weights.unsqueeze(-1)
        into = torch.cat([gate_up[:, 0], gate_up[:, 1]], -1)[:, :HIDDEN]
        tokens = torch.arange(ids.numel()) // TOP_K
        return into.index_add(0, tokens, out.flatten(0, 1).to(x.dtype))

    (reason,) = left(run, *layer(9))
    assert "is also read by" in reason


def test_the_first_rows_of_more_stay():
    """9 of 12 tokens have ids; a slot's token is one of the first 9."""

    def first(x, router, w13, w2):
        weights, ids = stock.softmax_router(F.linear(x[3:], router))
        return stock.grouped_experts(x, weights, ids, w13, w2)[:9]

    inputs = layer(12)
    (reason,) = left(first, *inputs)
    assert reason == "rows come from 12 rows, of which 9 have expert ids"


LIMITED = {
    "far out": lambda gate, up: F.silu(gate).clamp(max=1e4) * up,
    "at the largest float16": lambda gate, up: (F.silu(gate) * up).clamp(-65504.0, 65504.0),
    "twice far out": lambda gate, up: F.silu(torch.where(gate > 1e4, 2 * gate, gate)) * up,
    "no NaN": lambda gate, up: torch.where(torch.isnan(gate), 0.0, F.silu(gate)) * up,
    "no inf": lambda gate, up: torch.where(torch.isinf(gate), 0.0, F.silu(gate)) * up,
    "no -inf": lambda gate, up: F.silu(gate) * up.masked_fill(up == -torch.inf, 0.0),
}
SPOILT = {"no NaN": torch.nan, "no inf": torch.inf, "no -inf": -torch.inf}


@pytest.mark.parametrize("what", LIMITED)
def test_a_limit_that_common_numbers_do_not_reach_is_kept(what):
    def gate(gate_up, rows):
        return LIMITED[what](*gate_up.chunk(2, dim=-1))

    inputs = layer(9)
    loud = inputs._replace(w13=inputs.w13 * 2e3)
    loud.w13[3, 5] = SPOILT.get(what, 0.0)
    function = grouped_with(gate=gate)
    result, out = computed(function, *loud, passes=PIPELINE)
    assert result.log.raised and "'silu'" not in result.after
    torch.testing.assert_close(out, function(*loud), rtol=0.03, atol=1e3, equal_nan=True)
