"""Every stage and fusion target by itself, in every dtype, against plain float64 arithmetic.

A product's bound is one epsilon of its dtype by norm (half for the rounding, half for order of summation and bias).
Gates and sums compute in float32 and round once, so each element is within half an epsilon of its exact value.
"""

import pytest
import torch

import moe_ops
from moe_ops import Activation
from moe_ops.reference import reference_activation
from tests.cases import MORE_ACTIVATIONS
from tests.helpers import RELATIVE_NORM, relative_error

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
E, K, T, H, I = 13, 3, 33, 19, 11
ACTIVATIONS = [
    Activation("silu"),
    Activation("silu", limit=0.5),
    Activation("silu", interleaved=True),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu2"),
    Activation("swiglu_oai"),
    Activation("swiglu_oai", alpha=1.2, limit=0.7, interleaved=True),
    *MORE_ACTIVATIONS,
]


def assert_within_an_epsilon(actual, expected):
    bound = RELATIVE_NORM[actual.dtype]
    if actual.dtype in (torch.bfloat16, torch.float16):
        bound = torch.finfo(actual.dtype).eps
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error = relative_error(actual, expected)
    assert error <= bound, f"relative error {error:.3e} of {actual.dtype}, allowed {bound:.3e}"


def assert_rounded_once(actual, expected):
    assert_within_an_epsilon(actual, expected)
    if actual.dtype in (torch.bfloat16, torch.float16):
        # atol: the float32 sum, whose terms are of order one
        half = 1.001 * torch.finfo(actual.dtype).eps / 2
        torch.testing.assert_close(actual.double(), expected, rtol=half, atol=1e-6)


def plan_and_ids(dropped=False):
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    ids[:, 0] = 4  # a hot expert; some are empty
    ids[ids == 7] = 5
    if dropped:
        ids[::4, 1] = -1
    return moe_ops.build_dispatch(ids, E), ids.long()


def experts_of_rows(ids, plan):
    """The expert of each kept row, in row order."""
    kept = int(plan.expert_offsets[-1])
    return ids.flatten()[plan.sorted_slots[:kept].long()], kept


def laid_out(weight, layout):
    if layout == "transposed":
        return weight.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":
        return torch.nn.functional.pad(weight, (0, 5))[..., : weight.shape[2]]
    return weight


@dtypes
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("layout", ["standard", "transposed", "padded"])
@pytest.mark.parametrize("bias", [False, True])
def test_grouped_gemm(dtype, layout, bias, dropped, poisoned_empty):
    plan, ids = plan_and_ids(dropped)
    x = torch.randn(T * K, H).to(dtype)
    weight, b = (torch.randn(E, 2 * I, H) / H**0.5).to(dtype), torch.randn(E, 2 * I).to(dtype)
    out = moe_ops.grouped_gemm(x, laid_out(weight, layout), plan.expert_offsets, b if bias else None)
    expert, kept = experts_of_rows(ids, plan)
    expected = torch.zeros(T * K, 2 * I, dtype=torch.float64)
    expected[:kept] = torch.einsum("sa,sba->sb", x[:kept].double(), weight.double()[expert])
    if bias:
        expected[:kept] += b.double()[expert]
    assert out.dtype == dtype
    assert_within_an_epsilon(out, expected)
    assert (out[kept:] == 0).all()


@dtypes
@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_grouped_gemm_of_few_rows(dtype, rows):
    """The CPU multiplies these in another way for each number of rows."""
    offsets = torch.tensor([0, rows, rows, 2 * rows], dtype=torch.int32)
    x, weight, bias = (torch.randn(size).to(dtype) for size in [(2 * rows, H), (3, I, H), (3, I)])
    pairs = zip(x.double().split(rows), weight.double()[[0, 2]], bias.double()[[0, 2]], strict=True)
    expected = torch.cat([each @ w.t() + b for each, w, b in pairs])
    assert_within_an_epsilon(moe_ops.grouped_gemm(x, weight, offsets, bias), expected)


@dtypes
def test_aligned_sizes_take_the_librarys_grouped_product(dtype):
    """Sizes in multiples of 16 bytes go through another CPU path."""
    offsets = torch.tensor([0, 40, 40, 96], dtype=torch.int32)
    x, weight = torch.randn(100, 32).to(dtype), torch.randn(3, 48, 32).to(dtype)
    expert = torch.tensor([0] * 40 + [2] * 56)
    expected = torch.zeros(100, 48, dtype=torch.float64)
    expected[:96] = torch.einsum("sa,sba->sb", x[:96].double(), weight.double()[expert])
    assert_within_an_epsilon(moe_ops.grouped_gemm(x, weight, offsets), expected)


@dtypes
def test_weight_gradient(dtype, poisoned_empty):
    """Zero for an idle expert; rows of dropped slots, the last ones, take no part."""
    plan, ids = plan_and_ids(dropped=True)
    x, grad = torch.randn(T * K, H).to(dtype), torch.randn(T * K, I).to(dtype)
    out = torch.ops.moe.grouped_gemm_weight_backward(grad, x, plan.expert_offsets)
    expert, kept = experts_of_rows(ids, plan)
    products = torch.einsum("sb,sa->sba", grad[:kept].double(), x[:kept].double())
    assert_within_an_epsilon(out, torch.zeros(E, I, H, dtype=torch.float64).index_add(0, expert, products))
    assert (out[7] == 0).all()


@dtypes
@pytest.mark.parametrize("step", [1, 2], ids=["rows", "every other column"])
@pytest.mark.parametrize("offsets", [[0, 40, 40, 96], [0, 3, 3, 5]], ids=str)
def test_weight_gradients_of_aligned_sizes_take_the_librarys_products(dtype, offsets, step, poisoned_empty):
    """One call for all experts, in bfloat16 one of padded rows; what a dropped row holds takes no part in either."""
    x, grad = (torch.randn(100, size * step).to(dtype)[:, ::step] for size in (32, 48))
    x[offsets[-1] :], grad[offsets[-1] :] = float("nan"), float("inf")
    out = torch.ops.moe.grouped_gemm_weight_backward(grad, x, torch.tensor(offsets, dtype=torch.int32))
    ranges = zip(offsets[:-1], offsets[1:], strict=True)
    expected = [grad[start:end].double().T @ x[start:end].double() for start, end in ranges]
    assert_within_an_epsilon(out, torch.stack(expected))
    assert (out[1] == 0).all()


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.spec)
def test_gated_activation(dtype, activation):
    gate_up = torch.randn(T, 2 * I).to(dtype)
    expected = torch.stack([reference_activation(row, activation) for row in gate_up.double()])
    assert_rounded_once(moe_ops.gated_activation(gate_up, activation), expected)


@dtypes
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_combine(dtype, dropped, shared, poisoned_empty):
    plan, _ = plan_and_ids(dropped)
    rows, weights, addend = torch.randn(T * K, H).to(dtype), torch.rand(T, K), torch.randn(T, H).to(dtype)
    out = moe_ops.combine(rows, weights, plan.inverse, addend if shared else None)
    inverse = plan.inverse.long().view(T, K)
    picked = torch.where(inverse[..., None] >= 0, rows.double()[inverse.clamp(min=0)], 0.0)
    expected = torch.einsum("tkh,tk->th", picked, weights.double())
    if shared:
        expected += addend.double()
    assert out.dtype == dtype
    assert_rounded_once(out, expected)


@dtypes
@pytest.mark.parametrize("added", [False, True])
def test_combine_takes_in_a_gated_output_and_a_residual(dtype, added):
    """One rounding for all of it."""
    plan, _ = plan_and_ids(True)
    rows, weights = torch.zeros(T * K, H).to(dtype), torch.rand(T, K)
    shared, gate, residual = (torch.randn(T, columns).to(dtype) for columns in (H, 1, H))
    out = moe_ops.combine(rows, weights, plan.inverse, shared, gate, residual if added else None)
    expected = shared.double() * torch.sigmoid(gate.double())
    assert_rounded_once(out, expected + residual.double() if added else expected)


def test_combine_reads_no_row_for_a_dropped_slot():
    rows = torch.ones(4, H)
    rows[0] = float("nan")
    inverse = torch.tensor([1, -1, 2, 3], dtype=torch.int32)
    out = moe_ops.combine(rows, torch.full((2, 2), 0.5), inverse)
    assert torch.equal(out, torch.tensor([[0.5], [1.0]]).expand(2, H))


@dtypes
def test_permute_is_exact(dtype):
    plan, _ = plan_and_ids()
    x = torch.randn(T, H).to(dtype)
    assert torch.equal(moe_ops.permute(x, plan.sorted_slots), x[plan.sorted_slots.long() // K])


@dtypes
@pytest.mark.parametrize("activation", [ACTIVATIONS[0], ACTIVATIONS[5], ACTIVATIONS[7]], ids=lambda a: a.spec)
def test_fusion_targets(dtype, activation):
    plan, ids = plan_and_ids()
    rows = (2 if activation.is_gated else 1) * I
    x, w13 = torch.randn(T, H).to(dtype), (torch.randn(E, rows, H) / H**0.5).to(dtype)
    bias, weights = torch.randn(E, rows).to(dtype), torch.rand(T, K)
    up = moe_ops.gather_gemm_act(x, w13, plan, activation, bias)
    expert, _ = experts_of_rows(ids, plan)
    token = plan.sorted_slots.long() // K
    gate_up = torch.einsum("sa,sba->sb", x.double()[token], w13.double()[expert]) + bias.double()[expert]
    expected = torch.stack([reference_activation(row, activation) for row in gate_up])
    error, bound = relative_error(up, expected), RELATIVE_NORM[dtype]
    assert error <= bound, f"gather_gemm_act: {error:.3e}, allowed {bound:.3e}"
    w2, shared = (torch.randn(E, H, I) / I**0.5).to(dtype), torch.randn(T, H).to(dtype)
    out = moe_ops.gemm_combine(up, w2, weights, plan, None, shared)
    down = torch.einsum("si,shi->sh", up.double(), w2.double()[expert])
    expected = torch.einsum("tkh,tk->th", down[plan.inverse.long().view(T, K)], weights.double())
    error = relative_error(out, expected + shared.double())
    assert error <= bound, f"gemm_combine: {error:.3e}, allowed {bound:.3e}"
