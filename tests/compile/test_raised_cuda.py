"""Stock layers as they are traced on a GPU: the same launches as for ours. No GPU needed."""

import pytest
import torch

import moe_ops
from inductor_passes.base import PassLog
from inductor_passes.pipeline import RAISES, run_passes
from tests.compile.fake_cuda import body, compile_for_h200
from tests.helpers import mixed
from tests.passes import stock
from tests.passes.stock import HIDDEN, INTERMEDIATE, TOP_K

EXPERTS = 16  # Inductor pads products whose sizes are no multiple of 8, and times it to find out


def _inputs(tokens):
    shapes = (
        (tokens, HIDDEN),
        (EXPERTS, HIDDEN),
        (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        (EXPERTS, HIDDEN, INTERMEDIATE),
    )
    return [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _rows(source, index):
    return torch.ops.aten.index.Tensor(
        source, [index]
    )  # what `source[index]` is traced to; that itself wants a GPU


def _grouped(x, router, w13, w2):
    weights, ids = stock.softmax_router(torch.nn.functional.linear(x, router))
    order, offsets = stock.sorted_slots(ids, EXPERTS)
    gate_up = torch.ops.aten._grouped_mm(_rows(x, order // TOP_K), w13.transpose(-2, -1), offsets)
    out = torch.ops.aten._grouped_mm(stock.swiglu(gate_up), w2.transpose(-2, -1), offsets)
    out = out * _rows(weights.reshape(-1), order).unsqueeze(-1)
    slots = torch.arange(order.numel(), device=order.device)
    inverse = torch.ops.aten.index_put(torch.empty_like(order), [order], slots)
    return _rows(out, inverse).view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)


def _batched(x, router, w13, w2):
    weights, ids = stock.softmax_router(torch.nn.functional.linear(x, router))
    rows, experts = x.unsqueeze(1).expand(-1, TOP_K, -1).reshape(-1, HIDDEN), ids.reshape(-1)
    activated = stock.swiglu(torch.bmm(_rows(w13, experts), rows.unsqueeze(-1)).squeeze(-1))
    out = torch.bmm(_rows(w2, experts), activated.unsqueeze(-1)).squeeze(-1) * weights.reshape(-1).unsqueeze(
        -1
    )
    return out.view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)


def _einsums(x, router, w13, w2):
    weights, ids = stock.softmax_router(torch.nn.functional.linear(x, router))
    w1, w3 = w13.chunk(2, dim=1)
    gate = torch.nn.functional.silu(torch.einsum("th,teih->tei", x, _rows(w1, ids)))
    up = torch.einsum("th,teih->tei", x, _rows(w3, ids))
    out = torch.einsum("tei,tehi->teh", gate * up, _rows(w2, ids))
    return torch.einsum("teh,te->th", out, weights.to(x.dtype))


STYLES = [_grouped, _batched]


def _ours(x, router, w13, w2):
    routing = moe_ops.RoutingConfig(TOP_K)
    return moe_ops.fused_moe(x, torch.nn.functional.linear(x, router), w13, w2, routing, emit="stages")


def _launches(compiled):
    return [name for name in compiled.launches if not name.startswith("triton_")]


@pytest.mark.parametrize(
    ("tokens", "style"), mixed((1, 8, 64, 1000), STYLES), ids=lambda value: getattr(value, "__name__", value)
)
def test_launches(style, tokens):
    compiled = compile_for_h200(style, _inputs, tokens=tokens)
    assert _launches(compiled) == _launches(compile_for_h200(_ours, _inputs, tokens=tokens)) != []
    code = body(compiled.code)
    assert not any(name in code for name in ("_grouped_mm", "bmm", "aten.sort", "aten.histc", "aten.topk"))


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_a_symbolic_token_count_gets_one_call_and_no_guard(style):
    compiled = compile_for_h200(style, _inputs, symbolic=True)
    assert body(compiled.code).count("torch.ops.moe.fused_moe.default(") == 1
    assert compiled.guards <= compile_for_h200(style, _inputs, symbolic=True, graph_pass=None).guards


def test_products_of_one_token():
    """Inductor makes `mm` of a `bmm` with one matrix."""
    log = PassLog()
    compile_for_h200(_einsums, _inputs, tokens=1, graph_pass=lambda graph: run_passes(graph, RAISES, log))
    assert [each.kind for each in log.raised] == ["experts", "topk_routing"]
