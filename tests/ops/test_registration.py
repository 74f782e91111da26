"""Operators as the compiler sees them: opcheck on every one, tags, single registration, cache key."""

import subprocess
import sys

import pytest
import torch

import moe_ops

OPS = torch.ops.moe
OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
SLOTS = torch.tensor([3, 0, 1, 2, 4, 5], dtype=torch.int32)
INVERSE = torch.tensor([1, 2, 3, 0, 4, -1], dtype=torch.int32)
IDS = torch.tensor([[0, 2], [2, 0], [2, -1]], dtype=torch.int32)


def t(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def samples():
    """One or more argument tuples for every operator; tensors that may require grad do."""
    moe = (t(3, 4), t(3, 3), t(3, 8, 4), t(3, 4, 4), t(3, 8), t(3, 4), t(3), None, "top_k=2", "silu")
    return {
        "topk_routing": [
            (t(5, 8), None, "top_k=2"),
            (t(5, 8), torch.randn(8), "top_k=3;score_fn=sigmoid;scale=2.0"),
        ],
        "topk_routing_backward": [(t(3, 8), t(3, 8), torch.randint(8, (3, 8)).int(), "top_k=8")],
        "build_dispatch": [(IDS, None, 3), (IDS.long(), torch.tensor([1, -1, 0], dtype=torch.int32), 2)],
        "permute": [(t(3, 4), SLOTS)],
        "permute_backward": [(t(6, 4), SLOTS, 3)],
        "grouped_gemm": [
            (t(6, 4), t(3, 5, 4), OFFSETS, t(3, 5)),
            (t(6, 4), t(3, 4, 5).transpose(1, 2), OFFSETS, None),
        ],
        "grouped_gemm_weight_backward": [(t(6, 5), t(6, 4), OFFSETS)],
        "gated_activation": [(t(6, 8), "silu"), (t(6, 8), "relu2"), (t(6, 8), "swiglu_oai;interleaved=True")],
        "gated_activation_backward": [(t(6, 4), t(6, 8), "gelu")],
        "combine": [(t(6, 4), t(3, 2), INVERSE, t(3, 4)), (t(6, 4), t(3, 2), INVERSE, None)],
        "combine_backward": [(t(3, 4), t(6, 4), t(3, 2), INVERSE)],
        "routing_dispatch": [(t(5, 8), torch.randn(8), None, 8, "top_k=2")],
        "gather_gemm_act": [(t(3, 4), t(3, 8, 4), SLOTS, OFFSETS, t(3, 8), "silu")],
        "gemm_combine": [(t(6, 4), t(3, 5, 4), OFFSETS, t(3, 5), t(3, 2), INVERSE, t(3, 5))],
        "fused_experts": [
            (t(3, 4), t(3, 8, 4), t(3, 4, 4), t(3, 2), IDS, t(3, 8), t(3, 4), None, t(3, 4), "silu")
        ],
        "fused_moe": [moe, (*moe[:4], None, None, None, None, *moe[8:])],
    }


def all_operators():
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name[:5] == "moe::"
    }
    return sorted(names)


@pytest.mark.parametrize("name", all_operators())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(name, dtype):
    for args in samples()[name]:
        cast = [
            a.detach().to(dtype).requires_grad_(a.requires_grad)
            if isinstance(a, torch.Tensor) and a.is_floating_point()
            else a
            for a in args
        ]
        result = torch.library.opcheck(getattr(OPS, name).default, tuple(cast))
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", all_operators())
def test_schema_is_small_functional_and_tagged(name):
    op = getattr(OPS, name).default
    assert len(op._schema.arguments) <= 10
    assert not op._schema.is_mutable
    assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(op.tags)


@pytest.mark.parametrize("name", all_operators())
def test_every_operator_has_an_autograd_kernel(name):
    for key in ("AutogradCPU", "AutogradCUDA"):
        kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"moe::{name}", key)
        assert kernel
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moe::{name}", "Autograd")


def empty_samples():
    none, offsets, slots = t(0, 4), torch.zeros(4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    w13, w2, weights, ids = t(3, 8, 4), t(3, 4, 4), t(0, 2), torch.zeros(0, 2, dtype=torch.int32)
    return {
        "topk_routing": (t(0, 8), None, "top_k=2"),
        "topk_routing_backward": (t(0, 2), t(0, 8), ids, "top_k=2"),
        "build_dispatch": (ids, None, 3),
        "permute": (none, slots),
        "permute_backward": (none, slots, 0),
        "grouped_gemm": (none, w13, offsets, t(3, 8)),
        "grouped_gemm_weight_backward": (t(0, 5), none, offsets),
        "gated_activation": (t(0, 8), "silu"),
        "gated_activation_backward": (none, t(0, 8), "gelu"),
        "combine": (none, weights, slots, t(0, 4)),
        "combine_backward": (none, none, weights, slots),
        "routing_dispatch": (t(0, 8), None, None, 3, "top_k=2"),
        "gather_gemm_act": (none, w13, slots, offsets, None, "silu"),
        "gemm_combine": (none, w2, offsets, None, weights, slots, None),
        "fused_experts": (none, w13, w2, weights, ids, None, None, None, None, "silu"),
        "fused_moe": (none, t(0, 3), w13, w2, None, None, None, None, "top_k=2", "silu"),
    }


@pytest.mark.parametrize("name", all_operators())
def test_no_tokens(name):
    """T = 0 works in the implementation and in the fake; what does not shrink with T is zero."""
    args = empty_samples()[name]
    outputs = getattr(OPS, name).default(*args)
    fakes = getattr(OPS, name).default(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
    pairs = zip(*(out if isinstance(out, tuple) else (out,) for out in (outputs, fakes)), strict=True)
    for out, fake in pairs:
        assert out.shape == fake.shape
        assert (out == 0).all()


def test_registering_twice_raises(tmp_path):
    code = f"""
import importlib.util, sys, moe_ops
spec = importlib.util.spec_from_file_location("again.permute", {moe_ops.__path__[0]!r} + "/permute.py")
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0
    assert "moe::permute is already registered" in result.stderr


def test_cache_key_tag_keeps_the_users():
    code = """
import torch
torch.compiler.config.cache_key_tag = "mine"
import moe_ops
print(torch.compiler.config.cache_key_tag, moe_ops.source_hash())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tag, source_hash = result.stdout.split()
    assert tag == f"mine+moe-{source_hash}"


def test_imports_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch, moe_ops, layers, inductor_passes
x, w13, w2 = torch.randn(3, 4), torch.randn(4, 8, 4), torch.randn(4, 4, 4)
print(moe_ops.fused_moe(x, torch.randn(3, 4), w13, w2, moe_ops.RoutingConfig()).shape)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
