"""RaiseExperts: layers of code that knows nothing of us, in the styles of several code bases."""

import expecttest
import pytest
import torch
from torch.nn import functional as F

import inductor_passes
from inductor_passes.graph_tools import parts
from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed
from tests.passes import stock
from tests.passes.capture import computed, post_grad, rewrite
from tests.passes.stock import (
    EXPERTS,
    HIDDEN,
    STYLES,
    TOP_K,
    added_by_index,
    behind,
    grouped_experts,
    grouped_with,
    layer,
    masked_gate,
    oracle,
    softmax_router,
    swiglu,
    weighed,
)

PIPELINE = (*RAISES, *FUSIONS)
ONE_OPERATOR = ("grouped", "batched", "einsums", "unsorted", "looped", "multiplied")


class TestGolden(expecttest.TestCase):
    def test_stages_in_the_place_of_a_stock_layer(self):
        result = rewrite(stock.grouped, *layer(7, dynamic=True), passes=RAISES)
        self.assertExpectedInline(
            result.after,
            """\
%0 = input() : bfloat16[6, 64]
%1 = aten.permute.default(%0, [1, 0]) : bfloat16[64, 6]
%2 = input() : bfloat16[T0, 64]
%3 = aten.mm.default(%2, %1) : bfloat16[T0, 6]
%4 = moe.topk_routing.default(%3, None, 'top_k=3') : 2 tensors
%5 = getitem(%4, 1) : int32[T0, 3]
%6 = getitem(%4, 0) : float32[T0, 3]
%7 = moe.build_dispatch.default(%5, None, 6) : 3 tensors
%8 = getitem(%7, 2) : int32[7]
%9 = getitem(%7, 1) : int32[3*T0]
%10 = getitem(%7, 0) : int32[3*T0]
%11 = moe.permute.default(%2, %10) : bfloat16[3*T0, 64]
%12 = input() : bfloat16[6, 64, 64]
%13 = moe.grouped_gemm.default(%11, %12, %8, None, None, None) : bfloat16[3*T0, 64]
%14 = moe.gated_activation.default(%13, 'silu') : bfloat16[3*T0, 32]
%15 = input() : bfloat16[6, 64, 32]
%16 = moe.grouped_gemm.default(%14, %15, %8, None, None, None) : bfloat16[3*T0, 64]
%17 = moe.combine.default(%16, %6, %9, None, None, None) : bfloat16[T0, 64]
return [%17]""",
        )
        assert [(each.layer, each.kind) for each in result.log.raised] == [
            ("moe_0", "experts"),
            ("moe_0", "topk_routing"),
        ]


@pytest.mark.exhaustive  # those of any length are below, those of few slots in `test_raise_pairs.py`
def test_compiled_values():
    inputs = layer(7)
    with torch.no_grad():
        out = torch.compile(stock.grouped, options=inductor_passes.options(), fullgraph=True)(*inputs)
    assert_matches_oracle(out, oracle(inputs, stock.grouped))


@pytest.mark.parametrize(("name", "size"), mixed(STYLES, ((1, 0), (33, 0), (2, 1)), rounds=2), ids=str)
def test_every_style_is_raised(name, size):
    inputs = layer(size[0], dynamic=bool(size[1]))
    result, out = computed(STYLES[name], *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    whole = ["fused_moe"]
    weighed = ["routing_dispatch", "permute", "grouped_gemm", "gated_activation", "gemm_combine"]
    assert result.ops() == (whole if name in ONE_OPERATOR else weighed)
    assert not any(
        "bmm" in str(node.target) or "_grouped_mm" in str(node.target) for node in result.graph.nodes
    )
    assert_matches_oracle(out, oracle(inputs, STYLES[name]))


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
        for tokens in (7, 33, 2):
            inputs = layer(tokens)
            assert_matches_oracle(compiled(*inputs), oracle(inputs, stock.grouped))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.utils.counters.clear()


# Layouts and gates


def _weights_of(x, router):
    return softmax_router(F.linear(x, router))


def _run(function, *args):
    """The graph with fusions, and what it computes."""
    return computed(function, *args, passes=PIPELINE)


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


def test_square_weights_that_are_gathered_turned():
    """[E, H, 2I], 2I = H: only strides tell which are summed."""
    inputs = layer(9)
    turned = [weight.transpose(1, 2).contiguous() for weight in inputs[2:]]

    def gathered(x, router, w13, w2):
        weights, ids = _weights_of(x, router)
        rows, experts = x.unsqueeze(1).expand(-1, TOP_K, -1).reshape(-1, 1, HIDDEN), ids.reshape(-1)
        activated = swiglu(torch.bmm(rows, w13[experts]).squeeze(1)).unsqueeze(1)
        out = torch.bmm(activated, w2[experts]).squeeze(1)
        return (out * weights.reshape(-1, 1)).view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)

    result, out = _run(gathered, *inputs[:2], *turned)
    assert len(result.log.raised) == 2
    assert_matches_oracle(out, oracle(inputs, stock.batched))


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
    "a clamp far below": lambda x: F.silu(x.chunk(2, -1)[0].clamp(min=-1e9)) * x.chunk(2, -1)[1],
    "a clamp on one side": lambda x: F.silu(x.chunk(2, -1)[0].clamp(max=2.5)) * x.chunk(2, -1)[1],
}


@pytest.mark.parametrize("what", UNKNOWN_GATES)
def test_another_gate_is_captured_as_it_is_written(what):
    def gated(x, router, w13, w2):
        return grouped_experts(x, *_weights_of(x, router), w13, w2, gate=UNKNOWN_GATES[what])

    inputs = layer(9)
    result, out = _run(gated, *inputs)
    assert result.ops() == ["fused_moe_formula"]
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


# Sums, orders and masks that mean the same


def _put_by_index(out, inverse, x, order):
    zeros = torch.zeros_like(x, dtype=out.dtype)
    return zeros.index_put((order // TOP_K,), out, accumulate=True).to(x.dtype)


SAME = {
    "as it is": {},
    "index_add": {"finish": added_by_index},
    "index_put": {"finish": _put_by_index},
    "index_select": {"rows": lambda x, order: x.index_select(0, order // TOP_K)},
    "an empty tail": {
        "weigh": lambda out, weights, order: weighed(out, weights, order).masked_fill(
            behind(order.numel(), order.numel()), 0.0
        )
    },
    "a mask in the gate": {"gate": masked_gate},
}


@pytest.mark.parametrize(("what", "dynamic"), mixed(SAME, (False, True)))
def test_what_means_the_same_is_raised(what, dynamic):
    inputs = layer(9, dynamic=dynamic)
    result, out = _run(grouped_with(**SAME[what]), *inputs)
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, oracle(inputs, stock.grouped))


def test_batch_and_length_of_any_size():
    def batches(x, router, w13, w2):
        return stock.grouped(x.view(-1, HIDDEN), router, w13, w2).view(x.shape)

    inputs = layer(12)
    x = inputs.hidden_states.view(3, 4, HIDDEN).clone()
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    result, out = _run(batches, x, *inputs[1:])
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out.view(-1, HIDDEN), oracle(inputs, stock.grouped))


# Who reads a router, and where layers are


def test_two_layers_of_one_router():
    def both(x, router, w13, w2):
        weights, ids = _weights_of(x, router)
        return grouped_experts(x, weights, ids, w13, w2), grouped_experts(x, weights * 2, ids, w13, w2), ids

    inputs = layer(9)
    result, (one, other, ids) = _run(both, *inputs)
    assert [each.kind for each in result.log.raised] == ["experts", "experts", "topk_routing"]
    assert not any("topk.default" in str(node.target) for node in result.graph.nodes)
    expected = oracle(inputs, stock.grouped)
    assert_matches_oracle(one, expected)
    assert_matches_oracle(other, 2 * expected)
    assert torch.equal(ids, _weights_of(inputs.hidden_states, inputs.router_weight)[1])


REGION = torch.compiler.nested_compile_region(stock.grouped)


def _branches(*inputs):
    return torch.cond(inputs[0].sum() > 0, stock.grouped, stock.batched, inputs)


def _regions(x, *weights):
    return REGION(x, *weights) + REGION(x + 1, *weights)


@pytest.mark.parametrize("function, layers", [(_branches, 2), (_regions, 1)])
def test_layers_of_subgraphs(function, layers):
    with torch.no_grad():
        (module,) = post_grad(function, *layer(9))
    logs = [inductor_passes.pipeline.run_passes(part.graph, PIPELINE) for part in parts(module)]
    assert [each.kind for log in logs for each in log.raised] == ["experts", "topk_routing"] * layers
    assert not any(log.refused for log in logs)


def test_tokens_that_are_no_numbers_change_no_others():
    inputs, poisoned = layer(9), layer(9)
    poisoned.hidden_states[2], poisoned.hidden_states[5] = float("nan"), float("inf")
    _, out = _run(stock.grouped, *poisoned)
    others = [0, 1, 3, 4, 6, 7, 8]
    assert_matches_oracle(out[others], oracle(inputs, stock.grouped)[others])
    assert not out[[2, 5]].isfinite().any()
