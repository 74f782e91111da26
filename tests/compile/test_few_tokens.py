"""MultiplyFewTokens: on a GPU a router and shared experts of few tokens run a kernel that reads each weight once."""

import pytest
import torch
from torch.nn import functional as F

import moe_ops
from tests.compile.fake_cuda import body, compile_for_h200
from tests.helpers import mixed

HIDDEN, EXPERTS, INTERMEDIATE, TOP_K = 64, 16, 32, 2


def _inputs(tokens, dtype=torch.bfloat16):
    shapes = (
        *((tokens, HIDDEN), (EXPERTS, HIDDEN), (EXPERTS,)),
        *((EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)),
        *((1024, HIDDEN), (1024, HIDDEN), (HIDDEN, 1024), (1, HIDDEN)),
    )
    return [torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes]


def _routed(x, logits, w13, w2, shared=None):
    weights, ids = moe_ops.topk_routing(logits, moe_ops.RoutingConfig(TOP_K))
    return moe_ops.fused_experts(x, w13, w2, weights, ids, shared=shared, emit="stages")


def _layer(x, router, bias, w13, w2, *_):
    return _routed(x, F.linear(x, router, bias), w13, w2)


def _shared_layer(x, router, bias, w13, w2, gate, up, down, _):
    shared = F.linear(
        F.gelu(F.linear(x, gate)) * F.linear(x, up), down
    )  # silu's would be in launches of the routed
    return _routed(x, F.linear(x.float(), router.float()), w13, w2, shared)


def _products(compiled):
    """(kernels of ours for few tokens, products of a library)."""
    code = body(compiled.code)
    calls = sum(code.count(name) for name in ("extern_kernels.mm(", "extern_kernels.addmm(", "mm_dtype("))
    return sum("dense_gemv" in launch for launch in compiled.launches), calls


@pytest.mark.parametrize(
    ("dtype", "tokens"), mixed((torch.bfloat16, torch.float16, torch.float32), (1, 8)), ids=str
)
def test_router(tokens, dtype):
    compiled = compile_for_h200(_layer, lambda tokens: _inputs(tokens, dtype), tokens=tokens)
    assert _products(compiled) == (1, 0)
    assert "dense_gemv_kernel_0.run(arg0_1, arg1_1, arg2_1, " in body(compiled.code), (
        "tokens, router and bias"
    )


def test_router_of_a_fused_layer():
    def layer(x, router, _, w13, w2, *__):
        return moe_ops.fused_moe(x, F.linear(x, router), w13, w2, moe_ops.RoutingConfig(TOP_K))

    assert _products(compile_for_h200(layer, _inputs, tokens=1)) == (1, 0)


@pytest.mark.parametrize("tokens, ours", [(1, 4), (2, 2), (8, 2), (9, 0)])
def test_shared_experts_and_float32_logits(tokens, ours):
    """The down product of the shared experts has as few features here as a router."""
    compiled = compile_for_h200(_shared_layer, _inputs, tokens=tokens)
    few, others = _products(compiled)
    assert few + others == 4
    assert few == ours
    assert ("mm_dtype(" in body(compiled.code)) == (tokens == 9)
    assert len([name for name in compiled.launches if name.startswith("triton_")]) == 1, "the gate, no casts"


def test_shared_experts_that_read_another_view_of_the_tokens():
    """As in transformers, where only the routed experts read a batch as rows."""

    def layer(x, router, bias, w13, w2, gate, up, down, _):
        batch = torch.relu(x).view(1, -1, HIDDEN)
        rows = batch.view(-1, HIDDEN)
        shared = F.linear(F.gelu(F.linear(batch, gate)) * F.linear(batch, up), down)
        return _routed(rows, F.linear(rows, router, bias), w13, w2, shared.view(-1, HIDDEN))

    assert _products(compile_for_h200(layer, _inputs, tokens=1)) == (4, 0)


def test_layers_with_a_gate_of_ones_own():
    """Alone, where float32 logits of more tokens are a product of halves, and with shared experts."""

    def gate_of(gate, up):
        return torch.tanh(gate) * up

    def layer(x, router, _, w13, w2, *__):
        logits, routing = F.linear(x.float(), router.float()), moe_ops.RoutingConfig(TOP_K)
        return moe_ops.fused_moe(x, logits, w13, w2, routing, gate_of, emit="stages")

    def with_shared(x, router, _, w13, w2, gate, up, down, *__):
        weights, ids = moe_ops.topk_routing(F.linear(x, router), moe_ops.RoutingConfig(TOP_K))
        shared = F.linear(F.linear(x, gate), down)
        return moe_ops.fused_experts(x, w13, w2, weights, ids, gate_of, shared=shared, emit="stages")

    assert _products(compile_for_h200(layer, _inputs, tokens=1)) == (1, 0)
    assert "mm_dtype(" in body(compile_for_h200(layer, _inputs, tokens=64).code)
    assert _products(compile_for_h200(with_shared, _inputs, tokens=1)) == (3, 0)


def test_gate_of_a_shared_expert():
    def layer(x, router, _, w13, w2, gate, up, down, shared_gate):
        shared = F.linear(F.gelu(F.linear(x, gate)) * F.linear(x, up), down)
        return _routed(x, F.linear(x, router), w13, w2) + torch.sigmoid(F.linear(x, shared_gate)) * shared

    assert _products(compile_for_h200(layer, _inputs, tokens=1)) == (5, 0)


def test_more_tokens_or_any_number_stay():
    for options in ({"tokens": 9}, {"tokens": 64}, {"symbolic": True, "tokens": 4}):
        assert _products(compile_for_h200(_layer, _inputs, **options)) == (0, 1)


def test_a_weight_whose_rows_do_not_lie_together_stays():
    def layer(x, router, bias, w13, w2, *_):
        return _routed(x, x @ router.view(HIDDEN, EXPERTS), w13, w2)

    assert _products(compile_for_h200(layer, _inputs, tokens=1)) == (0, 1)


def test_a_scaled_bias_stays():
    def layer(x, router, bias, w13, w2, *_):
        return _routed(x, torch.addmm(bias, x, router.t(), beta=0.5), w13, w2)

    assert _products(compile_for_h200(layer, _inputs, tokens=1)) == (0, 1)


def test_a_product_that_is_no_part_of_a_layer_stays():
    """In front of a layer, added to its sum from elsewhere, or behind logits that are sums of a product's."""

    def model(x, router, bias, w13, w2, gate, up, down, _):
        before = F.linear(F.linear(x, gate), down)
        elsewhere = F.linear(F.linear(x, up), down)
        logits = F.linear(before, router).cumsum(-1)
        return _layer(before, router, bias, w13, w2), _routed(before, logits, w13, w2, elsewhere)

    assert _products(compile_for_h200(model, _inputs, tokens=1)) == (1, 5)


def test_products_that_are_written_out():
    """With `coordinate_descent_tuning` those of one token are sums; of another layer they stay so."""

    def model(x, router, bias, w13, w2, gate, up, down, last):
        return _shared_layer(x, router, bias, w13, w2, gate, up, down, last), F.linear(x, last)

    with torch._inductor.config.patch(coordinate_descent_tuning=True):
        compiled = compile_for_h200(model, _inputs, tokens=1)
        stays = compile_for_h200(model, _inputs, tokens=1, graph_pass=None)
    assert _products(compiled) == (4, 0) and _products(stays) == (0, 0)
    generated = [name for name in compiled.launches if name.startswith("triton_")]
    assert len(generated) == 2, "the last product, and gelu(gate) * up: no cast of the router's weight"
