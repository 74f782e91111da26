"""MultiplyHalves: float32 logits on a GPU are multiplied without float32 copies of tokens and weights."""

import pytest
import torch

import moe_ops
from tests.compile.fake_cuda import body, compile_for_h200

HIDDEN, EXPERTS, INTERMEDIATE, TOP_K = 64, 16, 32, 2


def _inputs(tokens, dtype=torch.bfloat16, router_dtype=None):
    shapes = (
        (tokens, HIDDEN),
        (EXPERTS, HIDDEN),
        (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        (EXPERTS, HIDDEN, INTERMEDIATE),
    )
    x, router, w13, w2 = (torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes)
    return x, router.to(router_dtype or dtype), w13, w2


def _layer(x, router, w13, w2):
    logits = torch.nn.functional.linear(x.float(), router.float())
    return moe_ops.fused_moe(x, logits, w13, w2, moe_ops.RoutingConfig(TOP_K), emit="stages")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [9, 64])
def test_no_copy_in_float32(dtype, tokens):
    compiled = compile_for_h200(_layer, lambda tokens: _inputs(tokens, dtype), tokens=tokens)
    code = body(compiled.code)
    assert "mm_dtype(" in code and "extern_kernels.mm(" not in code
    assert not [name for name in compiled.launches if name.startswith("triton_")]


@pytest.mark.parametrize("tokens", [9, 4])
def test_logits_that_are_capped_afterwards(tokens):
    """Nine tokens are a library's product of halves, four a kernel of ours."""

    def capped(x, router, w13, w2):
        logits = torch.tanh(torch.nn.functional.linear(x.float(), router.float()) / 30) * 30
        return moe_ops.fused_moe(x, logits, w13, w2, moe_ops.RoutingConfig(TOP_K), emit="stages")

    compiled = compile_for_h200(capped, _inputs, tokens=tokens)
    code = body(compiled.code)
    assert ("mm_dtype(" in code) == (tokens == 9) and "extern_kernels.mm(" not in code
    assert len([name for name in compiled.launches if name.startswith("triton_")]) == 1


def test_with_any_number_of_tokens():
    compiled = compile_for_h200(_layer, _inputs, symbolic=True)
    assert "mm_dtype(" in body(compiled.code)


@pytest.mark.parametrize("router_dtype", [torch.float32, torch.float16])
def test_a_router_in_another_dtype_stays(router_dtype):
    compiled = compile_for_h200(_layer, lambda tokens: _inputs(tokens, router_dtype=router_dtype))
    assert "mm_dtype(" not in body(compiled.code)


def test_a_product_that_is_no_router_stays():
    def dense(x, router, w13, w2):
        return torch.nn.functional.linear(x.float(), router.float()), _layer(x, router * 2, w13, w2)

    code = body(compile_for_h200(dense, _inputs).code)
    assert code.count("mm_dtype(") == 1 and code.count("extern_kernels.mm(") == 1
