"""RaiseExperts where what experts give is added up as it is: weighed before, of a top-1 perhaps, or not at all."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed
from tests.passes.capture import computed, rewrite
from tests.passes.spellings import of_best, of_one
from tests.passes.stock import HIDDEN, TOP_K, layer, sorted_slots, swiglu
from tests.passes.test_raise_forms_in_training import trained

PIPELINE = (*RAISES, *FUSIONS)
SIZES = ((7, torch.float32, False), (1, torch.bfloat16, False), (9, torch.bfloat16, True))


def gathered(x, ids, w13, w2):
    """[..., H], of rows [..., H] and ids [...]."""
    hidden = swiglu(torch.einsum("...h,...ih->...i", x, w13[ids]))
    return torch.einsum("...i,...hi->...h", hidden, w2[ids])


def sorted_rows(x, ids, w13, w2):
    """Of a top-1, in the order of slots."""
    order, offsets = sorted_slots(ids)
    out = torch._grouped_mm(swiglu(torch._grouped_mm(x[order], w13.mT, offsets)), w2.mT, offsets)
    return torch.empty_like(out).index_put((order,), out)


def weighed(experts):
    """Switch, with the weight on what goes into the expert."""

    def run(x, router, w13, w2):
        weights, ids = F.linear(x, router).float().softmax(-1).max(-1)
        return experts((x * weights.unsqueeze(-1)).to(x.dtype), ids, w13, w2).to(x.dtype)

    return run


def by_batches(x, ids, w13, w2):
    return torch.bmm(swiglu(torch.bmm(x.unsqueeze(1), w13[ids].mT)), w2[ids].mT).squeeze(1)


OF_ONE = {
    "weighed tokens": weighed(gathered),
    "weighed tokens, in batches": weighed(by_batches),
    "weighed tokens, sorted": weighed(sorted_rows),
}
NOT_WEIGHED = {
    "a top-1": of_one(lambda x, probs, ids, w13, w2: gathered(x, ids, w13, w2)),
    "a sum": of_best(
        lambda x, w, ids, w13, w2: gathered(x[:, None].expand(-1, TOP_K, -1), ids, w13, w2).sum(1)
    ),
}


@pytest.mark.parametrize(("what", "sizes"), mixed(OF_ONE, SIZES), ids=str)
def test_a_top1_of_weighed_tokens(what, sizes):
    if "sorted" in what and sizes[1] is torch.float32:
        pytest.skip("_grouped_mm takes bfloat16")
    inputs = layer(*sizes)
    result, out = computed(OF_ONE[what], *inputs, passes=PIPELINE)
    assert result.ops() == ["topk_routing", "fused_experts"]
    assert_matches_oracle(out, weighed(gathered)(*(each.double() for each in inputs)))


@pytest.mark.parametrize(("what", "sizes"), mixed(NOT_WEIGHED, SIZES), ids=str)
def test_without_weights(what, sizes):
    inputs = layer(*sizes)
    result, out = computed(NOT_WEIGHED[what], *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts"] and result.ops() == ["fused_experts"]
    assert_matches_oracle(out, NOT_WEIGHED[what](*(each.double() for each in inputs)))


def test_gradients():
    trained(OF_ONE["weighed tokens"])


def of_choices(last):
    def combine(x, weights, ids, w13, w2):
        return last(gathered(x[:, None].expand(-1, TOP_K, -1), ids, w13, w2))

    return of_best(combine)


OTHER = {
    "a mean": lambda out: out.mean(1),
    "one of them": lambda out: out[:, 0],
    "a sum over tokens": lambda out: out.sum(0),
    "the largest": lambda out: out.amax(1),
    "less one of them": lambda out: out.sum(1) - out[:, 0],
}


@pytest.mark.parametrize("what", OTHER)
def test_what_is_no_sum_stays(what):
    function, inputs = of_choices(OTHER[what]), layer(TOP_K, torch.float32)
    result = rewrite(function, *inputs, passes=PIPELINE)
    assert not result.log.raised and result.after == result.before and result.reasons


def with_ids(ids_of):
    """Of a token's own number: a table that nobody learns."""

    def run(x, router, w13, w2):
        return gathered(x, ids_of((x[:, 0] * 8).long()).view(-1, 1)[:, 0], w13, w2)

    return run


def test_ids_of_which_some_may_be_out_of_range_stay():
    result = rewrite(with_ids(lambda ids: ids), *layer(7, torch.float32), passes=PIPELINE)
    assert not result.log.raised


def in_expert_order(
    pick=lambda order: order // TOP_K, back=lambda order: order, experts_of=lambda experts: experts
):
    """Rows in the order of experts, each with weights gathered for it, as ScatterMoE's reference has them."""

    def combine(x, weights, ids, w13, w2):
        experts, order = ids.flatten().sort(stable=True)
        out = gathered(x[pick(order)], experts_of(experts), w13, w2)
        out = torch.zeros_like(out).index_put((back(order),), out)
        return (out.view(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(1)

    return of_best(combine)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gathered_in_the_order_of_experts(sizes):
    inputs = layer(*sizes)
    result, out = computed(in_expert_order(), *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, in_expert_order()(*(each.double() for each in inputs)))


def test_gradients_of_rows_in_the_order_of_experts():
    trained(in_expert_order())


OTHER_ROWS = {
    "tokens": ({"pick": lambda order: order.flip(0) // TOP_K}, "is not the expert of each slot"),
    "slots": ({"back": lambda order: order.flip(0)}, "reads what experts give"),
    "experts": ({"experts_of": lambda experts: experts.flip(0)}, "is not the expert of each slot"),
}


@pytest.mark.parametrize("what", OTHER_ROWS)
def test_gathered_rows_of_others_stay(what):
    parts, reason = OTHER_ROWS[what]
    result = rewrite(in_expert_order(**parts), *layer(7, torch.float32), passes=PIPELINE)
    assert not result.log.raised and result.after == result.before
    assert any(reason in each for each in result.reasons), result.reasons
