"""A shared expert is part of its layer's launches for a few tokens, if nobody else reads what it computes."""

import re

import pytest
import torch
from torch.nn import functional as F

import inductor_passes
import moe_ops
from tests.compile.fake_cuda import body, compile_for_h200
from tests.helpers import relative_error

HIDDEN, EXPERTS, INTERMEDIATE, SHARED = 64, 66, 32, 48
ROUTING = moe_ops.RoutingConfig(top_k=2)
GROUPS = moe_ops.RoutingConfig(top_k=2, num_groups=6, topk_groups=2)
INSIDE = ["routed_gemv_activation_kernel", "gemv_combine_kernel"]
APART = ["_topk_routing_kernel", "gemv_activation_kernel", "gemv_combine_kernel"]
ALONE = [*["dense_gemv_kernel"] * 3, *INSIDE]


def _empty(*shape):
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16)


def _inputs(tokens, features=SHARED):
    routed = _empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN), _empty(EXPERTS, HIDDEN, INTERMEDIATE)
    shared = _empty(features, HIDDEN), _empty(features, HIDDEN), _empty(HIDDEN, features)
    return _empty(tokens, HIDDEN), _empty(tokens, EXPERTS), *routed, *shared


def _mlp(hidden, gate, up, down):
    return F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down)


def _plus(shared_of=_mlp, routing=ROUTING, **options):
    def layer(hidden, logits, w13, w2, *weights):
        shared = shared_of(hidden, *weights)
        return hidden + moe_ops.fused_moe(
            hidden, logits, w13, w2, routing, shared=shared, emit="stages", **options
        )

    return layer


def _launches(function, tokens=1, inputs=_inputs, **options):
    compiled = compile_for_h200(function, inputs, tokens=tokens, **options)
    names = [re.sub(r"_\d+$", "", name) for name in compiled.launches]
    of_a_library = ["mm"] * body(compiled.code).count("extern_kernels.mm(")
    return [name for name in names if not name.startswith("triton_")] + of_a_library


@pytest.mark.parametrize("tokens", [1, 2])
def test_it_is_in_both_launches(tokens):
    assert _launches(_plus(), tokens) == INSIDE
    assert _launches(_plus(routing=GROUPS), tokens) == APART


@pytest.mark.parametrize("tokens", [1, 2])
def test_as_models_write_it(tokens):
    """In three dimensions, the residual added behind."""

    def layer(hidden, logits, w13, w2, *weights):
        states = hidden.unsqueeze(0)
        gate, up, down = weights
        gate, up = (F.linear(states.view(-1, HIDDEN), each).view(1, tokens, SHARED) for each in (gate, up))
        shared = F.linear((F.silu(gate) * up).view(-1, SHARED), down).view(states.shape)
        routed = moe_ops.fused_moe(states.view(-1, HIDDEN), logits, w13, w2, ROUTING, emit="stages")
        return states + (routed.view(states.shape) + shared)

    assert _launches(layer, tokens) == INSIDE


def test_products_of_a_library():
    """Of more tokens than one and more features than a router has experts: they are no `dense_gemm`."""
    assert _launches(_plus(), 2, lambda tokens: _inputs(tokens, 1024)) == INSIDE


def test_wide_ones_are_for_fewer_tokens():
    def narrow(tokens):
        return _inputs(tokens, INTERMEDIATE)

    assert _launches(_plus(), 4, narrow) == INSIDE
    assert len(_launches(_plus(), 5, narrow)) > 2 and len(_launches(_plus(), 3)) > 2


def test_gate_and_up_rows_in_one_weight():
    def inputs(tokens):
        *others, _, _, down = _inputs(tokens)
        return *others, _empty(2 * SHARED, HIDDEN), down

    def mlp(hidden, both, down):
        gate, up = F.linear(hidden, both).chunk(2, 1)
        return F.linear(F.silu(gate) * up, down)

    assert _launches(_plus(mlp), 1, inputs) == INSIDE


def test_experts_that_somebody_else_chose():
    def inputs(tokens):
        hidden, _, *weights = _inputs(tokens)
        ids = torch.empty(tokens, 2, device="cuda", dtype=torch.int32)
        return hidden, torch.empty(tokens, 2, device="cuda"), ids, *weights

    def layer(hidden, topk_weights, ids, w13, w2, *weights):
        shared = _mlp(hidden, *weights)
        return moe_ops.fused_experts(hidden, w13, w2, topk_weights, ids, shared=shared, emit="stages")

    assert _launches(layer, 2, inputs) == APART[1:]


def test_other_rows_of_the_same_tokens_are_others():
    """Two tokens as one row: the sizes would fit."""

    def inputs(tokens):
        hidden, logits, w13, w2, *_ = _inputs(tokens)
        first = _empty(SHARED, 2 * HIDDEN), _empty(SHARED, 2 * HIDDEN)
        return hidden, logits, w13, w2, *first, _empty(2 * HIDDEN, SHARED)

    def of_pairs(hidden, *weights):
        return _mlp(hidden.view(-1, 2 * HIDDEN), *weights).view(-1, HIDDEN)

    assert len(_launches(_plus(of_pairs), 2, inputs)) > 2


def test_halves_that_lie_differently_keep_launches_of_their_own():
    def inputs(tokens):
        *others, gate, _, down = _inputs(tokens)
        return *others, gate, _empty(SHARED, 2 * HIDDEN).narrow(1, 0, HIDDEN), down

    assert sorted(_launches(_plus(), 1, inputs)) == sorted(ALONE)


def test_its_gate_joins_too():
    def inputs(tokens):
        return *_inputs(tokens), _empty(1, HIDDEN)

    def gated(hidden, gate, up, down, weight):
        return torch.sigmoid(F.linear(hidden, weight)) * _mlp(hidden, gate, up, down)

    assert _launches(_plus(gated), 1, inputs) == ["dense_gemv_kernel", *INSIDE]


def _other_gate(hidden, gate, up, down):
    return F.linear(F.relu(F.linear(hidden, gate)) * F.linear(hidden, up), down)


def _own_gate(hidden, gate, up, down):
    return F.linear(F.gelu(F.linear(hidden, gate)) * F.linear(hidden, up), down)


def _of_others(hidden, gate, up, down):
    return _mlp(hidden * 2, gate, up, down)


def _by_columns(hidden, gate, up, down):
    return (F.silu(F.linear(hidden, gate)) * F.linear(hidden, up)) @ down.view(-1, HIDDEN)


def _by_itself(hidden, gate, up, down):
    gated = F.silu(F.linear(hidden, gate)) * F.linear(hidden, up)
    return F.linear(gated * hidden.sum(1, keepdim=True), down)


@pytest.mark.parametrize("shared_of", [_other_gate, _own_gate, _of_others, _by_itself])
def test_others_keep_launches_of_their_own(shared_of):
    assert sorted(_launches(_plus(shared_of))) == sorted(ALONE)


def test_products_with_a_bias():
    def inputs(tokens):
        return *_inputs(tokens), _empty(HIDDEN)

    def biased(hidden, gate, up, down, bias):
        return F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down, bias)

    assert sorted(_launches(_plus(biased), 1, inputs)) == sorted(ALONE)


def test_weights_in_columns_and_formulas_keep_them_too():
    assert "dense_gemv_kernel" in _launches(_plus(_by_columns))
    scaled = _launches(_plus(activation=lambda gate, up: F.silu(gate * 1.5) * (up + 0.25)))
    assert scaled.count("dense_gemv_kernel") == 3


def test_what_is_read_elsewhere_stays():
    def seen(hidden, logits, w13, w2, gate, up, down):
        activated = F.silu(F.linear(hidden, gate)) * F.linear(hidden, up)
        shared = F.linear(activated, down)
        out = moe_ops.fused_moe(hidden, logits, w13, w2, ROUTING, shared=shared, emit="stages")
        return hidden + out, activated

    def added(hidden, logits, w13, w2, gate, up, down):
        shared = _mlp(hidden, gate, up, down)
        out = moe_ops.fused_moe(hidden, logits, w13, w2, ROUTING, shared=shared, emit="stages")
        return hidden + out, shared

    for function in (seen, added):
        assert sorted(_launches(function)) == sorted(ALONE)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("routing", [ROUTING, GROUPS], ids=["inside", "groups"])
def test_values(tokens, routing):
    inputs = [torch.randn_like(each.float()).to(each.dtype) for each in _inputs(tokens, INTERMEDIATE)]
    inputs[2:] = [weight / weight.shape[-1] ** 0.5 for weight in inputs[2:]]
    with torch.no_grad():
        compiled = torch.compile(_plus(routing=routing), fullgraph=True, options=inductor_passes.options())
        expected = _plus(routing=routing)(*(each.cpu().double() for each in inputs))
        assert relative_error(compiled(*inputs).cpu(), expected) < 8e-3
