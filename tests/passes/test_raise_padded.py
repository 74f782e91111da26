"""On a GPU Inductor pads products of odd sizes, where it finds that faster: layers are raised all the same."""

import pytest
import torch
from torch._inductor.fx_passes import pad_mm

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, usually
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import STYLES, layer, oracle


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
