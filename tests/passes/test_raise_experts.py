"""RaiseExperts: layers of code that knows nothing of us, in the styles of several code bases."""

import expecttest
import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import inductor_passes
from inductor_passes.pipeline import FUSIONS, RAISES
from inductor_passes.raising import RaiseExperts
from tests.helpers import assert_matches_oracle
from tests.passes import stock
from tests.passes.capture import post_grad, rewrite, show
from tests.passes.stock import (
    EXPERTS,
    HIDDEN,
    STYLES,
    TOP_K,
    grouped_experts,
    layer,
    oracle,
    softmax_router,
    swiglu,
)

PIPELINE = (*RAISES, *FUSIONS)
ONE_OPERATOR = ("grouped", "batched", "unsorted")


class TestGolden(expecttest.TestCase):
    def test_stages_in_the_place_of_a_stock_layer(self):
        result = rewrite(stock.grouped, *layer(7, dynamic=True), passes=RAISES)
        self.assertExpectedInline(
            result.after,
            """\
%0 = input() : bfloat16[13, 64]
%1 = aten.permute.default(%0, [1, 0]) : bfloat16[64, 13]
%2 = input() : bfloat16[T0, 64]
%3 = aten.mm.default(%2, %1) : bfloat16[T0, 13]
%4 = moe.topk_routing.default(%3, None, 'top_k=3') : 2 tensors
%5 = getitem(%4, 1) : int32[T0, 3]
%6 = getitem(%4, 0) : float32[T0, 3]
%7 = moe.build_dispatch.default(%5, None, 13) : 3 tensors
%8 = getitem(%7, 2) : int32[14]
%9 = getitem(%7, 1) : int32[3*T0]
%10 = getitem(%7, 0) : int32[3*T0]
%11 = moe.permute.default(%2, %10) : bfloat16[3*T0, 64]
%12 = input() : bfloat16[13, 64, 64]
%13 = moe.grouped_gemm.default(%11, %12, %8, None) : bfloat16[3*T0, 64]
%14 = moe.gated_activation.default(%13, 'silu') : bfloat16[3*T0, 32]
%15 = input() : bfloat16[13, 64, 32]
%16 = moe.grouped_gemm.default(%14, %15, %8, None) : bfloat16[3*T0, 64]
%17 = moe.combine.default(%16, %6, %9, None) : bfloat16[T0, 64]
return [%17]""",
        )
        assert [(each.layer, each.kind) for each in result.log.raised] == [
            ("moe_0", "experts"),
            ("moe_0", "topk_routing"),
        ]


@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize("name", STYLES)
def test_compiled_values(name, tokens):
    inputs = layer(tokens)
    with torch.no_grad():
        out = torch.compile(STYLES[name], options=inductor_passes.options(), fullgraph=True)(*inputs)
    assert_matches_oracle(out, oracle(inputs, STYLES[name]))


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", STYLES)
def test_every_style_is_raised(name, dynamic, tokens):
    if dynamic and tokens == 1:
        pytest.skip("one token is never a symbol")
    result = rewrite(STYLES[name], *layer(tokens, dynamic=dynamic), passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    whole = ["fused_moe"]
    apart = ["routing_dispatch", "permute", "grouped_gemm", "grouped_gemm", "gemm_combine"]
    assert result.ops() == (whole if name in ONE_OPERATOR else apart)
    assert not any(
        "bmm" in str(node.target) or "_grouped_mm" in str(node.target) for node in result.graph.nodes
    )


def test_raising_again_finds_nothing():
    result = rewrite(stock.grouped, *layer(7), passes=(*RAISES, *RAISES))
    assert len(result.log.raised) == 2 and not result.reasons


def test_two_layers_of_one_graph():
    def twice(x, router, w13, w2):
        return stock.batched(stock.grouped(x, router, w13, w2), router, w13, w2)

    result = rewrite(twice, *layer(7), passes=PIPELINE)
    assert result.ops() == ["fused_moe", "fused_moe"]
    assert {each.layer for each in result.log.raised} == {"moe_0", "moe_1"}


def test_one_graph_serves_every_length():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(stock.grouped, options=inductor_passes.options(), fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (7, 33, 2, 100):
            inputs = layer(tokens)
            assert_matches_oracle(compiled(*inputs), oracle(inputs, stock.grouped))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.utils.counters.clear()


# Layouts and gates


def _weights_of(x, router):
    return softmax_router(F.linear(x, router))


def _run(function, *args):
    """The graph with fusions, and what the compiled function gives."""
    with torch.no_grad():
        result = rewrite(function, *args, passes=PIPELINE)
        torch._dynamo.reset()
        return result, torch.compile(function, options=inductor_passes.options(), fullgraph=True)(*args)


def test_transposed_interleaved_weights_with_biases():
    """gpt-oss: [E, H, 2I] and [E, I, H], gate and up columns in turns, a bias for each product."""
    inputs = layer(9)
    w13, w2 = inputs.w13.transpose(1, 2).contiguous(), inputs.w2.transpose(1, 2).contiguous()
    b13, b2 = (
        torch.randn(EXPERTS, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (64, HIDDEN)
    )

    def gpt_oss(x, router, w13, w2, b13, b2):
        weights, ids = _weights_of(x, router)
        order, offsets = stock.sorted_slots(ids)
        experts = ids.reshape(-1)[order]
        gate_up = torch._grouped_mm(x[order // TOP_K], w13, offsets) + b13[experts]
        gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
        activated = (up + 1) * gate * torch.sigmoid(gate * 1.702)
        out = (torch._grouped_mm(activated, w2, offsets) + b2[experts]) * weights.reshape(-1)[order, None]
        return torch.zeros_like(x, dtype=out.dtype).index_add(0, order // TOP_K, out).to(x.dtype)

    result, out = _run(gpt_oss, inputs.hidden_states, inputs.router_weight, w13, w2, b13, b2)
    assert result.ops() == ["fused_moe"]
    assert "swiglu_oai;interleaved=True" in result.after

    x, router = inputs.hidden_states, inputs.router_weight
    weights, ids = softmax_router(F.linear(x, router))
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].double(), ids[token], strict=True):
            gate_up = x[token].double() @ w13[expert].double() + b13[expert].double()
            gate, up = gate_up[::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
            activated = (up + 1) * gate * torch.sigmoid(gate * 1.702)
            expected[token] += weight * (activated @ w2[expert].double() + b2[expert].double())
    assert_matches_oracle(out, expected)


GATES = {
    "silu": swiglu,
    "gelu_tanh": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "silu;limit=2.5": lambda x: F.silu(x.chunk(2, -1)[0].clamp(max=2.5)) * x.chunk(2, -1)[1].clamp(-2.5, 2.5),
    "silu;interleaved=True": lambda x: x[..., 1::2] * F.silu(x[..., ::2]),
}


@pytest.mark.parametrize("spec", GATES)
def test_a_gate_is_known_by_what_it_computes(spec):
    def gated(x, router, w13, w2):
        return grouped_experts(x, *_weights_of(x, router), w13, w2, gate=GATES[spec])

    result = rewrite(gated, *layer(9), passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    assert f"'{spec}'" in result.after


UNKNOWN_GATES = {
    "a third of an epsilon more": lambda x: F.silu(x.chunk(2, -1)[0]) * (x.chunk(2, -1)[1] + 1e-6),
    "up and gate exchanged": lambda x: F.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0],
    "another slope": lambda x: (
        torch.sigmoid(1.01 * x.chunk(2, -1)[0]) * x.chunk(2, -1)[0] * x.chunk(2, -1)[1]
    ),
    "a clamp on one side": lambda x: F.silu(x.chunk(2, -1)[0].clamp(max=2.5)) * x.chunk(2, -1)[1],
}


@pytest.mark.parametrize("what", UNKNOWN_GATES)
def test_another_gate_stays_as_it_is_written(what):
    def gated(x, router, w13, w2):
        return grouped_experts(x, *_weights_of(x, router), w13, w2, gate=UNKNOWN_GATES[what])

    inputs = layer(9)
    result, out = _run(gated, *inputs)
    assert result.ops() == ["routing_dispatch", "permute", "grouped_gemm", "gemm_combine"]
    with torch.no_grad():
        torch.testing.assert_close(out, gated(*inputs), rtol=0.02, atol=0.02)


def test_ungated_experts():
    """Nemotron: [E, I, H], relu squared."""
    inputs = layer(9)
    w1 = inputs.w13[:, : stock.INTERMEDIATE].contiguous()

    def ungated(x, router, w1, w2):
        return grouped_experts(x, *_weights_of(x, router), w1, w2, gate=lambda h: F.relu(h).square())

    result = rewrite(ungated, inputs.hidden_states, inputs.router_weight, w1, inputs.w2, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and "'relu2'" in result.after


def test_ids_out_of_range_that_a_model_masks():
    """transformers before 5.20: ids of E are nobody's, and their rows are set to zero around each product."""

    def masked(x, weights, ids, w13, w2):
        ranked, order = ids.reshape(-1).sort()
        nobody = (ranked >= EXPERTS).unsqueeze(-1)
        counts = torch.histc(ranked.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        offsets = counts.cumsum(0, dtype=torch.int32)
        rows = x[order // TOP_K].masked_fill(nobody, 0.0)
        gate_up = torch._grouped_mm(rows, w13.transpose(-2, -1), offsets).masked_fill(nobody, 0.0)
        out = torch._grouped_mm(swiglu(gate_up), w2.transpose(-2, -1), offsets).masked_fill(nobody, 0.0)
        out = out * weights.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        return out[inverse].view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)

    x, router, w13, w2 = layer(9)
    weights, ids = softmax_router(F.linear(x, router))
    ids[::2, 1] = EXPERTS
    result, out = _run(masked, x, weights, ids, w13, w2)
    assert result.ops() == ["fused_experts"]
    assert_matches_oracle(out, _chosen_oracle(x, weights, ids, w13, w2))


def _chosen_oracle(x, weights, ids, w13, w2):
    total = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(EXPERTS):
        weight = (weights.double() * (ids == expert)).sum(-1, keepdim=True)
        total += swiglu(x.double() @ w13[expert].double().T) @ w2[expert].double().T * weight
    return total


# What is left alone


def _left(function, *args):
    """Why a layer stays; and that its graph does, to the letter."""
    result = rewrite(function, *args, passes=(RaiseExperts(),))
    assert result.after == result.before and not result.log.raised
    return result.reasons


def _experts_with(**parts):
    """`grouped`, with one part written differently."""

    def order_of(ids):
        return stock.sorted_slots(ids)

    def finish(out, inverse, x):
        return out[inverse].view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)

    part = {
        "order": order_of,
        "rows": lambda x, order: x[order // TOP_K],
        "gate": lambda gate_up, rows: swiglu(gate_up),
        "weigh": lambda out, weights, order: out * weights.reshape(-1)[order].unsqueeze(-1),
        "finish": finish,
        "result": lambda result, gate_up, out: result,
        **parts,
    }

    def run(x, router, w13, w2):
        weights, ids = _weights_of(x, router)
        order, offsets = part["order"](ids)
        rows = part["rows"](x, order)
        gate_up = torch._grouped_mm(rows, w13.transpose(-2, -1), offsets)
        out = torch._grouped_mm(part["gate"](gate_up, rows), w2.transpose(-2, -1), offsets)
        weighed = part["weigh"](out, weights, order)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        return part["result"](part["finish"](weighed, inverse, x), gate_up, out)

    return run


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
    "weighed twice": (
        {
            "weigh": lambda out, weights, order: (
                (out * weights.reshape(-1)[order, None]) * weights.reshape(-1)[order, None]
            )
        },
        "aten.mul.Tensor reads what experts give, not a weighted sum",
    ),
    "the largest, not the sum": (
        {"finish": lambda out, inverse, x: out[inverse].view(-1, TOP_K, HIDDEN).amax(1).to(x.dtype)},
        "aten.amax reads what experts give, not a weighted sum",
    ),
    "summed in another order": (
        {"finish": lambda out, inverse, x: out[inverse.flip(0)].view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)},
        "aten.index.Tensor reads what experts give, not a weighted sum",
    ),
    "summed over other rows": (
        {"finish": lambda out, inverse, x: out[inverse].view(TOP_K, -1, HIDDEN).sum(1).to(x.dtype)},
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
    assert rewrite(_experts_with(), *layer(9), passes=PIPELINE).ops() == ["fused_moe"]
    (found,) = _left(_experts_with(**parts), *layer(9))
    assert reason in found


def test_nothing_that_looks_like_a_layer_is_not_mentioned():
    def products(x, y):
        return torch.bmm(x, y).softmax(-1)

    assert _left(products, torch.randn(4, 5, 6), torch.randn(4, 6, 7)) == []


def test_a_layer_that_stays_compiles_to_the_same_code():
    function, args = _experts_with(**OTHERS["weighed twice"][0]), layer(9)
    with torch.no_grad(), torch._inductor.utils.fresh_inductor_cache():
        _, (ours,) = run_and_get_code(torch.compile(function, options=inductor_passes.options()), *args)
        torch._dynamo.reset()
        _, (plain,) = run_and_get_code(torch.compile(function), *args)
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
