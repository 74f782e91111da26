"""torch.autocast: what matrix products would cast is cast, float64 is kept, gradients have the forward's dtypes."""

import pytest
import torch
from torch.func import vmap

import moe_ops
from moe_ops import RoutingConfig
from tests.helpers import assert_matches_oracle

E, H, I, T = 4, 8, 6, 5
OFFSETS = torch.tensor([0, 3, 3, 7, 10], dtype=torch.int32)
IDS = torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [3, 0]], dtype=torch.int32)
PLAN = moe_ops.build_dispatch(IDS, E)
WEIGHTS = torch.rand(T, 2)


def grouped_gemm(t):
    return moe_ops.grouped_gemm(t["rows"], t["w13"], PLAN.expert_offsets, t["b13"])


def gather_gemm_act(t):
    return moe_ops.gather_gemm_act(t["x"], t["w13"], PLAN, "silu", t["b13"])


def gather_gemm(t):
    return moe_ops.gather_gemm(t["x"], t["w13"], PLAN, t["b13"])


def act_gemm_combine(t):
    return moe_ops.act_gemm_combine(t["gate_up"], t["w2"], WEIGHTS, PLAN, "silu", t["b2"], t["x"])


def gemm_combine(t):
    return moe_ops.gemm_combine(t["up"], t["w2"], WEIGHTS, PLAN, t["b2"], t["x"])


def fused_experts(t, **kwargs):
    biases = {"w13_bias": t["b13"], "w2_bias": t["b2"]}
    return moe_ops.fused_experts(t["x"], t["w13"], t["w2"], WEIGHTS, IDS, **biases, shared=t["x"], **kwargs)


def fused_experts_stages(t):
    return fused_experts(t, emit="stages")


def fused_moe(t):
    return moe_ops.fused_moe(t["x"], t["logits"], t["w13"], t["w2"], RoutingConfig(2))


CALLS = [grouped_gemm, gather_gemm_act, gemm_combine, fused_experts, fused_experts_stages, fused_moe]
CALLS += [gather_gemm, act_gemm_combine]
calls = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = {
        "x": (T, H), "rows": (2 * T, H), "up": (2 * T, I), "gate_up": (2 * T, 2 * I),
        "logits": (T, E), "w13": (E, 2 * I, H), "w2": (E, H, I),
        "b13": (E, 2 * I), "b2": (E, H),
    }  # fmt: skip
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def rounded(t, dtype):
    return {name: value if name == "logits" else value.to(dtype) for name, value in t.items()}


@calls
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_to_the_autocast_dtype(call, dtype):
    given = tensors()
    with torch.autocast("cpu", dtype):
        out = call(given)
    assert out.dtype == dtype
    assert torch.equal(out, call(rounded(given, dtype)))


@calls
def test_float64_is_kept(call):
    given = tensors(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(given)
    assert out.dtype == (given["x"] @ given["x"].t()).dtype == torch.float64
    assert torch.equal(out, call(given))


@calls
@pytest.mark.parametrize("forward_inside", [True, False])
def test_gradients_have_the_dtypes_of_the_forward(call, forward_inside):
    """Also when the backward runs in another autocast state than the forward did."""
    given = {name: value.requires_grad_() for name, value in tensors().items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=forward_inside):
        out = call(given)
    with torch.autocast("cpu", torch.bfloat16, enabled=not forward_inside):
        grads = torch.autograd.grad(out.sin().sum(), list(given.values()), allow_unused=True)
    assert {grad.dtype for grad in grads if grad is not None} == {torch.float32}
    if not forward_inside:
        outside = torch.autograd.grad(call(given).sin().sum(), list(given.values()), allow_unused=True)
        assert all(a is b or torch.equal(a, b) for a, b in zip(grads, outside, strict=True))


@calls
def test_compiled(call):
    given = tensors()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    exact = call(rounded(rounded(given, torch.bfloat16), torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(given)
    assert out.dtype == torch.bfloat16
    assert_matches_oracle(out, exact)


def test_vmap_inside_autocast():
    given = tensors()
    batch = torch.stack([given["x"], -given["x"]])
    run = lambda x: moe_ops.fused_experts(x, given["w13"], given["w2"], WEIGHTS, IDS)  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = vmap(run)(batch)
        expected = torch.stack([run(each) for each in batch])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)


def test_an_input_is_cast_before_it_is_weighed():
    t, weights, ids = tensors(), torch.rand(T, 1), IDS[:, :1].contiguous()

    def weighed(t):
        return moe_ops.fused_experts(
            t["x"], t["w13"], t["w2"], weights, ids, apply_router_weight_on_input=True, emit="fused"
        )

    with torch.autocast("cpu", torch.bfloat16):
        inside = weighed(t)
    assert torch.equal(inside, weighed(rounded(t, torch.bfloat16)))
