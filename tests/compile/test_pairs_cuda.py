"""Layers that hold gate and up in two tensors, as they are compiled for a GPU: one first product, nothing copied."""

import re

import pytest
import torch
from torch.nn import functional as F

import moe_ops
from inductor_passes.base import PassLog
from inductor_passes.pipeline import PIPELINE, run_passes
from tests.compile.fake_cuda import body, compile_for_h200
from tests.compile.test_raised_cuda import _rows
from tests.helpers import mixed
from tests.passes import stock
from tests.passes.stock import TOP_K

HIDDEN, EXPERTS, INTERMEDIATE = 256, 16, 128
aten = torch.ops.aten


def _inputs(tokens, transposed=False):
    def weight(*shape):
        made = torch.empty(
            shape[:1] + shape[:0:-1] if transposed else shape, device="cuda", dtype=torch.bfloat16
        )
        return made.transpose(1, 2) if transposed else made

    x, router = (torch.empty(n, HIDDEN, device="cuda", dtype=torch.bfloat16) for n in (tokens, EXPERTS))
    up = (EXPERTS, INTERMEDIATE, HIDDEN)
    return [x, router, weight(*up), weight(*up), weight(EXPERTS, HIDDEN, INTERMEDIATE)]


def _columns(tokens):
    return _inputs(tokens, transposed=True)


def _grouped_experts(x, router, w1, w3, w2, weighs_first):
    """GroupedExperts: weights on what goes in, or on what comes out."""
    weights, ids = torch.sigmoid(F.linear(x, router).float()).topk(TOP_K, dim=1)
    order, offsets = stock.sorted_slots(ids, EXPERTS)
    rows, scale = _rows(x, order // TOP_K), _rows(weights.reshape(-1), order).unsqueeze(-1)
    rows = (rows.float() * scale).to(x.dtype) if weighs_first else rows
    gate, up = (aten._grouped_mm(rows, weight.transpose(-2, -1), offsets) for weight in (w1, w3))
    out = aten._grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offsets)
    out = out if weighs_first else out * scale
    slots = torch.arange(order.numel(), device=order.device)
    inverse = aten.index_put(torch.empty_like(order), [order], slots)
    return _rows(out, inverse).view(-1, TOP_K, x.shape[1]).sum(1).to(x.dtype)


def torchtitan(x, router, w1, w3, w2):
    return _grouped_experts(x, router, w1, w3, w2, weighs_first=True)


def weighing_last(x, router, w1, w3, w2):
    return _grouped_experts(x, router, w1, w3, w2, weighs_first=False)


def gpt_fast(x, router, w1, w3, w2):
    """ConditionalFeedForward: weights gathered, einsums."""
    weights, ids = stock.softmax_router(F.linear(x, router))
    gate = F.silu(torch.einsum("th,teih->tei", x, _rows(w1, ids)))
    up = torch.einsum("th,teih->tei", x, _rows(w3, ids))
    out = torch.einsum("tei,tehi->teh", gate * up, _rows(w2, ids))
    return torch.einsum("teh,te->th", out, weights.to(x.dtype))


def by_hand(x, router, w1, w3, w2):
    return moe_ops.fused_moe(
        x, F.linear(x, router), (w1, w3), w2, moe_ops.RoutingConfig(TOP_K), emit="stages"
    )


UP_KERNELS = (
    "gemv_activation_kernel",
    "routed_gemv_activation_kernel",
    "routed_gemv_columns_kernel",
    "grouped_gemm_tma_kernel",
    "grouped_gemm_mixed_kernel",
)


def _compiled(layer, inputs, **sizes):
    log = PassLog()
    return compile_for_h200(
        layer, inputs, graph_pass=lambda graph: run_passes(graph, PIPELINE, log), **sizes
    ), log


def _first_products(compiled):
    """Launches of ours that are given both weights."""
    names = [re.sub(r"_\d+$", "", name) for name in compiled.launches]
    return [name for name in names if name in UP_KERNELS]


def _assert_no_weight_is_copied(compiled):
    sizes = re.findall(r"empty_strided_cuda\(\(([\d, ]*)\)", body(compiled.code))
    elements = [
        torch.Size(map(int, filter(None, size.replace(" ", "").split(",")))).numel() for size in sizes
    ]
    assert elements and max(elements) < EXPERTS * INTERMEDIATE * HIDDEN


CASES = {
    "weighing last": (weighing_last, _inputs),
    "in columns": (weighing_last, _columns),
    "gpt-fast": (gpt_fast, _inputs),
    "by hand": (by_hand, _columns),
}


@pytest.mark.parametrize(("case", "tokens"), mixed(CASES, (1, 40)))
def test_one_operator_with_one_first_product(case, tokens):
    layer, inputs = CASES[case]
    compiled, log = _compiled(layer, inputs, tokens=tokens)
    assert log.counts()["fused_moe"] == 1 and not log.refused
    assert len(_first_products(compiled)) == (1 if tokens == 1 else 2)  # the second one is down
    assert "torch.ops.moe" not in body(compiled.code) and "_grouped_mm" not in body(compiled.code)
    _assert_no_weight_is_copied(compiled)


@pytest.mark.parametrize("tokens", [1, 40])
def test_rows_that_are_weighed_first_have_the_gate_in_their_product_too(tokens):
    compiled, log = _compiled(torchtitan, _inputs, tokens=tokens)
    assert log.counts() == {"routing_dispatch": 1, "gather_gemm_act": 1, "gemm_combine": 1}
    (refused,) = log.refused
    assert refused.reason.startswith(
        "the rows of gather_gemm_act come from prims.convert_element_type, not from"
    )
    assert len(_first_products(compiled)) == 2
    _assert_no_weight_is_copied(compiled)


def test_a_symbolic_token_count_gets_one_call():
    compiled, _ = _compiled(gpt_fast, _inputs, symbolic=True)
    assert body(compiled.code).count("torch.ops.moe.fused_moe.default(") == 1
