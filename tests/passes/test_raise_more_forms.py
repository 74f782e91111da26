"""RaiseExperts: more ways to write what lies around the products, each next to one that only looks like it."""

import pytest
import torch
from torch.nn import functional as F

import moe_ops
from inductor_passes.pipeline import FUSIONS, RAISES
from inductor_passes.raising import RaiseExperts, indices
from tests.helpers import mixed
from tests.passes.at_once import AT_ONCE, routed
from tests.passes.capture import computed, rewrite
from tests.passes.stock import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    gathered_with,
    grouped_with,
    layer,
    softmax_router,
    sorted_slots,
    swiglu,
)
from tests.passes.strangers import dense

TOKENS = 11


def counted(counts):
    """Slots sorted by expert, the slots of each expert counted in another way."""
    return {"order": lambda ids: (ids.flatten().argsort(), counts(ids.flatten()).cumsum(0).int())}


def repeated(x, order):
    return x.repeat_interleave(TOP_K, 0)[order]


def scattered(out, inverse, x, order):
    """Rows go to their slots, and are added up there."""
    index = order.unsqueeze(-1).expand_as(out)
    return torch.zeros_like(out).scatter(0, index, out).view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)


def reduced(how):
    def finish(out, inverse, x, order):
        index = (order // TOP_K).unsqueeze(-1).expand_as(out)
        return torch.zeros(x.shape[0], HIDDEN).scatter_reduce(0, index, out, how).to(x.dtype)

    return {"finish": finish}


def weighed_inside(x, router, w13, w2, *bias):
    """Megatron's: weights on what goes into the second product, in float32."""
    weights, ids = softmax_router(F.linear(x, router))
    order, offsets = sorted_slots(ids)
    hidden = swiglu(torch._grouped_mm(x[order // TOP_K], w13.mT, offsets))
    hidden = (hidden * weights.reshape(-1)[order].unsqueeze(-1)).to(x.dtype)
    out = torch._grouped_mm(hidden, w2.mT, offsets)
    out = out + bias[0][ids.flatten()[order]] if bias else out
    return torch.zeros_like(x).index_add(0, order // TOP_K, out)


def weighed_inside_in_float32(x, router, w13, w2):
    """Its gate in float32, too."""
    weights, ids = softmax_router(F.linear(x, router))
    order, offsets = sorted_slots(ids)
    gate, up = torch._grouped_mm(x[order // TOP_K], w13.mT, offsets).float().chunk(2, -1)
    hidden = torch.tanh(gate) * up * weights.reshape(-1)[order].unsqueeze(-1)
    out = torch._grouped_mm(hidden.to(x.dtype), w2.mT, offsets)
    return torch.zeros_like(x).index_add(0, order // TOP_K, out)


def of_masks(x, router, w13, w2):
    """A mask [T, K, E] that each token's weights are put in."""
    weights, ids = softmax_router(F.linear(x, router))
    return dense(x, (F.one_hot(ids, EXPERTS) * weights.unsqueeze(-1)).sum(1).to(x.dtype), w13, w2)


def of_mask_products(x, router, w13, w2):
    weights, ids = softmax_router(F.linear(x, router))
    masks = F.one_hot(ids, EXPERTS).to(x.dtype)
    return dense(x, torch.einsum("tke,tk->te", masks, weights.to(x.dtype)), w13, w2)


def rows_of_one(x, router, w13, w2):
    """[S, 1, H] all the way."""
    weights, ids = softmax_router(F.linear(x, router))
    experts = ids.flatten()
    rows = x.repeat_interleave(TOP_K, 0).unsqueeze(1)
    hidden = swiglu(torch.bmm(rows, w13.index_select(0, experts).mT))
    out = torch.bmm(hidden, w2.index_select(0, experts).mT).squeeze(1)
    return (out.view(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


FORMS = {
    "counted by one_hot": grouped_with(**counted(lambda ids: F.one_hot(ids, EXPERTS).sum(0))),
    "counted by comparison": grouped_with(
        **counted(lambda ids: (ids.unsqueeze(0) == torch.arange(EXPERTS).unsqueeze(1)).sum(1))
    ),
    "tokens repeated, then sorted": grouped_with(rows=repeated),
    "scattered to slots": grouped_with(finish=scattered),
    "scatter_reduce": grouped_with(**reduced("sum")),
    "weighed inside": weighed_inside,
    "weighed inside, in float32": weighed_inside_in_float32,
    "masks": of_masks,
    "products with masks": of_mask_products,
    "rows [S, 1, H]": rows_of_one,
    **{name: routed(form) for name, form in AT_ONCE.items()},
    "glu": grouped_with(gate=lambda gate_up, rows: F.glu(gate_up)),
    "glu of columns": gathered_with(activate=lambda gate_up: F.glu(gate_up.squeeze(2), 1).unsqueeze(2)),
}


@pytest.mark.parametrize(("form", "size"), mixed(FORMS, ((TOKENS, False), (1, False), (TOKENS, True))))
def test_forms(form, size):
    tokens, dynamic = size
    inputs = layer(tokens, dynamic=dynamic)
    result, out = computed(FORMS[form], *inputs, passes=(*RAISES, *FUSIONS))
    assert result.ops() in (["fused_moe"], ["fused_moe_formula"]) and not result.reasons
    assert "assert" not in result.after  # that ids are in range
    torch.testing.assert_close(out, FORMS[form](*inputs), rtol=0.03, atol=0.03)


def of_numbers_by_choice(x, router, w13, w2):
    """Weights that are those of no token."""
    _, ids = softmax_router(F.linear(x, router))
    kept = torch.where(ids >= 0, torch.linspace(0.5, 1, TOP_K).to(x.dtype), 0.0)
    return dense(x, x.new_zeros(len(x), EXPERTS).scatter(1, ids, kept), w13, w2)


def test_weights_that_no_router_gives():
    inputs = layer(TOKENS)
    result, out = computed(of_numbers_by_choice, *inputs, passes=(*RAISES, *FUSIONS))
    assert result.ops() == ["fused_experts"]
    torch.testing.assert_close(out, of_numbers_by_choice(*inputs), rtol=0.03, atol=0.03)


def of_other_rows(x, router, w13, w2, others):
    """A row for each slot that is not its token's."""
    return grouped_with(rows=lambda x, order: others[order])(x, router, w13, w2)


def of_two_orders(x, router, w13, w2):
    """What gate and up rows are multiplied with lies in two orders."""
    weights, ids = softmax_router(F.linear(x, router))
    order, offsets = sorted_slots(ids)
    (w1, w3), rows = w13.chunk(2, 1), x.repeat_interleave(TOP_K, 0)
    gate = torch._grouped_mm(rows[order.flip(0)], w1.mT.contiguous(), offsets)
    up = torch._grouped_mm(rows[order], w3.mT.contiguous(), offsets)
    out = torch._grouped_mm(F.silu(gate) * up, w2.mT, offsets) * weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // TOP_K, out.to(x.dtype))


def of_numbers_outside(x, router, w13, w2):
    """Weights that are not put in one place: those of the first expert are another's, too."""
    weights, ids = softmax_router(F.linear(x, router))
    masks = F.one_hot(ids, EXPERTS) + F.one_hot((ids[:, :1] + 1) % EXPERTS, EXPERTS)
    return dense(x, (masks * weights.unsqueeze(-1)).sum(1).to(x.dtype), w13, w2)


def put_to_rows(out, inverse, x, order):
    return torch.zeros_like(out).index_put((inverse,), out).view(len(x), TOP_K, -1).sum(1).to(x.dtype)


OTHERS = {
    "put to rows": (grouped_with(finish=put_to_rows), None, "aten.index_put reads"),
    "rows of something else": (
        of_other_rows,
        torch.ones(TOKENS * TOP_K, HIDDEN, dtype=torch.bfloat16),
        "not from the tokens of their slots",
    ),
    "rows in two orders": (of_two_orders, None, "not from the tokens of their slots"),
    "a bias is not weighed": (
        weighed_inside,
        torch.ones(EXPERTS, HIDDEN, dtype=torch.bfloat16),
        "the gate also reads",
    ),
    "tokens repeated in turns": (
        grouped_with(rows=lambda x, order: x.repeat(TOP_K, 1)[order]),
        None,
        "rows come from aten.repeat",
    ),
    "scattered to rows": (
        grouped_with(finish=lambda out, inverse, x, order: scattered(out, inverse, x, inverse)),
        None,
        "aten.scatter.src reads what experts give",
    ),
    "the largest of a token": (grouped_with(**reduced("amax")), None, "aten.scatter_reduce.two reads"),
    "a mask of its own": (of_numbers_outside, None, "is not the sum of what experts give"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_something_else_stays(what):
    function, more, reason = OTHERS[what]
    inputs = layer(TOKENS) if more is None else (*layer(TOKENS), more)
    result = rewrite(function, *inputs, passes=(RaiseExperts(),))
    assert result.after == result.before and reason in " ".join(result.reasons)


def test_what_may_fail_is_still_asserted():
    """Of ids, that an expert is not among them; of logits, whatever it is."""
    inputs = layer(2)
    unchosen = next(iter({*range(EXPERTS)} - {*softmax_router(F.linear(*inputs[:2]))[1].flatten().tolist()}))

    def run(x, router, w13, w2):
        logits = F.linear(x, router)
        weights, ids = softmax_router(logits)
        torch._assert_async((ids != unchosen).all(), "expert")
        torch._assert_async((logits < 1e4).all(), "logit")
        torch._assert_async((ids < EXPERTS).all(), "always")
        rows = torch.einsum("th,tkih->tki", x, w13[ids])
        return torch.einsum("tki,tkhi,tk->th", swiglu(rows), w2[ids], weights.to(x.dtype))

    result = rewrite(run, *inputs, passes=RAISES)
    assert (
        len(result.log.raised) == 2 and result.after.count("_assert_async") == 2 and "always" in result.before
    )


def test_ids_that_are_too_many_to_be_tried_out(monkeypatch):
    """A layer of ours behind a router of somebody else, whose ids are asserted on: both are as they would be."""
    monkeypatch.setattr(indices, "_MOST_SLOTS", 8)

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        torch._assert_async((ids < EXPERTS).all(), "always")
        return moe_ops.fused_experts(x, w13, w2, weights, ids)

    result = rewrite(run, *layer(TOKENS), passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["topk_routing"]
    assert result.after.count("_assert_async") == 1 and result.after.count("topk.default") == 0


def test_rows_of_one_with_weights_of_a_row():
    """Rows [S, H] that are gathered, not repeated."""
    function = gathered_with(rows=lambda x, weights: x[torch.arange(x.shape[0] * TOP_K) // TOP_K])
    inputs = layer(TOKENS)
    result, out = computed(function, *inputs, passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    torch.testing.assert_close(out, function(*inputs), rtol=0.03, atol=0.03)


def test_glu_of_no_layer_stays_glu():
    def glu(x, router, w13, w2):
        return F.linear(F.glu(F.linear(x, w13[0]), -1), w2[0]) + F.glu(x, 1).sum()

    result = rewrite(glu, *layer(5), passes=(RaiseExperts(),))
    assert result.before.count("aten.glu") == 2
    assert result.after == result.before
