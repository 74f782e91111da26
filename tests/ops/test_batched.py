"""batched_gemm by its definition: values, padding that must not leak, gradients, and the sum that reads its rows."""

import pytest
import torch

import moe_ops
from tests.helpers import RELATIVE_NORM, assert_matches_oracle, assert_same, grads_of, relative_error

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def oracle(x, weight, counts, bias=None):
    rows = torch.arange(x.shape[1]) < counts.unsqueeze(1)
    out = torch.einsum("ema,eba->emb", x.double().masked_fill(~rows.unsqueeze(2), 0), weight.double())
    out = out if bias is None else out + bias.double().unsqueeze(1)
    return out.masked_fill(~rows.unsqueeze(2), 0)


def problem(tokens=5, dtype=torch.float32, experts=4):
    x, weight = torch.randn(experts, tokens, 6), torch.randn(experts, 7, 6)
    counts = torch.randint(tokens + 1, (experts,), dtype=torch.int32)
    return x.to(dtype), weight.to(dtype), counts, torch.randn(experts, 7).to(dtype)


def poisoned(x, counts):
    past = torch.arange(x.shape[1]) >= counts.unsqueeze(1)
    return x.masked_fill(past.unsqueeze(2), float("nan"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_values(dtype, tokens):
    x, weight, counts, bias = problem(tokens, dtype)
    x = poisoned(x, counts)
    assert_matches_oracle(moe_ops.batched_gemm(x, weight, counts, bias), oracle(x, weight, counts, bias))
    compiled = torch.compile(moe_ops.batched_gemm, fullgraph=True, dynamic=False)
    assert_matches_oracle(compiled(x, weight, counts), oracle(x, weight, counts))


def test_counts_outside_their_range():
    x, weight, _, bias = problem(5)
    counts = torch.tensor([-3, 0, 5, 1 << 30], dtype=torch.int32)
    out = moe_ops.batched_gemm(x, weight, counts, bias)
    assert_matches_oracle(out, oracle(x, weight, counts.clamp(0, 5), bias))
    assert not out[:2].any()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients(compiled):
    """NaN in the padding, of the input and of the gradient that comes in, reaches no gradient."""
    x, weight, counts, bias = problem(7, torch.float64)
    counts[0], counts[1] = 0, 7
    tensors = [poisoned(x, counts).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    run = torch.compile(moe_ops.batched_gemm, fullgraph=True) if compiled else moe_ops.batched_gemm

    def ours():
        return poisoned(run(tensors[0], tensors[1], counts, tensors[2]), counts).nan_to_num()

    def theirs():
        return oracle(tensors[0], tensors[1], counts, tensors[2])

    assert_same(grads_of(ours, tensors), grads_of(theirs, tensors))
    out = moe_ops.batched_gemm(tensors[0], tensors[1], counts, tensors[2])
    grad = poisoned(torch.ones_like(out), counts)
    for each in torch.autograd.grad(out, tensors, grad):
        assert each.isfinite().all()


def test_gradient_dtype_does_not_follow_autocast():
    x, weight, counts, _ = problem()
    weight.requires_grad_()
    out = moe_ops.batched_gemm(x, weight, counts)
    with torch.autocast("cpu", torch.bfloat16):
        (grad,) = torch.autograd.grad(out.sum(), weight)
    (expected,) = torch.autograd.grad(oracle(x, weight, counts).sum(), weight)
    assert relative_error(grad, expected) <= RELATIVE_NORM[torch.float32]


def test_autocast():
    x, weight, counts, bias = problem()
    with torch.autocast("cpu", torch.bfloat16):
        assert moe_ops.batched_gemm(x, weight, counts, bias).dtype == torch.bfloat16


def test_vmap():
    x, weight, counts, bias = problem()
    batch = torch.stack([x, 2 * x])
    out = torch.func.vmap(moe_ops.batched_gemm, (0, None, None, None))(batch, weight, counts, bias)
    assert_matches_oracle(out[1], oracle(2 * x, weight, counts, bias))


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, counts, _ = problem()
    with FlopCounterMode(display=False) as counter:
        moe_ops.batched_gemm(x, weight, counts)
    assert counter.get_total_flops() == 2 * 4 * 5 * 6 * 7


@pytest.mark.parametrize("num_rows", [3, 9])
def test_combine_takes_any_number_of_rows(num_rows):
    """Fewer than there are slots, or more, of which the gradient of those that nobody reads is zero."""
    expert_out, weights = torch.randn(num_rows, 4), torch.rand(3, 2)
    inverse = torch.tensor([num_rows - 1, -1, 0, -1, 1, -1], dtype=torch.int32)
    tensors = [expert_out.double().requires_grad_(), weights.double().requires_grad_()]

    def expected():
        rows = tensors[0][inverse.long().clamp(min=0)] * (inverse >= 0).unsqueeze(1)
        return (rows.view(3, 2, 4) * tensors[1].unsqueeze(2)).sum(1)

    assert_matches_oracle(moe_ops.combine(expert_out, weights, inverse), expected())
    ours = grads_of(lambda: moe_ops.combine(*tensors, inverse), tensors)
    assert_same(ours, grads_of(expected, tensors))
