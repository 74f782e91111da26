"""RaiseExperts: what only looks like a layer, or cannot be told to be one, stays as it was written, and says why."""

import re
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import inductor_passes
from inductor_passes.pipeline import RAISES
from inductor_passes.raising import RaiseExperts
from tests.generated import codes_of
from tests.passes import stock
from tests.passes.capture import post_grad, rewrite, show
from tests.passes.stock import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    added_by_index,
    behind,
    gathered_with,
    grouped_with,
    layer,
    softmax_router,
    swiglu,
    weighed,
)


def left(function, *args):
    """Why a layer stays; and that its graph does, to the letter."""
    result = rewrite(function, *args, passes=(RaiseExperts(),))
    assert result.after == result.before and not result.log.raised
    return result.reasons


OTHERS = {
    "rows of other tokens": (
        {"rows": lambda x, order: x[(order + 1) // TOP_K % x.shape[0]]},
        "rows come from aten.index.Tensor, not from tokens in expert order",
    ),
    "rows in the order of slots": (
        {"order": lambda ids: (torch.arange(ids.numel()), stock.sorted_slots(ids)[1])},
        "not from tokens in expert order",
    ),
    "other offsets": (
        {"order": lambda ids: (stock.sorted_slots(ids)[0], stock.sorted_slots(ids)[1] - 1)},
        "aten.sub.Tensor gives rows to other experts than the ids of the layer",
    ),
    "a weight for each column": (
        {"weigh": lambda out, weights, order: out * weights.reshape(-1)[:HIDDEN].sum()},
        "is no weight for each slot",
    ),
    "weights of other slots": (
        {"weigh": lambda out, weights, order: out * weights.reshape(-1)[order.flip(0)].unsqueeze(-1)},
        "is no weight for each slot",
    ),
    "a sum over columns": (
        {"finish": lambda out, inverse, x, order: out[inverse].view(-1, TOP_K, HIDDEN).sum(2).to(x.dtype)},
        "reads what experts give, not a weighted sum",
    ),
    "weighed twice": (
        {
            "weigh": lambda out, weights, order: (
                (out * weights.reshape(-1)[order, None]) * weights.reshape(-1)[order, None]
            )
        },
        "aten.mul.Tensor reads what experts give, not a weighted sum",
    ),
    "the largest, not the sum": (
        {"finish": lambda out, inverse, x, order: out[inverse].view(-1, TOP_K, HIDDEN).amax(1).to(x.dtype)},
        "aten.amax reads what experts give, not a weighted sum",
    ),
    "summed in another order": (
        {
            "finish": lambda out, inverse, x, order: (
                out[inverse.flip(0)].view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)
            )
        },
        "aten.index.Tensor reads what experts give, not a weighted sum",
    ),
    "summed over other rows": (
        {"finish": lambda out, inverse, x, order: out[inverse].view(TOP_K, -1, HIDDEN).sum(1).to(x.dtype)},
        "aten.sum.dim_IntList reads what experts give, not a weighted sum",
    ),
    "gate_up is a result too": (
        {"result": lambda result, gate_up, out: (result, gate_up)},
        "is also read by",
    ),
    "what experts give is a result too": (
        {"result": lambda result, gate_up, out: (result, out)},
        "what experts give is read by",
    ),
    "the gate reads the rows": (
        {"gate": lambda gate_up, rows: swiglu(gate_up) * rows[:, : stock.INTERMEDIATE]},
        "the gate also reads",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_something_else_stays(what):
    parts, reason = OTHERS[what]
    (found,) = left(grouped_with(**parts), *layer(9))
    assert reason in found


def _multiplied(weights, rows):
    """The sum as a product: weights are [T, 1, K], rows [T, K, H]."""
    return torch.bmm(weights, rows.float()).squeeze(1)


GATHERED_OTHERS = {
    "first experts of other slots": (
        {"experts": lambda experts: (experts.flip(0), experts)},
        "prims.rev is not the expert of each slot",
    ),
    "second experts of other slots": (
        {"experts": lambda experts: (experts, experts.flip(0))},
        "is not the expert of each slot|gives rows to other experts than the ids of the layer",
    ),
    "tokens in another order": (
        {"rows": lambda x, weights: x[torch.arange(weights.numel()) % x.shape[0]]},
        "rows come from aten.index.Tensor, not from the tokens of their slots",
    ),
    "tokens repeated as a whole": (
        {"rows": lambda x, weights: x.unsqueeze(0).expand(TOP_K, -1, -1).reshape(-1, HIDDEN)},
        "repeated, not from tokens",
    ),
    "weighed and then repeated": (
        {
            "rows": lambda x, weights: (x.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).view(-1, HIDDEN),
            "sum": lambda out, weights: out.view(-1, TOP_K, HIDDEN).sum(1),
        },
        "rows come from aten.mul.Tensor, not from tokens",
    ),
    "a product with other weights": (
        {
            "sum": lambda out, weights: _multiplied(
                weights.sum(0).expand(9, 1, -1), out.view(-1, TOP_K, HIDDEN)
            )
        },
        "aten.bmm reads what experts give, not a weighted sum",
    ),
    "a product with rows of other tokens": (
        {
            "sum": lambda out, weights: _multiplied(
                weights.unsqueeze(1), out.float().view(TOP_K, -1, HIDDEN).transpose(0, 1)
            )
        },
        "reads what experts give, not a weighted sum",
    ),
}


@pytest.mark.parametrize("what", GATHERED_OTHERS)
def test_what_is_something_else_stays_where_weights_are_gathered(what):
    parts, reason = GATHERED_OTHERS[what]
    (found,) = left(gathered_with(**parts), *layer(9))
    assert re.search(reason, found)


def _from_ids(x, weights, ids, w13, w2):
    slots = ids.shape[1]
    rows, experts = x.unsqueeze(1).expand(-1, slots, -1).reshape(-1, HIDDEN), ids.reshape(-1)
    activated = swiglu(torch.bmm(w13[experts], rows.unsqueeze(-1)).squeeze(-1))
    out = torch.bmm(w2[experts], activated.unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
    return out.view(x.shape[0], slots, HIDDEN).sum(1).to(x.dtype)


def _one_each(x, weights, ids, w13, w2):
    """Top-1, ids and weights [T]."""
    order, offsets = stock.sorted_slots(ids)
    activated = swiglu(torch._grouped_mm(x[order], w13.transpose(-2, -1), offsets))
    out = torch._grouped_mm(activated, w2.transpose(-2, -1), offsets) * weights[order].unsqueeze(-1)
    return torch.zeros_like(x, dtype=out.dtype).index_add(0, order, out).to(x.dtype)


def _best(x, router, w13, w2):
    return _one_each(x, *F.linear(x, router).float().softmax(-1).max(-1), w13, w2)


def _two_inputs(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    order, offsets = stock.sorted_slots(ids)
    w1, w3 = w13.transpose(-2, -1).chunk(2, dim=-1)
    gate = torch._grouped_mm(x[order // TOP_K], w1.contiguous(), offsets)
    up = torch._grouped_mm((x + 1)[order // TOP_K], w3.contiguous(), offsets)
    out = torch._grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offsets)
    return added_by_index(weighed(out, weights, order), None, x, order)


def _offsets_from_outside(x, offsets, order, w13, w2):
    gate_up = torch._grouped_mm(x[order // TOP_K], w13.transpose(-2, -1), offsets)
    return torch._grouped_mm(swiglu(gate_up), w2.transpose(-2, -1), offsets)


def _bias_of_another_dtype(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    order, offsets = stock.sorted_slots(ids)
    bias = torch.ones(EXPERTS, 2 * stock.INTERMEDIATE, dtype=torch.float64)[ids.reshape(-1)[order]]
    gate_up = torch._grouped_mm(x[order // TOP_K], w13.transpose(-2, -1), offsets) + bias
    out = torch._grouped_mm(swiglu(gate_up).to(x.dtype), w2.transpose(-2, -1), offsets)
    return added_by_index(weighed(out, weights, order), None, x, order)


def _ids(*shape):
    return torch.ones(shape), torch.zeros(shape, dtype=torch.long)


ELSEWHERE = {
    "no tokens": (stock.grouped, layer(0), r"expert ids of shape \[0, 3\] cannot be tried out"),
    "more experts per token than there are": (
        _from_ids,
        (layer(9)[0], *_ids(9, TOP_K), *(weight[:2].contiguous() for weight in layer(9)[2:])),
        r"expert ids of shape \[9, 3\] cannot be tried out",
    ),
    "ids [T] from outside": (
        _one_each,
        (layer(9)[0], *_ids(9), *layer(9)[2:]),
        "expert ids come from the graph input",
    ),
    "gate and up of different tokens": (
        _two_inputs,
        layer(9),
        "the products before the gate have different inputs",
    ),
    "offsets from outside": (
        _offsets_from_outside,
        (layer(9)[0], torch.arange(1, EXPERTS + 1, dtype=torch.int32), torch.arange(27), *layer(9)[2:]),
        "expert ids come from the graph input",
    ),
    "another gate with a mask": (
        grouped_with(
            gate=lambda gate_up, rows: torch.tanh(stock.swiglu(gate_up)) * ~behind(len(rows), len(rows))
        ),
        layer(9),
        "the gate is none of ours and also reads aten.bitwise_not",
    ),
    "a bias of another dtype": (
        _bias_of_another_dtype,
        layer(9),
        "grouped_gemm does not take these arguments",
    ),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_no_part_tells_stays(what):
    function, args, reason = ELSEWHERE[what]
    (found,) = left(function, *args)
    assert re.search(reason, found)


def test_no_experts_for_a_token():
    x, _, w13, w2 = layer(9)
    assert left(_from_ids, x, *_ids(9, 0), w13, w2) == [r"expert ids of shape [9, 0] cannot be tried out"]
    assert len(left(_from_ids, x, *_ids(9, 1), w13, w2)) == 1  # one expert for a token: nothing is repeated


@pytest.mark.parametrize("is_sorted, alpha", [(False, 1), (True, 2)])
def test_a_bias_of_other_rows_or_twice_stays(is_sorted, alpha):
    def biased(x, router, w13, w2):
        known = {}

        def order_of(ids):
            order, offsets = stock.sorted_slots(ids)
            known["experts"] = ids.reshape(-1)[order] if is_sorted else ids.reshape(-1)
            return order, offsets

        def gate(gate_up, rows):
            return swiglu(torch.add(gate_up, w13[:, 0][known["experts"]], alpha=alpha))

        return grouped_with(order=order_of, gate=gate)(x, router, w13, w2)

    assert left(biased, *layer(9)) == ["the gate also reads aten.index.Tensor"]


NO_SUMS = {
    "index_add to other tokens": lambda into, tokens, out: into.index_add(0, (tokens + 1) % 9, out),
    "index_add of twice": lambda into, tokens, out: into.index_add(0, tokens, out, alpha=2),
    "index_put of the last": lambda into, tokens, out: into.index_put((tokens,), out),
    "scatter_add to other tokens": lambda into, tokens, out: into.scatter_add(
        0, ((tokens + 1) % 9)[:, None].expand(-1, HIDDEN), out
    ),
}


@pytest.mark.parametrize("what", NO_SUMS)
def test_a_sum_that_is_none_stays(what):
    def finish(out, inverse, x, order):
        return NO_SUMS[what](torch.zeros_like(x), order // TOP_K, out.to(x.dtype))

    (reason,) = left(grouped_with(finish=finish), *layer(9))
    assert "reads what experts give, not a weighted sum" in reason


def test_nothing_that_looks_like_a_layer_is_not_mentioned():
    def products(x, y):
        return torch.bmm(x, y).softmax(-1)

    assert left(products, torch.randn(4, 5, 6), torch.randn(4, 6, 7)) == []


def test_a_layer_that_stays_compiles_to_the_same_code():
    function, args = grouped_with(**OTHERS["weighed twice"][0]), layer(9)
    with torch.no_grad():
        (ours,) = codes_of(partial(torch.compile(function, options=inductor_passes.options()), *args))
        torch._dynamo.reset()
        (plain,) = codes_of(partial(torch.compile(function), *args))
    assert _body(ours) == _body(plain)


def _body(code):
    return [line for line in code.splitlines() if line and not line.lstrip().startswith("#")]


def test_a_training_graph_stays_and_says_so():
    args = [tensor.requires_grad_() for tensor in layer(9)]
    forward, *_ = post_grad(stock.batched, *args)
    before = show(forward.graph)
    log = inductor_passes.pipeline.run_passes(forward.graph, RAISES)
    assert show(forward.graph) == before
    assert [each.reason for each in log.refused] == [inductor_passes.pipeline.TRAINING_REASON]
