"""Gate and up weights that are two tensors: neither is copied, each has a product of its own."""

import torch
from torch.nn import functional as F

from inductor_passes.graph_tools import arguments, find
from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle
from tests.passes import stock
from tests.passes.capture import computed


def _separate(x, router, w1, w3, w2):
    weights, ids = stock.softmax_router(F.linear(x, router))
    order, offsets = stock.sorted_slots(ids)
    rows = x[order // stock.TOP_K]
    gate = F.silu(torch._grouped_mm(rows, w1.transpose(-2, -1), offsets))
    activated = gate * torch._grouped_mm(rows, w3.transpose(-2, -1), offsets)
    out = torch._grouped_mm(activated, w2.transpose(-2, -1), offsets)
    out = out * weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // stock.TOP_K, out.to(x.dtype))


def test_weights_are_read_where_they_are():
    given = stock.layer(12)
    w1, w3 = (half.contiguous() for half in given.w13.chunk(2, dim=1))
    result, out = computed(
        _separate, given.hidden_states, given.router_weight, w1, w3, given.w2, passes=RAISES + FUSIONS
    )
    assert result.ops().count("permute") == 1 and result.ops().count("gemm_combine") == 1
    products = [arguments(node).weight.weight for node in find(result.graph, "grouped_gemm")]
    assert [weight.op for weight in products] == ["placeholder", "placeholder"]
    assert len(set(products)) == 2
    assert_matches_oracle(out, stock.oracle(given, stock.grouped))
