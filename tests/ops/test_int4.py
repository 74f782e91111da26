"""Integers of 4 bits: what codes and scales stand for, how weights become such, products and layers of them."""

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

E, B, A, T, K = 13, 11, 84, 7, 2
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BLOCKS = ((1, 32), (1, 64), (1, A), (4, 128))


def stored_weight(shape=(E, B, A), block=(1, 32), dtype=torch.bfloat16):
    return ScaledWeight(*made(*shape, block, dtype), block)


def value_of(weight):
    return dense(weight.weight, weight.scale, weight.block)


def plan(tokens=T):
    return moe_ops.build_dispatch(torch.randint(-1, E, (tokens, K), dtype=torch.int32), E)


@pytest.mark.parametrize("scale_dtype", FLOATS, ids=str)
def test_what_codes_and_scales_stand_for(scale_dtype):
    pairs = torch.arange(256, dtype=torch.uint8).view(1, 8, 32)
    scale = torch.randn(1, 8, 2).to(scale_dtype)
    linear = scaled_linear("weight", ScaledWeight(pairs, scale), None)
    assert (linear.block_rows, linear.block_columns) == (1, 32)
    found = dequantised(linear, torch.float64)
    assert torch.equal(found, dense(pairs, scale, (1, 32)))
    assert found[0, 0, :2].tolist() == [-8 * scale[0, 0, 0], -8 * scale[0, 0, 0]]


def test_integers_as_compressed_tensors_packs_them():
    """Eight in an int32, that of the first column in its last bits, each with 8 added."""
    values = torch.randint(-8, 8, (B, 64))
    packed = sum((values[:, column::8] + 8) << 4 * column for column in range(8)).to(torch.int32)
    scale = torch.rand(1, B, 2)
    weight = ScaledWeight(packed.view(torch.uint8)[None], scale)
    found = dequantised(scaled_linear("weight", weight, None), torch.float32)
    assert torch.equal(found[0], values * scale[0].repeat_interleave(32, 1))


def test_weights_are_rounded_to_the_nearest_and_of_two_to_the_even():
    values = torch.cat((torch.arange(-15, 16) / 2, torch.zeros(1)))
    below = [-8, -7, -6, -6, -6, -5, -4, -4, -4, -3, -2, -2, -2, -1, 0]
    above = [0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 7, 0]
    weight = torch.stack((values, values.flip(0)))[None] / 4
    found = quantised_weight(weight, (1, 32), INTEGERS)
    assert (found.scale == 0.25).all() and found.scale.dtype == torch.float32
    expected = torch.tensor(below + above)
    assert torch.equal(value_of(found)[0] * 4, torch.stack((expected, expected.flip(0))).double())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("block", [(1, 32), (4, 96)])
def test_a_weight_is_within_half_a_step_of_what_it_was(block, dtype):
    weight = torch.randn(E, 10, 96).to(dtype)
    weight[1, :4], weight[2, 0, 0] = 0, float("nan")
    found = quantised_weight(weight, block, INTEGERS)
    assert found.weight.shape == (E, 10, 48) and found.scale.dtype == dtype
    assert (found.scale[1, : 4 // block[0]] == 1).all() and (value_of(found)[1, :4] == 0).all()
    spread = found.scale.double().repeat_interleave(block[0], 1)[:, :10].repeat_interleave(block[1], 2)
    error = (value_of(found) - weight.double()).abs()
    assert error[2, 0, :32].isnan().all() and not error[2, block[0] :].isnan().any()
    assert (error.nan_to_num() <= spread.nan_to_num() * 0.53).all()  # scales are rounded too


@pytest.mark.parametrize("value", [6e-8, 1e-45])
def test_weights_too_small_for_a_scale_are_zeros(value):
    weight = torch.full((1, 1, 32), value).to(torch.float16 if value > 1e-10 else torch.float32)
    found = quantised_weight(weight, (1, 32), INTEGERS)
    assert weight.all() and (found.scale == 1).all() and not value_of(found).any()


@pytest.mark.parametrize(
    ("dtype", "block", "scale_dtype", "tokens"), mixed(FLOATS, BLOCKS, FLOATS, (0, 1, 7, 33)), ids=str
)
def test_products(dtype, block, scale_dtype, tokens):
    weight, at = stored_weight(block=block, dtype=scale_dtype), plan(tokens)
    x, bias = torch.randn(tokens, A).to(dtype), torch.randn(E, B).to(dtype)
    rows = x[at.sorted_slots // K]
    expected = oracles.grouped_gemm(rows, value_of(weight), at.expert_offsets, bias)
    transposed = weight.weight.transpose(1, 2).contiguous().transpose(1, 2)
    for stored in (weight, ScaledWeight(transposed, weight.scale, block)):
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
        return moe_ops.grouped_gemm(
            moe_ops.permute(x, at.sorted_slots), value_of(weight), at.expert_offsets, bias
        )

    assert_same(grads_of(ours, (x, bias)), grads_of(usual, (x, bias)), 1e-12)


@pytest.mark.parametrize(("tokens", "dtype"), mixed((0, 1, 7, 33), FLOATS[::2]), ids=str)
def test_a_layer_is_that_of_the_weights_it_stands_for(tokens, dtype):
    hidden, inner = 64, 96
    w13 = stored_weight((E, 2 * inner, hidden), (1, 64), dtype)
    w2 = stored_weight((E, hidden, inner), (1, 96), torch.float16)
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 3)
    ids = torch.randint(-1, E, (tokens, 3), dtype=torch.int32)
    out = moe_ops.scaled_fused_experts(x, w13, w2, weights, ids)
    expected = moe_ops.fused_experts(x.double(), value_of(w13), value_of(w2), weights.double(), ids)
    assert_matches_oracle(out, expected)
    compiled = torch.compile(moe_ops.scaled_fused_experts, backend="aot_eager", fullgraph=True)
    assert_same([compiled(x, w13, w2, weights, ids)], [out], 1e-6)
    if tokens:
        layer = torch.vmap(lambda x, weights, ids: moe_ops.scaled_fused_experts(x, w13, w2, weights, ids))
        # Of a token alone a product may be summed in another order, on some processors.
        assert_matches_oracle(layer(*(each[:, None] for each in (x, weights, ids)))[:, 0], expected)


def _call(scale=None, block=(1, 32), **named):
    weight, scale = stored_weight().weight, torch.rand(E, B, 3) if scale is None else scale
    return moe_ops.scaled_grouped_gemm(
        torch.randn(T * K, A), ScaledWeight(weight, scale, block), plan().expert_offsets, **named
    )


def _layer():
    w13, w2 = stored_weight((3, 64, 64)), stored_weight((3, 64, 32))
    ids = torch.zeros(T, K, dtype=torch.int32)
    moe_ops.scaled_fused_experts(torch.randn(T, 64), w13, w2, torch.rand(T, K), ids, rows="quantised")


REFUSED = {
    "whole scales": (
        lambda: _call(torch.ones(E, B, 3, dtype=torch.int8)), TypeError,
        "scale has dtype torch.int8 with weights of 4 bits: expected torch.uint8 of MXFP4, torch.float8_e4m3fn of",
    ),
    "scales of 8 bits": (
        lambda: _call(torch.ones(E, B, 3).to(torch.float8_e5m2)), TypeError,
        "scale has dtype torch.float8_e5m2 with weights of 4 bits: expected",
    ),
    "too few scales": (lambda: _call(torch.rand(E, B, 2)), ValueError, r"scale has shape \[13, 11, 2\]: expected"),
    "groups of 16": (
        lambda: _call(torch.rand(E, B, 6), (1, 16)), ValueError,
        "block_columns=16 with weights of 4 bits: expected a multiple of 32",
    ),
    "quantised rows": (
        lambda: _call(x_scale=torch.ones(T * K, 3)), ValueError, "x_scale with weights of 4 bits: expected None",
    ),
    "a layer of quantised rows": (_layer, ValueError, "rows='quantised' with weights of 4 bits: expected 'exact'"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    call, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        call()
