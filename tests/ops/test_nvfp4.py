"""NVFP4 weights: what bytes and both scales stand for, how weights become such, products and layers of them."""

import pytest
import torch

import moe_ops
from moe_ops import ScaledWeight, slabs, weight_copies
from moe_ops.nvfp4 import NUMBERS
from moe_ops.pairs import PAIRS
from moe_ops.scaled import scaled_linear
from moe_ops.weight_formats import dequantised, quantised_weight
from tests.helpers import assert_matches_oracle, assert_same
from tests.kernels import oracles
from tests.kernels.test_scaled_nvfp4 import FLOAT8, dense, float8, made
from tests.ops.samples_in_float8 import samples_in_float8
from tests.ops.test_mxfp4 import expect_gradients

E, B, A, T, K = 5, 14, 84, 7, 2
GROUPS = (1, 16)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def stored_weight(shape=(E, B, A), block=GROUPS, parts=1):
    pairs, scale = made(*shape, block)
    return ScaledWeight(pairs, scale, block, global_scale=torch.rand(shape[0], parts) + 0.5)


def value_of(weight):
    outer = weight.global_scale
    outer = outer[:, None] if outer is not None and outer.dim() == 1 else outer
    return dense(weight.weight, weight.scale, weight.block, outer)


def plan():
    return moe_ops.build_dispatch(torch.randint(-1, E, (T, K), dtype=torch.int32), E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_bytes_and_scales_stand_for(dtype):
    """Every number with every scale that is one."""
    pairs = torch.arange(256, dtype=PAIRS).view(1, 16, 16).repeat(1, 16, 1)
    scale = torch.arange(256).to(PAIRS).view(1, 256, 1).repeat(1, 1, 2).view(FLOAT8)
    found = dequantised(scaled_linear("weight", ScaledWeight(pairs, scale, GROUPS), None), dtype)[0]
    is_nan = torch.arange(256) % 128 == 127
    assert torch.equal(found[~is_nan].double(), dense(pairs, scale, GROUPS)[0][~is_nan])
    assert found[is_nan].isnan().all()
    assert [float8(byte) for byte in (0x38, 0x7E, 1, 0xB8)] == [1, 448, 2.0**-9, -1]


@pytest.mark.parametrize("shape", [(E,), (E, 1), (E, 2), (E, B)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_global_scales_are_of_parts_of_the_rows(shape, dtype):
    pairs, scale = made(E, B, A, GROUPS)
    outer = (torch.rand(shape) + 0.5).to(dtype)
    found = moe_ops.dequantise_weight(ScaledWeight(pairs, scale, GROUPS, global_scale=outer), torch.float64)
    without = moe_ops.dequantise_weight(ScaledWeight(pairs, scale, GROUPS), torch.float64)
    per_row = outer.double().view(E, -1).repeat_interleave(B // outer.view(E, -1).shape[1], 1)
    assert torch.equal(found, without * per_row[:, :, None])


def test_they_count_before_a_number_is_rounded():
    pairs, scale = made(3, 40, 64, GROUPS)
    outer = torch.tensor([1 / 3, 0.7, 1.1])
    found = moe_ops.dequantise_weight(ScaledWeight(pairs, scale, GROUPS, global_scale=outer), torch.bfloat16)
    exact = dense(pairs, scale, GROUPS, outer[:, None])
    assert torch.equal(found, exact.float().bfloat16())


def test_what_was_nvfp4_becomes_what_it_was():
    """Where each group has the largest number, and one the largest scale."""
    weight = stored_weight((E, 40, 96))
    weight.weight[:, :, ::8] = 0x77
    weight.scale[:, 0, 0] = 448.0
    weight.global_scale.copy_(2.0 ** torch.arange(-3, 2)[:, None])
    whole = value_of(weight).float()
    found = quantised_weight(whole, GROUPS, NUMBERS)
    assert torch.equal(found.global_scale, weight.global_scale)
    assert torch.equal(found.scale.float(), weight.scale.float())
    assert torch.equal(value_of(found).float(), whole)


def test_weights_are_rounded_to_the_nearest():
    weight = torch.randn(E, 16, 96)
    found = quantised_weight(weight, GROUPS, NUMBERS)
    assert found.global_scale.shape == (E, 1) and found.global_scale.dtype == torch.float32
    assert found.scale.dtype == FLOAT8 and (found.scale.float().amax((1, 2)) == 448).all()
    steps = found.scale.float().repeat_interleave(16, 2) * found.global_scale[:, :, None]
    scaled = (weight / steps).abs()
    apart = (value_of(found) - weight).abs() / steps
    assert (apart <= torch.where(scaled < 2, 0.25, torch.where(scaled < 4, 0.5, 1.0)) + 1e-5).all()
    assert 0.05 < (value_of(found) - weight).norm() / weight.norm() < 0.11


def test_matrices_of_no_usual_magnitude():
    """Zeros stay zeros; what is not finite makes its own group NaN; of a group far below the others less is left."""
    weight = torch.ones(4, 2, 32)
    weight[0], weight[1, 0, 3], weight[2, 1, 20], weight[3, 0, :16] = 0, float("nan"), float("inf"), 2.0**-19
    found = quantised_weight(weight, GROUPS, NUMBERS)
    value = dequantised(scaled_linear("w", found, None), torch.float32)
    assert (value[0] == 0).all() and found.global_scale[0] == 1
    is_nan = torch.zeros(4, 2, 32, dtype=torch.bool)
    is_nan[1, 0, :16], is_nan[2, 1, 16:] = True, True
    assert torch.equal(value.isnan(), is_nan)
    assert torch.allclose(value[1:3][~is_nan[1:3]], torch.tensor(1.0), rtol=1e-6)
    assert torch.allclose(value[3, 0, :16], torch.tensor(2.0**-19), rtol=0.26, atol=0) and value[
        3, 1
    ].allclose(torch.tensor(1.0))


@pytest.mark.parametrize("block", [GROUPS, (4, 48), (B, A), (64, 128)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products(dtype, block):
    weight, at = stored_weight(block=block, parts=2), plan()
    x, bias = torch.randn(T, A).to(dtype), torch.randn(E, B).to(dtype)
    for slots, rows in ((at.sorted_slots, x[at.sorted_slots // K]), (None, x[at.sorted_slots // K])):
        given = x if slots is not None else rows
        out = moe_ops.scaled_grouped_gemm(given, weight, at.expert_offsets, bias, sorted_slots=slots)
        assert out.dtype == dtype
        assert_matches_oracle(out, oracles.grouped_gemm(rows, value_of(weight), at.expert_offsets, bias))


def test_blocks_follow_from_sizes():
    pairs, scale = made(E, B, 64, GROUPS)
    linear = scaled_linear("weight", ScaledWeight(pairs, scale), None)
    assert (linear.block_rows, linear.block_columns) == GROUPS


def test_gradients():
    weight = stored_weight(parts=2)
    expect_gradients(weight, value_of(weight), plan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_a_layer_is_that_of_the_weights_it_stands_for(tokens, dtype):
    experts, hidden, inner = 13, 64, 32
    w13 = stored_weight((experts, 2 * inner, hidden), parts=2)
    w2 = stored_weight((experts, hidden, inner))
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 3)
    ids = torch.randint(-1, experts, (tokens, 3), dtype=torch.int32)
    named = {
        "w13_bias": torch.randn(experts, 2 * inner).to(dtype),
        "w2_bias": torch.randn(experts, hidden).to(dtype),
        "expert_map": torch.randperm(experts, dtype=torch.int32),
        "shared": torch.randn(tokens, hidden).to(dtype),
    }
    out = moe_ops.scaled_fused_experts(x, w13, w2, weights, ids, **named)
    double = {name: each.double() if each.is_floating_point() else each for name, each in named.items()}
    expected = moe_ops.fused_experts(x.double(), value_of(w13), value_of(w2), weights.double(), ids, **double)
    assert_matches_oracle(out, expected)
    compiled = torch.compile(moe_ops.scaled_fused_experts, backend="aot_eager", fullgraph=True)
    assert_same([compiled(x, w13, w2, weights, ids, **named)], [out], 1e-6)


@pytest.mark.parametrize(("halves", "parts"), [(1, 1), (1, 2), (2, 2), (2, 1), (1, 12 * 32)])
def test_slabs_have_their_part_of_the_global_scales(halves, parts, monkeypatch):
    monkeypatch.setattr(slabs, "_MOST_BYTES", 3 * 64 * 128 * 2 * halves)
    linear = scaled_linear("weight", stored_weight((3, 12 * 32, 64), parts=parts), None)
    seen = []

    def multiply(slab, part):
        seen.append(part)
        both = slab.weight if slab.up is None else torch.stack((slab.weight, slab.up), 1).flatten(1, 2)
        return both.double().sum(2).view(3, halves, -1).permute(2, 1, 0).flatten(1).t()

    found = weight_copies.by_slabs(linear, torch.bfloat16, halves, multiply)
    whole = moe_ops.dequantise_weight(
        ScaledWeight(linear.weight, linear.scale, GROUPS, global_scale=linear.global_scale)
    )
    expected = whole.double().sum(2).view(3, halves, -1).permute(1, 0, 2).flatten(0, 1)
    assert len(seen) > 1 and torch.equal(found, expected)


@pytest.mark.parametrize("name", samples_in_float8())
def test_opcheck(name):
    """But for what torch's check of schemas does, which computes with float8."""
    checks = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    found = torch.library.opcheck(
        getattr(torch.ops.moe, name).default, samples_in_float8()[name], test_utils=checks
    )
    assert set(found.values()) == {"SUCCESS"}


def _call(**named):
    usual = stored_weight()
    fields = {"weight": usual.weight, "scale": usual.scale, "block": usual.block}
    return moe_ops.scaled_grouped_gemm(
        torch.randn(T * K, A), ScaledWeight(**fields | named), plan().expert_offsets
    )


REFUSED = {
    "groups of 8": (
        {"block": (1, 8), "scale": torch.ones(E, B, 11).to(FLOAT8)}, ValueError,
        "block_columns=8 with weights of 4 bits: expected a multiple of 16",
    ),
    "global scales beside exponents": (
        {"scale": torch.ones(E, B, 3, dtype=PAIRS), "block": (1, 32), "global_scale": torch.ones(E)}, ValueError,
        "global_scale with weights of MXFP4: expected None, only NVFP4 has it",
    ),
    "global scales beside those of integers": (
        {"scale": torch.ones(E, B, 3), "block": (1, 32), "global_scale": torch.ones(E)}, ValueError,
        "global_scale with weights of integers: expected None",
    ),
    "global scales beside weights of 8 bits": (
        {"weight": torch.ones(E, B, A, dtype=torch.int8), "scale": torch.ones(E, B, 1), "block": (1, A),
         "global_scale": torch.ones(E)}, ValueError, r"global_scale with weights of torch\.int8: expected None",
    ),
    "parts that do not divide rows": (
        {"global_scale": torch.ones(E, 3)}, ValueError, "global_scale has 3 parts of 14 rows: expected a divisor",
    ),
    "no parts": ({"global_scale": torch.ones(E, 0)}, ValueError, "global_scale has 0 parts of 14 rows"),
    "of other experts": ({"global_scale": torch.ones(E + 1)}, ValueError, r"global_scale has shape \[6, 1\]"),
    "whole ones": ({"global_scale": torch.ones(E).int()}, TypeError, "global_scale has dtype"),
    "zero points": (
        {"zero": torch.ones(E, B, 6, dtype=PAIRS)}, ValueError,
        "zero with weights of NVFP4: expected None, only integers of 4 bits have it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    named, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        _call(**named)
