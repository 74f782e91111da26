"""On a GPU Inductor pads products of odd sizes, where it finds that faster: layers are raised all the same."""

from collections import Counter

import pytest
import torch
from torch._inductor.fx_passes import pad_mm
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, usually
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import STYLES, layer, oracle, softmax_router
from tests.passes.strangers import BOTH, STRANGERS, dense, of_weights
from tests.passes.test_raise_more_forms import FORMS


@pytest.fixture(autouse=True)
def padding(monkeypatch):
    """Every product is padded that can be, here as there."""
    monkeypatch.setattr(pad_mm, "check_device", lambda *operands: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    with torch._inductor.config.patch(force_shape_pad=True):
        yield


OFTEN = [("unsorted", False), ("looped", False), ("grouped", False), ("einsums", True)]


@pytest.mark.parametrize(
    ("style", "dynamic"), usually([(style, dynamic) for style in STYLES for dynamic in (False, True)], OFTEN)
)
def test_every_style_is_raised(style, dynamic):
    inputs = layer(33, dynamic=dynamic)
    result, out = computed(STYLES[style], *inputs, passes=(*RAISES, *FUSIONS))
    assert "constant_pad_nd" in result.before
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert_matches_oracle(out, oracle(inputs, STYLES[style]))


WRITTEN = FORMS | {name: stranger.run for name, stranger in STRANGERS.items() if stranger.raised == BOTH}


# The others are written out, in `test_raise_written_out.py`.
@pytest.mark.parametrize("form", usually(WRITTEN, [*WRITTEN][::2]))
def test_every_form_is_raised(form):
    inputs = layer(11)
    result, out = computed(WRITTEN[form], *inputs, passes=(*RAISES, *FUSIONS))
    assert "constant_pad_nd" in result.before
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert all(
        node.users for node in result.graph.nodes if node.target is torch.ops.aten.constant_pad_nd.default
    )
    torch.testing.assert_close(out, WRITTEN[form](*inputs), rtol=0.03, atol=0.03)


def test_rows_and_columns_are_padded():
    x, router, w13, w2 = layer(11)
    inputs = x, router, w13[:, :54].clone(), w2[:, :, :27].clone()
    result, out = computed(FORMS["masks"], *inputs, passes=(*RAISES, *FUSIONS))
    assert result.ops() == ["fused_moe"]
    torch.testing.assert_close(out, FORMS["masks"](*inputs), rtol=0.03, atol=0.03)


def test_products_of_products():
    """Where nothing stands between two padded products, the second reads what the first one is cut to."""

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        full = torch.zeros(x.shape[0], stock.EXPERTS).scatter(1, ids, weights).to(x.dtype)
        hidden = torch.bmm(x.expand(stock.EXPERTS, -1, -1), w13.mT)
        return (torch.bmm(hidden, w2.mT) * full.T.unsqueeze(-1)).sum(0)

    x, router, w13, w2 = layer(11)
    inputs = x, router, w13[:, :27].clone(), w2[:, :, :27].clone()
    result, out = computed(run, *inputs, passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    torch.testing.assert_close(out, run(*inputs), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dynamic", [False, True])
def test_only_a_layer_loses_its_padding(dynamic):
    """Products of logits, beside the layer, of a layer that stays, with a bias and in batches: as they were."""

    def beside(x, router, w13, w2):
        hidden = F.linear(F.linear(x, w13[0, :27], w13[1, :27, 0]), w13[2, :5, :27])
        hidden = hidden.unsqueeze(0) @ w2[:3, :5].contiguous()
        return hidden, torch.baddbmm(w2[:3, :1, :7], hidden, w2[:3, :32, :7].contiguous())

    def both(x, router, w13, w2):
        stays = F.linear(x, router).softmax(-1)
        return of_weights(dense)(x, router, w13, w2), dense(x, stays, w13, w2), beside(x, router, w13, w2)

    def alone(x, router, w13, w2):
        stays = F.linear(x, router).softmax(-1)
        return softmax_router(F.linear(x, router)), dense(x, stays, w13, w2), beside(x, router, w13, w2)

    inputs = layer(11, dynamic=dynamic)
    result, out = computed(both, *inputs, passes=RAISES)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    left = rewrite(alone, *inputs, passes=())
    assert (
        Counter(_padded_by(result.graph)) == Counter(_padded_by(left.graph)) and left.after.count("pad") > 6
    )
    torch.testing.assert_close(out, both(*inputs), rtol=0.03, atol=0.03)


def _padded_by(graph):
    """Shapes of what is padded, and of the products that read it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default):
        for user in node.users:
            yield (
                tuple(map(str, node.args[0].meta["val"].shape)),
                str(user.target),
                str(user.meta["val"].shape),
            )


@pytest.mark.parametrize("name", [name for name, each in STRANGERS.items() if not each.raised])
def test_a_layer_that_stays_is_as_it_was(name):
    result = rewrite(STRANGERS[name].run, *layer(11), passes=RAISES)
    assert not result.log.raised and result.after == result.before


def _summed_with(pad_weights, pad_rows):
    """`stock.unsorted`, whose last product is padded by hand."""

    def run(x, router, w13, w2):
        weights, ids = stock.softmax_router(torch.nn.functional.linear(x, router))
        order, offsets = stock.sorted_slots(ids)
        hidden = stock.swiglu(torch._grouped_mm(x[order // stock.TOP_K], w13.mT, offsets))
        out = torch._grouped_mm(hidden, w2.mT, offsets)
        slots = torch.zeros_like(out)
        slots[order] = out
        rows = pad_rows(slots.view(-1, stock.TOP_K, stock.HIDDEN).float())
        return torch.bmm(pad_weights(weights.reshape(-1, 1, stock.TOP_K)), rows).squeeze(1).to(x.dtype)

    return run


def _padded(*padding, value=0.0):
    return lambda tensor: torch.nn.functional.pad(tensor, padding, value=value)


OTHER = {
    "in front": (_padded(1, 0), _padded(0, 0, 0, 1)),
    "with something else": (_padded(0, 1, value=1.0), _padded(0, 0, 0, 1, value=1.0)),
    "more columns": (_padded(0, 1), _padded(0, 1, 0, 1)),
}


@pytest.mark.parametrize("what", OTHER)
def test_other_padding_stays(what):
    result = rewrite(_summed_with(*OTHER[what]), *layer(8), passes=RAISES)
    assert not result.log.raised and "reads what experts give, not a weighted sum" in result.reasons[0]
