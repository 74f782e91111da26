"""Stock layers that hold gate and up in two tensors: one operator that reads both where they lie."""

import re

import pytest
import torch
from torch.nn import functional as F

import inductor_passes
import moe_ops
from inductor_passes.pipeline import FUSIONS, RAISES
from moe_ops.reference import reference_experts
from tests.helpers import assert_matches_oracle, mixed, relative_error
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, layer, softmax_router

PIPELINE = (*RAISES, *FUSIONS)


def silu_gate(gate, up):
    return F.silu(gate) * up


def grouped(x, router, w1, w3, w2, gate=silu_gate, rows_of_up=None, offsets_of_up=None):
    """torchtitan's GroupedExperts, weighing what comes out."""
    weights, ids = softmax_router(F.linear(x, router))
    order, offsets = stock.sorted_slots(ids)
    rows = x[order // TOP_K]
    up_rows = rows if rows_of_up is None else rows_of_up(x, order)
    up_offsets = offsets if offsets_of_up is None else offsets_of_up(offsets)
    first = torch._grouped_mm(rows, w1.transpose(-2, -1), offsets)
    second = torch._grouped_mm(up_rows, w3.transpose(-2, -1).to(x.dtype), up_offsets)
    out = torch._grouped_mm(gate(first, second), w2.transpose(-2, -1), offsets)
    out = out * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return out[inverse].view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)


def gathered(x, router, w1, w3, w2):
    """gpt-fast's ConditionalFeedForward."""
    weights, ids = softmax_router(F.linear(x, router))
    gate = F.silu(torch.einsum("th,teih->tei", x, w1[ids]))
    up = torch.einsum("th,teih->tei", x, w3[ids])
    out = torch.einsum("tei,tehi->teh", gate * up, w2[ids])
    return torch.einsum("teh,te->th", out, weights.to(x.dtype))


def turned(weight):
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


def apart(inputs, turn=torch.clone):
    x, router, w13, w2 = inputs
    return [x, router, *(turn(half.contiguous()) for half in w13.chunk(2, 1)), turn(w2)]


@pytest.mark.parametrize(
    ("style", "size", "turn"),
    mixed((grouped, gathered), ((1, 0), (33, 0), (2, 1)), (torch.clone, turned)),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_operator_of_both(style, size, turn):
    inputs = layer(size[0], dynamic=bool(size[1]))
    turn = turn if style is grouped else torch.clone
    result, out = computed(style, *apart(inputs, turn), passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, stock.oracle(inputs, stock.grouped))


@pytest.mark.parametrize(("style", "tokens"), mixed([gathered, grouped], [1, 7]))
def test_compiled_values(style, tokens):
    """Few slots, whose weights are read through their index, and many, whose products are calls."""
    inputs = layer(tokens if style is gathered else tokens * 9)
    with torch.no_grad():
        out = torch.compile(style, options=inductor_passes.options(), fullgraph=True)(*apart(inputs))
    assert_matches_oracle(out, stock.oracle(inputs, stock.grouped))


GATES = {
    "silu": silu_gate,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "silu;limit=2.5": lambda gate, up: F.silu(gate.clamp(max=2.5)) * up.clamp(-2.5, 2.5),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("spec", GATES)
def test_the_gate_says_which_half_is_which(spec, swapped):
    inputs = layer(9)
    x, router, w1, w3, w2 = apart(inputs)
    gate = (lambda first, second: GATES[spec](second, first)) if swapped else GATES[spec]
    halves = (w3, w1) if swapped else (w1, w3)
    run = lambda *given: grouped(*given, gate=gate)  # noqa: E731
    result, out = computed(run, x, router, *halves, w2, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and f"'{spec}'" in result.after
    with torch.no_grad():
        torch.testing.assert_close(out, run(x, router, *halves, w2), rtol=0.02, atol=0.02)


OWN = {
    "another slope": lambda gate, up: torch.sigmoid(1.01 * gate) * gate * up,
    "alternating": lambda gate, up: F.silu(gate) * up + 1e-3 * gate,
    "one half alone": lambda gate, up: F.silu(gate) + 0.0 * up,
}


@pytest.mark.parametrize("what", OWN)
def test_a_gate_of_ones_own_is_captured_between_both(what):
    inputs = apart(layer(9))
    run = lambda *given: grouped(*given, gate=OWN[what])  # noqa: E731
    result, out = computed(run, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe_formula"]
    with torch.no_grad():
        torch.testing.assert_close(out, run(*inputs), rtol=0.02, atol=0.02)


def test_a_gate_of_ones_own_compiled():
    inputs = apart(layer(400))  # so many that their products are not sums
    run = lambda *given: grouped(*given, gate=OWN["alternating"])  # noqa: E731
    with torch.no_grad():
        compiled = torch.compile(run, options=inductor_passes.options(), fullgraph=True)(*inputs)
        torch.testing.assert_close(compiled, run(*inputs), rtol=0.02, atol=0.02)


def test_a_bias_for_each():
    inputs = layer(9)
    b1, b3 = (torch.randn(EXPERTS, INTERMEDIATE).bfloat16() for _ in range(2))

    def biased(x, router, w1, w3, w2, b1, b3):
        weights, ids = softmax_router(F.linear(x, router))
        order, offsets = stock.sorted_slots(ids)
        rows, experts = x[order // TOP_K], ids.reshape(-1)[order]
        gate, up = (
            torch._grouped_mm(rows, w.transpose(-2, -1), offsets) + b[experts]
            for w, b in ((w1, b1), (w3, b3))
        )
        out = torch._grouped_mm(silu_gate(gate, up), w2.transpose(-2, -1), offsets)
        out = out * weights.reshape(-1)[order, None]
        return torch.zeros_like(x, dtype=out.dtype).index_add(0, order // TOP_K, out).to(x.dtype)

    given = apart(inputs)
    result, out = computed(biased, *given, b1, b3, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    weights, ids = softmax_router(F.linear(inputs.hidden_states, inputs.router_weight))
    tensors = (t.double() for t in (inputs.hidden_states, inputs.w13, inputs.w2, weights))
    x, w13, w2, weights = tensors
    bias = torch.cat((b1, b3), 1).double()
    expected = reference_experts(x, w13, w2, weights, ids, moe_ops.Activation(), w13_bias=bias)
    assert_matches_oracle(out, expected)


# Where two products stay two


def test_weights_that_lie_otherwise_keep_a_product_each():
    inputs = layer(9)
    x, router, w1, w3, w2 = apart(inputs)
    result, out = computed(grouped, x, router, w1, turned(w3), w2, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert result.ops() == ["routing_dispatch", "permute", "grouped_gemm", "grouped_gemm", "gemm_combine"]
    assert_matches_oracle(out, stock.oracle(inputs, stock.grouped))


def with_one_bias(which):
    """Of gate or up."""

    def biased(x, router, w1, w3, w2, bias):
        weights, ids = softmax_router(F.linear(x, router))
        first, second = (torch.einsum("th,tkih->tki", x, each[ids]) for each in (w1, w3))
        gate, up = (first + bias[ids], second) if which == "gate" else (first, second + bias[ids])
        out = torch.einsum("tki,tkhi->tkh", silu_gate(gate, up), w2[ids])
        return torch.einsum("tkh,tk->th", out, weights.to(x.dtype))

    return biased


@pytest.mark.parametrize("which", ["gate", "up"])
def test_a_bias_for_one(which):
    """The other one's are zeros."""
    given = (*apart(layer(9)), torch.randn(EXPERTS, INTERMEDIATE).bfloat16())
    result, out = computed(with_one_bias(which), *given, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and len(result.log.raised) == 2
    assert_matches_oracle(out, with_one_bias(which)(*(each.double() for each in given)))


def test_a_bias_for_one_whose_weights_lie_otherwise_keeps_a_product_each():
    def biased(x, router, w1, w3, w2, bias):
        weights, ids = softmax_router(F.linear(x, router))
        order, offsets = stock.sorted_slots(ids)
        rows, experts = x[order // TOP_K], ids.reshape(-1)[order]
        gate = torch._grouped_mm(rows, w1.transpose(-2, -1), offsets) + bias[experts]
        up = torch._grouped_mm(rows, w3.transpose(-2, -1), offsets)
        out = torch._grouped_mm(silu_gate(gate, up), w2.transpose(-2, -1), offsets)
        out = out * weights.reshape(-1)[order, None]
        return torch.zeros_like(x, dtype=out.dtype).index_add(0, order // TOP_K, out).to(x.dtype)

    x, router, w1, w3, w2 = apart(layer(9))
    bias = torch.randn(EXPERTS, INTERMEDIATE).bfloat16()
    result = rewrite(biased, x, router, w1, turned(w3), w2, bias, passes=PIPELINE)
    assert result.ops().count("grouped_gemm") == 2 and len(result.log.raised) == 2
    assert "aten.full" not in result.after


def test_a_weight_of_another_dtype_keeps_a_product_of_its_own():
    """The model casts it, and its copy lies as the cast leaves it."""
    inputs = layer(9)
    x, router, w1, w3, w2 = apart(inputs)
    result, out = computed(grouped, x, router, w1, w3.float(), w2, passes=PIPELINE)
    assert result.ops().count("grouped_gemm") == 2 and len(result.log.raised) == 2
    assert_matches_oracle(out, stock.oracle(inputs, stock.grouped))


REFUSED = {
    "other rows": ({"rows_of_up": lambda x, order: (x * 2)[order // TOP_K]}, "have different inputs"),
    "another plan": (
        {"offsets_of_up": lambda offsets: (offsets - 1).clamp(min=0)},
        "gives rows to other experts than the ids of the layer",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    parts, reason = REFUSED[what]
    result = rewrite(lambda *given: grouped(*given, **parts), *apart(layer(9)), passes=PIPELINE)
    assert "fused_moe" not in result.ops()
    assert any(reason in each for each in result.reasons)


# Training, and a CPU


def test_a_layer_that_trains():
    inputs = [tensor.requires_grad_() for tensor in apart(layer(9))]
    compiled = torch.compile(grouped, options=inductor_passes.options(), fullgraph=True)
    double = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ours = torch.autograd.grad(compiled(*inputs).sum(), inputs[2:])
    theirs = torch.autograd.grad(_plain(*double).sum(), double[2:])
    for got, wanted in zip(ours, theirs, strict=True):
        assert relative_error(got, wanted) <= 8 * torch.finfo(torch.bfloat16).eps


def _plain(x, router, w1, w3, w2):
    weights, ids = softmax_router(F.linear(x, router).float())
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        weight = (weights * (ids == expert)).sum(-1, keepdim=True)
        out = out + silu_gate(x @ w1[expert].T, x @ w3[expert].T) @ w2[expert].T * weight
    return out


def test_on_a_cpu_each_weight_has_a_call_of_its_own():
    """Which writes its rows for the gate to read: nothing is laid side by side."""
    from torch._inductor.utils import run_and_get_code

    inputs = apart(layer(999))
    with torch.no_grad():
        compiled = torch.compile(grouped, options=inductor_passes.options(), fullgraph=True)
        _, (code, *_) = run_and_get_code(compiled, *inputs)
    assert code.count("torch.ops.moe.grouped_gemm.compiled(") == 3
    assert not re.search(r"cpp_fused_\w*cat", code)
