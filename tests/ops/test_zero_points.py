"""Integers of 4 bits with zero points: what they stand for, how weights become such, products and layers of them."""

import pytest
import torch

import moe_ops
from moe_ops import ScaledWeight
from moe_ops.int4 import INTEGERS
from moe_ops.scaled import scaled_linear
from moe_ops.weight_formats import dequantised, quantised_weight
from tests.helpers import assert_matches_oracle, assert_same, grads_of, mixed
from tests.kernels import oracles
from tests.kernels.test_scaled_integers import dense, made
from tests.ops.test_int4 import BLOCKS, FLOATS, A, B, E, K, T, plan


def stored_weight(shape=(E, B, A), block=(1, 32), dtype=torch.bfloat16):
    pairs, scale = made(*shape, block, dtype)
    return ScaledWeight(pairs, scale, block, torch.randint(0, 16, scale.shape, dtype=torch.uint8))


def value_of(weight):
    return dense(weight.weight, weight.scale, weight.block, weight.zero)


@pytest.mark.parametrize("scale_dtype", FLOATS, ids=str)
def test_what_codes_scales_and_zero_points_stand_for(scale_dtype):
    """Every code with every zero point."""
    pairs = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(1, 16, 1)
    zero = torch.arange(16, dtype=torch.uint8).repeat_interleave(16).view(1, 256, 1)
    weight = ScaledWeight(pairs, torch.randn(1, 256, 1).to(scale_dtype), (1, 32), zero)
    found = dequantised(scaled_linear("weight", weight, None), torch.float64)
    assert torch.equal(found, value_of(weight))
    assert found[0, 0, :2].tolist() == [0, 0] and found[0, 255, 30] == 0


def test_eights_are_what_no_zero_points_are():
    weight = stored_weight()
    eights = ScaledWeight(weight.weight, weight.scale, weight.block, torch.full_like(weight.zero, 8))
    without = ScaledWeight(weight.weight, weight.scale, weight.block)
    assert torch.equal(*(moe_ops.dequantise_weight(each) for each in (eights, without)))


def test_weights_lie_between_the_least_and_the_largest():
    """Of those on one side of 0, 0 is the other end."""
    steps = torch.arange(16).repeat(2)
    weight = torch.stack((steps - 5, steps, steps - 15, 0 * steps, steps[:16].repeat_interleave(2) - 20))[
        None
    ]
    found = quantised_weight(weight / 4, (1, 32), INTEGERS, zero_points=True)
    assert found.zero[0, :, 0].tolist() == [5, 0, 15, 0, 15] and found.zero.dtype == torch.uint8
    assert found.scale[0, :, 0].tolist() == pytest.approx([0.25, 0.25, 0.25, 1, 5 / 15])
    assert torch.equal(value_of(found)[0, :4], weight[0, :4] / 4)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", [(1, 32), (4, 96)])
def test_a_weight_is_within_half_a_step_of_what_it_was(block, dtype):
    weight = (torch.randn(E, 10, 96) + torch.linspace(-2, 2, E)[:, None, None]).to(dtype)
    weight[1, :4], weight[2, 0, 0] = 0, float("nan")
    found = quantised_weight(weight, block, INTEGERS, zero_points=True)
    assert found.scale.dtype == dtype and found.zero.shape == found.scale.shape and (found.zero < 16).all()
    assert (value_of(found)[1, :4] == 0).all()
    spread = found.scale.double().repeat_interleave(block[0], 1)[:, :10].repeat_interleave(block[1], 2)
    error = (value_of(found) - weight.double()).abs()
    assert error[2, 0, :32].isnan().all() and not error[2, block[0] :].isnan().any()
    assert (error.nan_to_num() <= spread.nan_to_num() * 0.57).all()  # scales are rounded too
    symmetric = value_of(quantised_weight(weight[3:], block, INTEGERS)) - weight[3:].double()
    assert error[3:].norm() < 0.9 * symmetric.norm()


@pytest.mark.parametrize("value", [6e-8, 1e-45])
def test_weights_too_small_for_a_scale_are_zeros(value):
    weight = torch.full((1, 1, 32), value).to(torch.float16 if value > 1e-10 else torch.float32)
    found = quantised_weight(weight, (1, 32), INTEGERS, zero_points=True)
    assert weight.all() and (found.scale == 1).all() and not value_of(found).any()


@pytest.mark.parametrize(
    ("dtype", "block", "scale_dtype", "tokens"), mixed(FLOATS, BLOCKS, FLOATS, (0, 1, 7, 33)), ids=str
)
def test_products(dtype, block, scale_dtype, tokens):
    weight, at = stored_weight(block=block, dtype=scale_dtype), plan(tokens)
    x, bias = torch.randn(tokens, A).to(dtype), torch.randn(E, B).to(dtype)
    rows = x[at.sorted_slots // K]
    expected = oracles.grouped_gemm(rows, value_of(weight), at.expert_offsets, bias)
    zero = weight.zero.mT.contiguous().mT
    for stored in (weight, ScaledWeight(weight.weight, weight.scale, block, zero)):
        for given, slots in ((x, at.sorted_slots), (rows, None)):
            out = moe_ops.scaled_grouped_gemm(given, stored, at.expert_offsets, bias, sorted_slots=slots)
            assert out.dtype == dtype
            assert_matches_oracle(out, expected)


def test_gradients():
    weight, at = stored_weight(dtype=torch.float64), plan()
    x = torch.randn(T, A, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(E, B, dtype=torch.float64, requires_grad=True)

    def ours():
        return moe_ops.scaled_grouped_gemm(x, weight, at.expert_offsets, bias, sorted_slots=at.sorted_slots)

    def usual():
        rows = moe_ops.permute(x, at.sorted_slots)
        return moe_ops.grouped_gemm(rows, value_of(weight), at.expert_offsets, bias)

    assert_same(grads_of(ours, (x, bias)), grads_of(usual, (x, bias)), 1e-12)


@pytest.mark.parametrize(("tokens", "dtype"), mixed((0, 1, 7, 33), FLOATS[::2]), ids=str)
def test_a_layer_is_that_of_the_weights_it_stands_for(tokens, dtype):
    """One of its weights may have no zero points."""
    hidden, inner = 64, 96
    w13 = stored_weight((E, 2 * inner, hidden), (1, 64), dtype)
    w2 = stored_weight((E, hidden, inner), (1, 96), torch.float16)
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 3)
    ids = torch.randint(-1, E, (tokens, 3), dtype=torch.int32)
    for down in (w2, ScaledWeight(w2.weight, w2.scale, w2.block)):
        out = moe_ops.scaled_fused_experts(x, w13, down, weights, ids)
        expected = moe_ops.fused_experts(x.double(), value_of(w13), value_of(down), weights.double(), ids)
        assert_matches_oracle(out, expected)
    out = moe_ops.scaled_fused_experts(x, w13, w2, weights, ids)
    compiled = torch.compile(moe_ops.scaled_fused_experts, backend="aot_eager", fullgraph=True)
    assert_same([compiled(x, w13, w2, weights, ids)], [out], 1e-6)
    if tokens:
        layer = torch.vmap(lambda x, weights, ids: moe_ops.scaled_fused_experts(x, w13, w2, weights, ids))
        assert_same([layer(*(each[:, None] for each in (x, weights, ids)))[:, 0]], [out], 1e-6)


def test_a_batch_of_zero_points():
    weight = stored_weight()
    zeros = torch.randint(0, 16, (2, *weight.zero.shape), dtype=torch.uint8)

    def copy(zero):
        return moe_ops.dequantise_weight(ScaledWeight(weight.weight, weight.scale, weight.block, zero))

    assert torch.equal(torch.vmap(copy)(zeros), torch.stack([copy(zero) for zero in zeros]))


PAIRS, SCALE = torch.zeros(2, 3, 16, dtype=torch.uint8), torch.rand(2, 3, 1)
ZERO = torch.zeros(2, 3, 1, dtype=torch.uint8)
REFUSED = {
    "weights of 8 bits": (
        (PAIRS.to(torch.int8), SCALE, None, ZERO), ValueError,
        "zero with weights of torch.int8: expected None, only integers of 4 bits have it",
    ),
    "MXFP4": ((PAIRS, ZERO, None, ZERO), ValueError, "zero with weights of MXFP4: expected None"),
    "MXFP4 by its dtype": (
        (PAIRS, ZERO.view(torch.float8_e8m0fnu), None, ZERO), ValueError, "zero with weights of MXFP4",
    ),
    "another dtype": (
        (PAIRS, SCALE, None, ZERO.int()), TypeError, "zero has dtype torch.int32: expected torch.uint8",
    ),
    "floats": ((PAIRS, SCALE, None, ZERO.float()), TypeError, "zero has dtype torch.float32: expected torch.uint8"),
    "no tensor": ((PAIRS, SCALE, None, 8), TypeError, "zero=8: expected a torch.Tensor"),
    "too many": (
        (PAIRS, SCALE, None, ZERO.repeat(1, 1, 2)), ValueError, r"zero has shape \[2, 3, 2\]: expected \[2, 3, 1\]",
    ),
    "elsewhere": ((PAIRS, SCALE, None, ZERO.to("meta")), ValueError, "zero is on meta: expected cpu"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    parts, kind, message = REFUSED[what]
    weight, x = ScaledWeight(*parts), torch.randn(2, 16 if what == "weights of 8 bits" else 32)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(kind, match=message):
        moe_ops.scaled_grouped_gemm(x, weight, offsets)
    with pytest.raises(kind, match=message):
        moe_ops.dequantise_weight(weight)


def test_a_layer_names_the_weight_whose_zero_points_are_refused():
    ids = torch.zeros(1, 1, dtype=torch.int32)
    up = ScaledWeight(torch.zeros(2, 64, 16, dtype=torch.uint8), torch.rand(2, 64, 1))
    down = ScaledWeight(
        torch.zeros(2, 32, 16, dtype=torch.uint8), torch.rand(2, 32, 1), None, torch.zeros(2, 32, 1).int()
    )
    with pytest.raises(TypeError, match="w2_zero has dtype"):
        moe_ops.scaled_fused_experts(torch.randn(1, 32), up, down, torch.ones(1, 1), ids)
