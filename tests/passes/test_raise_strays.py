"""Ids out of range: our operators leave their slots out, so a layer that may have any must do so too."""

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from inductor_passes.pipeline import RAISES
from tests.helpers import relative_error
from tests.passes import stock
from tests.passes.capture import computed
from tests.passes.stock import HIDDEN, TOP_K, swiglu
from tests.passes.strangers import dense
from tests.passes.test_raise_ids_twice import best, best_of_heads, best_sorted

TOKENS, EXPERTS, FEWER = 9, 13, 10
"""Fewer experts than logits: ids of those between are out of range."""
IDS = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % EXPERTS


def gathered(x, weights, ids, w13, w2, index=lambda ids: ids, out_of=lambda out, ids, rows: out):
    """The layer of `stock.batched`, whose weights are read at `index(ids)`."""
    rows, experts = x.unsqueeze(1).expand(-1, TOP_K, -1).reshape(-1, HIDDEN), index(ids.reshape(-1))
    activated = swiglu(torch.bmm(w13[experts], rows.unsqueeze(-1)).squeeze(-1))
    out = out_of(torch.bmm(w2[experts], activated.unsqueeze(-1)).squeeze(-1), ids.reshape(-1), rows)
    return (out * weights.reshape(-1, 1)).view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)


def grouped(x, weights, ids, w13, w2, index=lambda ids: ids, out_of=lambda out, ids, rows: out):
    """The layer of `stock.grouped`, which counts the rows of `index(ids)`."""
    sorted_ids, order = ids.reshape(-1).sort()
    number = w13.shape[0]
    counts = torch.histc(index(sorted_ids).float(), bins=number, min=0, max=number - 1)
    offsets, rows = counts.cumsum(0, dtype=torch.int32), x[order // TOP_K]
    activated = swiglu(torch._grouped_mm(rows, w13.mT, offsets))
    out = out_of(torch._grouped_mm(activated, w2.mT, offsets), sorted_ids, rows)
    out = out * weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // TOP_K, out.to(x.dtype))


def sorted_gathered(x, weights, ids, w13, w2, index=lambda ids: ids, out_of=lambda out, ids, rows: out):
    """As `gathered`, with rows in the order of experts."""
    sorted_ids, order = ids.reshape(-1).sort()
    experts, rows = index(sorted_ids), x[order // TOP_K]
    activated = swiglu(torch.bmm(w13[experts], rows.unsqueeze(-1)).squeeze(-1))
    out = out_of(torch.bmm(w2[experts], activated.unsqueeze(-1)).squeeze(-1), sorted_ids, rows)
    out = out * weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // TOP_K, out.to(x.dtype))


def exactly(x, weights, experts, w13, w2):
    """The sum over slots in float64; those of no expert, -1, are left out."""
    x, weights, w13, w2 = (each.double() for each in (x, weights, w13, w2))
    total = torch.zeros_like(x)
    for expert in range(len(w13)):
        weight = (weights * (experts == expert)).sum(-1, keepdim=True)
        total += swiglu(x @ w13[expert].T) @ w2[expert].T * weight
    return total


def float32(tokens=TOKENS):
    return stock.layer(tokens, torch.float32, experts=EXPERTS)


def from_ids(ids: Tensor, dtype=torch.float32):
    x, _, w13, w2 = stock.layer(TOKENS, dtype, experts=EXPERTS)
    weights = torch.rand(TOKENS, TOP_K, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, weights, ids, w13[:FEWER].contiguous(), w2[:FEWER].contiguous()


def run_on(function, *inputs):
    return computed(function, *inputs, passes=RAISES)


def with_parts(combine, **parts):
    return lambda *inputs: combine(*inputs, **parts)


@pytest.mark.parametrize("combine", [gathered, sorted_gathered])
@pytest.mark.parametrize("ids", [IDS % FEWER, IDS % FEWER - FEWER], ids=["in range", "below zero"])
def test_ids_from_outside_read_weights_as_python_does(ids, combine):
    x, weights, ids, w13, w2 = from_ids(ids)
    result, out = run_on(combine, x, weights, ids, w13, w2)
    torch.testing.assert_close(out.double(), exactly(x, weights, ids % FEWER, w13, w2), rtol=1e-4, atol=1e-4)
    assert not result.log.raised
    (reason,) = result.reasons
    assert re.fullmatch(r"expert ids may be out of range, and -\d+ is read as \d", reason)


KNOWN = {
    "of a top-k": lambda x, router, ids: best(x, router[:FEWER])[1],
    "in int32": lambda x, router, ids: best(x, router[:FEWER])[1].int(),
    "of a sort": lambda x, router, ids: best_sorted(x, router[:FEWER])[1][:, :TOP_K],
    "of maxima": lambda x, router, ids: best_of_heads(x, router[:FEWER])[1],
    "along a dimension": lambda x, router, ids: F.linear(x, router[:FEWER]).T.topk(TOP_K, 0)[1].T,
    "of a group and within it": lambda x, router, ids: (
        F.linear(x, router[:2]).argmax(-1, keepdim=True) * 5 + F.linear(x, router[:5]).topk(TOP_K)[1]
    ),
    "within bounds": lambda x, router, ids: ids.clamp(0, FEWER - 1),
    "by a remainder": lambda x, router, ids: ids % FEWER,
    "where a number decides": lambda x, router, ids: torch.where(x[:, :1] > 0, best(x, router[:FEWER])[1], 3),
}
NOT_KNOWN = {
    "below zero": lambda x, router, ids: ids.clamp(max=FEWER - 1),
    "of more logits, less something": lambda x, router, ids: best(x, router)[1] - 3,
    "out of a table": lambda x, router, ids: ids[ids % TOKENS].flatten(0, 1)[:TOKENS],
    "of weights": lambda x, router, ids: (F.linear(x, router).topk(TOP_K)[0] * 4).long().clamp(-3, FEWER - 1),
    "of other numbers": lambda x, router, ids: (x[:, :TOP_K] * 4).long().clamp(-FEWER, FEWER - 1),
    "along the first dimension": lambda x, router, ids: FEWER - 1 - F.linear(x, router).T.topk(TOP_K, 0)[1].T,
    "out of a table by what is no place in it": lambda x, router, ids: ids[ids[:, 0]],
    "where a number decides, below zero": lambda x, router, ids: torch.where(
        x[:, :1] > 0, best(x, router[:FEWER])[1], -1
    ),
    "of the tokens": lambda x, router, ids: F.linear(x, router)[:, :TOP_K].topk(TOKENS, 0)[1] - 1,
}


def from_router(ids_of):
    def run(x, router, ids, w13, w2):
        ids = ids_of(x, router, ids)
        weights = torch.linspace(0.1, 1, TOKENS * TOP_K).view(TOKENS, TOP_K).to(x.dtype)
        return gathered(x, weights, ids, w13, w2), ids, weights

    return run


def test_ids_from_outside_that_are_too_large_stay():
    """Read as the last expert's."""

    def run(x, weights, ids, w13, w2):
        return gathered(x, weights, ids.clamp(min=0), w13, w2, index=_last)

    inputs = from_ids(IDS)
    result, out = run_on(run, *inputs)
    assert re.fullmatch(r"expert ids may be out of range, and 1\d is read as 9", result.reasons[0])
    torch.testing.assert_close(out, run(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [*KNOWN, *NOT_KNOWN])
def test_what_is_known_of_ids(how):
    ids_of, ids = {**KNOWN, **NOT_KNOWN}[how], IDS - EXPERTS // 2
    x, router, w13, w2 = float32()
    w13, w2 = w13[:FEWER].contiguous(), w2[:FEWER].contiguous()
    result, (out, ids, weights) = run_on(from_router(ids_of), x, router, ids, w13, w2)
    assert bool(result.log.raised) == (how in KNOWN)
    torch.testing.assert_close(out.double(), exactly(x, weights, ids % FEWER, w13, w2), rtol=1e-4, atol=1e-4)


def one_token(ids_of, columns):
    """A layer of one token that chooses among the columns of so many copies of it."""

    def run(x, w13, w2):
        scores, ids = x.repeat(1, columns // HIDDEN).topk(TOP_K)
        return gathered(x, scores, ids_of(ids), w13, w2)

    x, _, w13, w2 = float32(1)
    return run, (x, w13[:FEWER].contiguous(), w2[:FEWER].contiguous())


ONE_OF_MANY = {
    "never": (lambda ids: ids % FEWER, 1024, None),
    "once": (lambda ids: torch.where(ids == 1000, -1, ids % FEWER), 1024, "-1 is read as 9"),
    "of more than are tried": (
        lambda ids: ids % FEWER,
        16384,
        "expert ids from output 1 of aten.topk cannot be",
    ),
}


@pytest.mark.parametrize("how", ONE_OF_MANY)
def test_every_id_is_tried(how):
    *layer, reason = ONE_OF_MANY[how]
    function, inputs = one_token(*layer)
    result, out = run_on(function, *inputs)
    assert bool(result.log.raised) == (reason is None)
    assert reason is None or reason in result.reasons[0]
    torch.testing.assert_close(out, function(*inputs), rtol=1e-4, atol=1e-4)


def brought_back(x, weights, ids, w13, w2, index=lambda ids: ids, out_of=lambda out, ids, rows: out):
    """As `grouped`, with rows in the order of slots when they are masked."""
    sorted_ids, order = ids.reshape(-1).sort()
    number = w13.shape[0]
    counts = torch.histc(index(sorted_ids).float(), bins=number, min=0, max=number - 1)
    offsets, rows = counts.cumsum(0, dtype=torch.int32), x[order // TOP_K]
    out = torch._grouped_mm(swiglu(torch._grouped_mm(rows, w13.mT, offsets)), w2.mT, offsets)
    out = out_of(out[order.argsort()], ids.reshape(-1), rows) * weights.reshape(-1, 1)
    return out.view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)


def masked_before(x, weights, ids, w13, w2, **parts):
    """As `gathered`, by weights that are zero for what another rank has, and ids that say so."""
    elsewhere = ids >= FEWER
    return gathered(
        x, weights.masked_fill(elsewhere, 0.0), torch.where(elsewhere, FEWER, ids), w13, w2, **parts
    )


def scattered_over_all(x, weights, ids, w13, w2, index=lambda ids: ids):
    spread = weights.new_zeros(len(x), EXPERTS).scatter_add(1, index(ids), weights)
    return dense(x, spread[:, :FEWER], w13, w2)


def looped(x, weights, ids, w13, w2):
    """Each expert sees all tokens, and what is weighed is those that chose it."""
    total = torch.zeros_like(x)
    for expert in range(FEWER):
        weight = (weights * (ids == expert)).sum(-1, keepdim=True)
        total = total + F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]) * weight
    return total


def looped_over_masked(x, weights, ids, w13, w2):
    """As `looped`; the last expert's rows are also those of ids out of range, by weights that are zero."""
    return looped(x, weights.masked_fill(ids >= FEWER, 0.0), _last(ids), w13, w2)


def looped_over_last(x, weights, ids, w13, w2):
    return looped(x, weights, _last(ids), w13, w2)


def _of_more_logits(combine, **parts):
    """Ids of up to EXPERTS, of which those from FEWER on are out of range."""

    def run(x, router, w13, w2):
        weights, ids = best(x, router)
        return combine(x, weights, ids, w13[:FEWER], w2[:FEWER], **parts)

    return run


def _last(ids):
    return ids.clamp(max=FEWER - 1)


def _zero(out, ids, rows):
    return out.masked_fill((ids >= FEWER).unsqueeze(-1), 0.0)


def _chosen(out, ids, rows):
    return torch.where((ids < FEWER).unsqueeze(-1), out, 0.0)


LEFT_OUT = {
    "no rows": (grouped, {}),
    "rows that are set to zero": (grouped, {"out_of": _zero}),
    "another's, and set to zero": (gathered, {"index": _last, "out_of": _zero}),
    "the last one's, and set to zero": (grouped, {"index": _last, "out_of": _zero}),
    "the last one's, and set to zero as slots": (brought_back, {"index": _last, "out_of": _zero}),
    "another's in rows, and set to zero": (sorted_gathered, {"index": _last, "out_of": _zero}),
    "another's, and not taken": (gathered, {"index": _last, "out_of": _chosen}),
    "another's, and weighed by zero": (masked_before, {"index": _last}),
    "weights of nobody": (scattered_over_all, {}),
    "chosen by nobody in a loop": (looped, {}),
    "the last one's in a loop, weighed by zero": (looped_over_masked, {}),
}
READ = {
    "the last one's in a loop": (looped_over_last, {}, "is not the sum of what experts give"),
    "the last one's": (gathered, {"index": _last}, "is read as 9"),
    "the last one's, in rows": (sorted_gathered, {"index": _last}, "is read as 9"),
    "the first ones'": (gathered, {"index": lambda ids: ids % FEWER}, "is read as"),
    "rows of the last one": (grouped, {"index": _last}, "is read as 9"),
    "weights of the last one": (
        scattered_over_all,
        {"index": _last},
        "is not the sum of what experts give",
    ),
    "the token": (
        gathered,
        {"index": _last, "out_of": lambda out, ids, rows: torch.where(ids.unsqueeze(-1) >= FEWER, rows, out)},
        "stands in for those",
    ),
    "the token, in rows": (
        grouped,
        {"out_of": lambda out, ids, rows: torch.where(ids.unsqueeze(-1) >= FEWER, rows, out)},
        "aten.index.Tensor stands in for those",
    ),
    "zeros for some": (
        gathered,
        {"index": _last, "out_of": lambda out, ids, rows: out.masked_fill((ids > FEWER).unsqueeze(-1), 0.0)},
        f"{FEWER} is read as 9",
    ),
    "zeros for other rows": (
        grouped,
        {
            "index": _last,
            "out_of": lambda out, ids, rows: out.masked_fill((ids.flip(0) >= FEWER).unsqueeze(-1), 0.0),
        },
        "is read as 9",
    ),
}


def in_bfloat16(inputs):
    return [each.bfloat16() for each in inputs]


@pytest.mark.parametrize("how", LEFT_OUT)
def test_ids_out_of_range_that_add_nothing_are_raised(how):
    combine, parts = LEFT_OUT[how]
    x, router, w13, w2 = in_bfloat16(float32())
    result, out = run_on(_of_more_logits(combine, **parts), x, router, w13, w2)
    assert [each.kind for each in result.log.raised] == ["experts"]
    weights, ids = best(x, router)
    expected = exactly(x, weights, ids, w13[:FEWER], w2[:FEWER])
    assert bool((ids >= FEWER).any()) and relative_error(out, expected) < 0.02


@pytest.mark.parametrize("how", READ)
def test_ids_out_of_range_that_add_something_stay(how):
    combine, parts, reason = READ[how]
    function, inputs = _of_more_logits(combine, **parts), in_bfloat16(float32())
    result, out = run_on(function, *inputs)
    assert not result.log.raised and reason in result.reasons[0]
    assert relative_error(out, function(*inputs).double()) < 0.02
