"""dense_gemm by its definition: values in both result dtypes, gradients, and what it refuses."""

import sys

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import inductor_passes
import moe_ops
from moe_ops import _library
from moe_ops.arguments import DenseGemm
from tests.helpers import (
    RELATIVE_NORM,
    assert_matches_oracle,
    assert_same,
    grads_of,
    mixed,
    relative_error,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def problem(tokens=5, dtype=torch.float32, features=13):
    """A weight that is a view with a step between its rows, and a bias that takes every other number."""
    weight = torch.randn(features, 11).to(dtype)[:, 2:8]
    return torch.randn(6, tokens).to(dtype).t(), weight, torch.randn(features, 2).to(dtype)[:, 1]


def oracle(x, weight, bias=None):
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize(
    ("dtype", "tokens", "compiled"), mixed(DTYPES, (0, 1, 7, 33), (False, True), rounds=3), ids=str
)
def test_values(dtype, tokens, compiled):
    x, weight, bias = problem(tokens, dtype)
    run = torch.compile(moe_ops.dense_gemm, fullgraph=True, dynamic=False) if compiled else moe_ops.dense_gemm
    for given in (None, bias):
        out = run(x, weight, given)
        assert out.dtype == dtype
        assert_matches_oracle(out, oracle(x, weight, given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_of_halves_is_not_rounded_to_them(dtype):
    x, weight, bias = problem(7, dtype)
    for given in (None, bias):
        out = moe_ops.dense_gemm(x, weight, given, dtype=torch.float32)
        assert out.dtype == torch.float32
        assert relative_error(out, oracle(x, weight, given)) <= RELATIVE_NORM[torch.float32]


def test_products_of_a_library(monkeypatch):
    """What a GPU runs for more tokens; a product of halves to float32 is there alone."""
    monkeypatch.setattr(_library, "has_launches", lambda args: False)
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    x, weight, bias = problem(7, torch.bfloat16)
    for given, dtype in ((None, torch.float32), (bias, torch.float32), (bias, torch.bfloat16)):
        out = sys.modules["moe_ops.dense_gemm"]._cuda(DenseGemm(x, weight, given, dtype))
        assert out.dtype == dtype
        assert relative_error(out, oracle(x, weight, given)) <= RELATIVE_NORM[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 300])
def test_values_on_a_gpu(tokens):
    x, weight, bias = problem(tokens, torch.bfloat16)
    for given, dtype in ((None, torch.float32), (bias, torch.float32), (bias, torch.bfloat16)):
        out = moe_ops.dense_gemm(
            *(each if each is None else each.cuda() for each in (x, weight, given)), dtype
        )
        assert_matches_oracle(out.cpu(), oracle(x, weight, given))


def test_compiled_with_our_passes_on_a_cpu_it_is_torchs_own():
    given = problem(7)
    compiled = torch.compile(moe_ops.dense_gemm, fullgraph=True, options=inductor_passes.options())
    with torch.no_grad():
        out, (code,) = run_and_get_code(compiled, *given)
    assert "torch.ops.moe" not in code and "extern_kernels.addmm(" in code
    assert_matches_oracle(out, oracle(*given))


def test_gradients():
    tensors = [each.requires_grad_() for each in problem(7, torch.float64)]
    assert_same(
        grads_of(lambda: moe_ops.dense_gemm(*tensors), tensors), grads_of(lambda: oracle(*tensors), tensors)
    )
    assert torch.autograd.gradgradcheck(moe_ops.dense_gemm, tensors)


def test_gradients_of_float32_logits():
    """They come in float32 and go out in the dtype of what was given."""
    tensors = [each.detach().requires_grad_() for each in problem(7, torch.bfloat16)]
    scale = torch.randn(7, 13)
    ours = grads_of(lambda: moe_ops.dense_gemm(*tensors, dtype=torch.float32) * scale, tensors)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    for grad, expected in zip(ours, grads_of(lambda: oracle(*exact) * scale, exact), strict=True):
        assert grad.dtype == torch.bfloat16
        assert_matches_oracle(grad, expected)


def test_vmap_over_tokens():
    x, weight, bias = problem(4)
    out = torch.func.vmap(moe_ops.dense_gemm, (0, None, None))(torch.stack([x, 2 * x]), weight, bias)
    assert_matches_oracle(out[1], oracle(2 * x, weight, bias))


def test_vmap_over_weights():
    x, weight, bias = problem(4)
    out = torch.func.vmap(moe_ops.dense_gemm, (None, 0, None))(x, torch.stack([weight, 2 * weight]), bias)
    assert_matches_oracle(out[1], oracle(x, 2 * weight, bias))


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert moe_ops.dense_gemm(*problem()).dtype == torch.bfloat16
        assert moe_ops.dense_gemm(*problem(), dtype=torch.float32).dtype == torch.float32


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        moe_ops.dense_gemm(*problem())
    assert counter.get_total_flops() == 2 * 5 * 13 * 6


@pytest.mark.parametrize(
    "given, dtype, expected",
    [
        (torch.float32, torch.bfloat16, "torch.float32"),
        (torch.bfloat16, torch.float16, "torch.bfloat16 or torch.float32"),
    ],
)
def test_other_result_dtypes_are_refused(given, dtype, expected):
    with pytest.raises(TypeError, match=f"dtype={dtype}: expected {expected}$"):
        moe_ops.dense_gemm(*problem(3, given), dtype=dtype)
