"""Layers of few tokens to whose sum something is joined: their router is part of their first launch."""

import logging
import re

import pytest
import torch

import inductor_passes
import moe_ops
from tests.compile.fake_cuda import body, compile_for_h200
from tests.helpers import relative_error

HIDDEN, EXPERTS, INTERMEDIATE = 64, 66, 32
ROUTING = moe_ops.RoutingConfig(top_k=2)
INSIDE = ["routed_gemv_activation_kernel", "gemv_combine_kernel"]
APART = ["_topk_routing_kernel", "gemv_activation_kernel", "gemv_combine_kernel"]


def _empty(*shape):
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16)


def _inputs(tokens):
    weights = _empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN), _empty(EXPERTS, HIDDEN, INTERMEDIATE)
    return _empty(tokens, HIDDEN), _empty(tokens, EXPERTS), *weights


def _with(routing=ROUTING, **options):
    def layer(hidden, logits, w13, w2):
        return hidden + moe_ops.fused_moe(hidden, logits, w13, w2, routing, emit="stages", **options)

    return layer


def _scaled(gate, up):
    return torch.nn.functional.silu(gate * 1.5) * (up + 0.25)


def _launches(function, tokens=1, inputs=_inputs, **options):
    compiled = compile_for_h200(function, inputs, tokens=tokens, **options)
    names = [re.sub(r"_\d+$", "", name) for name in compiled.launches]
    return [name for name in names if not name.startswith("triton_")], body(compiled.code)


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_layer_with_a_residual_is_two_launches(tokens):
    names, code = _launches(_with(), tokens)
    assert names == INSIDE and "torch.ops.moe" not in code


def _shared(hidden, logits, w13, w2):
    return moe_ops.fused_moe(hidden, logits, w13, w2, ROUTING, shared=hidden * 2, emit="stages")


def test_a_gate_of_ones_own_and_a_shared_expert():
    names, _ = _launches(_with(activation=_scaled))
    assert names == INSIDE
    names, _ = _launches(_shared)
    assert names == INSIDE


def _seen(hidden, logits, w13, w2):
    weights, ids = moe_ops.topk_routing(logits, ROUTING)
    out = hidden + moe_ops.fused_experts(hidden, w13, w2, weights, ids, emit="stages")
    return out, ids


def _crossed(hidden, logits, w13, w2):
    weights, _ = moe_ops.topk_routing(logits, ROUTING)
    _, ids = moe_ops.topk_routing(logits * 2, ROUTING)
    return hidden + moe_ops.fused_experts(hidden, w13, w2, weights, ids, emit="stages")


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_seen, APART),
        (_crossed, ["_topk_routing_kernel", *APART]),
        (_with(moe_ops.RoutingConfig(top_k=2, num_groups=6, topk_groups=2)), APART),
    ],
    ids=["ids are read elsewhere", "weights and ids of two routers", "groups"],
)
def test_others_route_in_a_launch_of_their_own(function, names):
    assert sorted(_launches(function)[0]) == sorted(names)


def test_more_tokens_and_any_number_of_them_are_as_before():
    names, _ = _launches(_with(), 64)
    assert "routed_gemv_activation_kernel" not in names and names[0] == "_topk_routing_kernel"
    names, code = _launches(_shared, 2, symbolic=True)
    assert names == [] and "torch.ops.moe.fused_experts.default(" in code


def test_a_map_that_is_not_contiguous_is_left_to_the_operator():
    def mapped(hidden, logits, w13, w2, expert_map):
        layer = _with(expert_map=expert_map)
        return layer(hidden, logits, w13, w2)

    def inputs(tokens):
        strided = torch.empty_strided((EXPERTS,), (2,), device="cuda", dtype=torch.int32)
        return *_inputs(tokens), strided

    names, code = _launches(mapped, inputs=inputs)
    assert names == APART[:1] and "torch.ops.moe.fused_experts.default(" in code


def test_a_plan_that_fails_is_left_to_the_operators_and_told(monkeypatch, caplog):
    def broken(experts, router, shared):
        raise NotImplementedError("no kernel for this")

    monkeypatch.setattr("moe_ops.kernels.plans.decode_together", broken)
    with caplog.at_level(logging.INFO, logger="inductor_passes"):
        assert _launches(_shared)[0] == APART
    assert any(
        "no launch plan with what stands around: NotImplementedError" in each for each in caplog.messages
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_values(tokens):
    inputs = [torch.randn_like(each.float()).to(each.dtype) for each in _inputs(tokens)]
    inputs[2:] = [weight / weight.shape[-1] ** 0.5 for weight in inputs[2:]]
    with torch.no_grad():
        compiled = torch.compile(_with(), fullgraph=True, options=inductor_passes.options())
        expected = _with()(*(each.cpu().double() for each in inputs))
        assert relative_error(compiled(*inputs).cpu(), expected) < 8e-3
