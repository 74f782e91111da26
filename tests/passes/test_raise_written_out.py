"""With `coordinate_descent_tuning` Inductor writes products of a row out on a GPU: layers are raised all the same."""

import pytest
import torch
from torch._inductor import decomposition
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but, usually
from tests.passes.capture import computed, rewrite
from tests.passes.stock import STYLES, TOP_K, layer, oracle, softmax_router, swiglu
from tests.passes.test_raise_padded import WRITTEN as PADDED

aten = torch.ops.aten


def _mm(left, right):
    is_for = left.shape[0] == 1 or right.shape[1] == 1
    return (left.unsqueeze(2) * right.unsqueeze(0)).sum(dim=1) if is_for else NotImplemented


def _bmm(left, right):
    is_for = left.shape[1] == 1 or right.shape[2] == 1
    return (left.unsqueeze(-1) * right.unsqueeze(1)).sum(dim=2) if is_for else NotImplemented


@pytest.fixture(autouse=True)
def written_out(monkeypatch):
    """As there, here: Inductor's own asks for the device. It keeps its table."""
    decomposition.fast_random_decomps.cache_clear()
    products = ((aten.mm.default, _mm), (aten.bmm.default, _bmm))
    table = {target: decomposition.pw_cast_for_opmath(function) for target, function in products}
    with monkeypatch.context() as patch:
        for target, function in table.items():
            patch.setitem(decomposition.decompositions, target, function)
        yield
    decomposition.fast_random_decomps.cache_clear()


@pytest.mark.parametrize(("style", "sizes"), mixed_but((3, True), STYLES, [(1, False), (3, False)]), ids=str)
def test_every_style_is_raised(style, sizes):
    tokens, dynamic = sizes
    inputs = layer(tokens, dynamic=dynamic)
    result, out = computed(STYLES[style], *inputs, passes=(*RAISES, *FUSIONS))
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert_matches_oracle(out, oracle(inputs, STYLES[style]))


WRITTEN = {name: run for name, run in PADDED.items() if "LoRA" not in name}


# The others are padded, in `test_raise_padded.py`.
@pytest.mark.parametrize(
    "form", usually(WRITTEN, [*set([*PADDED][1::2]) - {"a loop over choices and experts, with masks"}])
)
def test_every_form_of_one_token_is_raised(form):
    inputs = layer(1)
    result, out = computed(WRITTEN[form], *inputs, passes=(*RAISES, *FUSIONS))
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert {*result.reasons} <= {
        "topk_ids come from aten.where.self, not from topk_routing"
    }  # of who is dropped
    assert {each.layer for each in result.log.raised} == {"moe_0"}
    assert all(node.users for node in result.graph.nodes if node.target is aten.unsqueeze.default)
    torch.testing.assert_close(out, WRITTEN[form](*inputs), rtol=0.03, atol=0.03)


def beside(x, router, w13, w2):
    """Products of one row, of another layer."""
    return F.linear(swiglu(F.linear(x, w13[0])), w2[0]), F.linear(x.float(), w13[1].float())


def both(x, router, w13, w2):
    return STYLES["batched"](x, router, w13, w2), beside(x, router, w13, w2)


def test_only_a_layer_is_seen_so():
    inputs = layer(1)
    before = rewrite(beside, *inputs, passes=RAISES)
    assert before.after == before.before and before.after.count("aten.sum.dim_IntList") == 3
    result, out = computed(both, *inputs, passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert "aten.mm" not in result.after and result.after.count("aten.sum.dim_IntList") == 3 + 1  # a router's
    torch.testing.assert_close(out, both(*inputs), rtol=0.03, atol=0.03)


def gathered(product):
    """The style of gpt-fast, its first product one's own: `product(rows [S, 1, A], weights [S, A, B])`."""

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        rows = x.repeat_interleave(TOP_K, 0).unsqueeze(1)
        hidden = swiglu(product(rows, w13[ids.flatten()].mT)).to(w2.dtype)
        out = torch.bmm(hidden, w2[ids.flatten()].mT).squeeze(1)
        return (out.view(-1, TOP_K, out.shape[1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    return run


def _of_floats(rows, weights):
    return (rows.float().unsqueeze(-1) * weights.float().unsqueeze(1)).sum(2)


_DROPS_ROUNDING = torch.__version__ < "2.12"  # of what the second product reads, when it is written out

OTHERS = {
    "as Inductor does": (lambda rows, weights: _of_floats(rows, weights).to(rows.dtype), True),
    "not rounded": (_of_floats, not _DROPS_ROUNDING),
    "rounded twice": (lambda rows, weights: _of_floats(rows, weights).half().to(rows.dtype), True),
    "over columns": (lambda rows, weights: (rows.unsqueeze(-1) * weights.unsqueeze(1)).sum(3), False),
    "over everything": (
        lambda rows, weights: (rows.unsqueeze(-1) * weights.unsqueeze(1)).sum() * (rows @ weights),
        False,
    ),
    "kept dimensions": (
        lambda rows, weights: (rows.unsqueeze(-1) * weights.unsqueeze(1)).sum(2, keepdim=True).squeeze(2),
        False,
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_sums_that_are_products_and_others(what):
    product, is_raised = OTHERS[what]
    inputs = layer(5)
    result, out = computed(gathered(product), *inputs, passes=RAISES)
    assert bool(result.log.raised) == is_raised
    torch.testing.assert_close(out, gathered(product)(*inputs), rtol=0.03, atol=0.03)


def test_a_gate_that_reads_a_sum_twice():
    """In float32 nothing rounds a sum, and silu reads it twice."""

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        experts, rows = ids.flatten(), x.repeat_interleave(TOP_K, 0).unsqueeze(1)
        w1, w3 = (each.contiguous() for each in w13.chunk(2, 1))
        hidden = F.silu(torch.bmm(rows, w1[experts].mT)) * torch.bmm(rows, w3[experts].mT)
        out = torch.bmm(hidden, w2[experts].mT).squeeze(1)
        return (out.view(-1, TOP_K, out.shape[1]) * weights.unsqueeze(-1)).sum(1)

    inputs = layer(3, torch.float32)
    result, out = computed(run, *inputs, passes=(*RAISES, *FUSIONS))
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    torch.testing.assert_close(out, run(*inputs), rtol=1e-4, atol=1e-4)


def test_factors_of_two_dtypes_are_no_product():
    (x, router, *_), (_, _, *experts) = layer(5, torch.float32), layer(5)
    result = rewrite(gathered(_of_floats), x, router, *experts, passes=RAISES)
    assert not result.log.raised and result.after == result.before
