"""Weights of 8 and 4 bits in a wider dtype: every format, blocks that divide nothing, every layout, odd sizes."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moe_ops import ScaledWeight
from moe_ops.kernels import plans, scaled
from moe_ops.kernels.dequantise_weight import takes
from moe_ops.kernels.gpu import H200
from moe_ops.pairs import PAIRS
from moe_ops.scaled import scaled_linear
from moe_ops.values import ScaledLinear
from moe_ops.weight_formats import dequantised
from tests.kernels.by_name import launch, program_of, record
from tests.kernels.catalogue import meta

IN_8_BITS = (torch.float8_e4m3fn, torch.int8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows, columns, block.
SIZES = {
    "blocks": (130, 256, (128, 128)),
    "a short last block": (72, 2 * 128 + 64, (128, 128)),
    "rows": (33, 144, (1, 144)),
    "groups": (40, 640, (1, 32)),
    "odd": (37, 51, (7, 10)),
    "weights": (3, 5, (1, 1)),
    "a matrix": (17, 300, (17, 300)),
    "one": (1, 1, (1, 1)),
}
SIZES_OF_PAIRS = {
    "groups": (33, 640, (1, 32)),
    "long groups": (5, 576, (1, 96)),
    "rows": (17, 300, (1, 300)),
    "blocks": (19, 160, (7, 64)),
    "a short last group": (16, 84, (1, 32)),
}
SCALES = (PAIRS, torch.bfloat16, torch.float16, torch.float32)


def _weight(rows: int, columns: int, stored: torch.dtype) -> torch.Tensor:
    if stored == torch.int8:
        return torch.randint(-128, 128, (3, rows, columns)).to(stored)
    if stored == PAIRS:
        return torch.randint(256, (3, rows, columns // 2)).to(stored)
    return (torch.randn(3, rows, columns) * 20).to(stored)


def _scaled(
    rows: int, columns: int, block: tuple[int, int], stored: torch.dtype, scale: torch.dtype
) -> ScaledWeight:
    blocks = (3, -(-rows // block[0]), -(-columns // block[1]))
    values = torch.randint(120, 134, blocks) if scale == PAIRS else torch.rand(blocks) + 0.5
    return ScaledWeight(_weight(rows, columns, stored), values.to(scale), block)


def _check(weight: ScaledWeight, dtype: torch.dtype, device: str) -> None:
    _, _, _, _, _, *beside = linear = scaled_linear("weight", weight, None)
    tensors = weight.weight, weight.scale, *beside
    parts = (None if each is None else each.to(device) for each in tensors)
    found = launch("dequantise_weight", *parts, *weight.block, dtype).cpu()
    expected = dequantised(linear, dtype)
    assert expected.isfinite().all() and expected.any()
    truncates = dtype == torch.bfloat16 and device == "cpu"  # as the interpreter does
    torch.testing.assert_close(found, expected, rtol=2.0**-7 if truncates else 0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", IN_8_BITS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_weights_of_8_bits(size, stored, dtype, device):
    _check(_scaled(*SIZES[size], stored, torch.float32), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("size", SIZES_OF_PAIRS)
def test_weights_of_4_bits(size, scale, dtype, device):
    _check(_scaled(*SIZES_OF_PAIRS[size], PAIRS, scale), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", SCALES[1:], ids=str)
@pytest.mark.parametrize("size", SIZES_OF_PAIRS)
def test_integers_with_zero_points(size, scale, dtype, device):
    """Of any strides; those of the next block or row would be others."""
    weight = _scaled(*SIZES_OF_PAIRS[size], PAIRS, scale)
    zero = torch.randint(16, weight.scale.shape).to(PAIRS).mT.contiguous().mT
    _check(ScaledWeight(weight.weight, weight.scale, weight.block, zero), dtype, device)


@pytest.mark.parametrize("stored", [*IN_8_BITS, PAIRS], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "a part of a wider one"])
def test_layouts(layout, stored, device):
    weight = _scaled(40, 96, (1, 32), stored, PAIRS if stored == PAIRS else torch.bfloat16)
    wide = torch.cat([weight.weight] * 2, 2)
    kept = (
        weight.weight.mT.contiguous().mT if layout == "transposed" else wide[:, :, : weight.weight.shape[2]]
    )
    assert not kept.is_contiguous() and torch.equal(kept, weight.weight)
    _check(ScaledWeight(kept, weight.scale.mT.contiguous().mT, weight.block), torch.bfloat16, device)


def test_powers_of_any_size(device):
    """Of exponents from 64 to 191 weights are exact in bfloat16; a NaN stays one."""
    scale = torch.arange(64, 192).view(1, 128, 1).to(PAIRS)
    weight = ScaledWeight(torch.randint(256, (1, 128, 16)).to(PAIRS), scale, (1, 32))
    _check(weight, torch.bfloat16, device)
    parts = weight.weight.to(device), torch.full_like(scale, 255).to(device)
    assert launch("dequantise_weight", *parts, None, None, 1, 32, torch.bfloat16).isnan().all()


def _linear(stored, scale, experts=8, rows=1024, columns=1024):
    weight = meta(experts, rows, columns // (2 if stored == PAIRS else 1), dtype=stored)
    return ScaledLinear(weight, meta(experts, rows, columns // 32, dtype=scale), None, 1, 32)


def test_when_products_are_of_a_copy():
    """With many rows, of weights that the dtype of rows holds, and of which slabs are not too large."""
    copies = partial(scaled.copies, gpu=H200)
    in_8_bits, mxfp4 = _linear(torch.int8, torch.float32), _linear(PAIRS, PAIRS)
    integers = _linear(PAIRS, torch.float16)
    assert copies(in_8_bits, torch.bfloat16, 448) and not copies(in_8_bits, torch.bfloat16, 447)
    for linear in (mxfp4, integers):
        assert copies(linear, torch.bfloat16, 256) and not copies(linear, torch.bfloat16, 255)
    in_float16 = [copies(linear, torch.float16, 448) for linear in (in_8_bits, mxfp4, integers)]
    assert in_float16 == [False, False, True]
    assert not copies(in_8_bits, torch.float32, 448)
    large = _linear(PAIRS, PAIRS, 1025)
    assert copies(large, torch.bfloat16, 384) and not copies(large, torch.bfloat16, 383)
    assert copies(_linear(PAIRS, PAIRS, 1024), torch.bfloat16, 256, halves=2)
    in_8_bits = _linear(torch.int8, torch.float32, 1025)
    assert copies(in_8_bits, torch.bfloat16, 512, halves=2) and not copies(
        in_8_bits, torch.bfloat16, 511, halves=2
    )
    assert not copies(large._replace(block_rows=1023), torch.bfloat16, 1000)
    halves = large._replace(block_rows=24)
    assert copies(halves, torch.bfloat16, 384) and not copies(halves, torch.bfloat16, 384, halves=2)


def test_copies_where_memory_is_slow():
    """They take longer to write and to read."""
    h100 = replace(H200, memory_speed=3.4e12)
    for linear, least in (
        (_linear(torch.int8, torch.float32), 784),
        (_linear(PAIRS, PAIRS), 448),
        (_linear(torch.int8, torch.float32, 1025), 896),
        (_linear(PAIRS, PAIRS, 1025), 672),
    ):
        assert scaled.copies(linear, torch.bfloat16, least, h100)
        assert not scaled.copies(linear, torch.bfloat16, least - 1, h100)


def _product(rows, x_scale=None, x=torch.bfloat16, dtype=torch.bfloat16, gathers=True):
    weight, scale, *_ = _linear(torch.int8, torch.float32)
    slots = meta(8 * rows, dtype=torch.int32) if gathers else None
    given = meta(4 * rows if gathers else 8 * rows, 1024, dtype=x), weight, scale, meta(9, dtype=torch.int32)
    return record("scaled_grouped_gemm", *given, x_scale, None, None, None, slots, 1, 32, dtype)


def test_products_that_are_of_a_copy():
    """Of exact rows in the dtype of the result; they may be gathered from fewer tokens."""
    assert plans.is_taken(_product(447)) and not plans.is_taken(_product(448))
    assert not plans.is_taken(_product(448, gathers=False))
    assert plans.is_taken(_product(448, dtype=torch.float32))
    assert plans.is_taken(_product(448, meta(8 * 448, 32, dtype=torch.float32), torch.int8))


def _layer(tokens=2048, rows="exact", expert_map=None, features=1024, block_rows=1, activation="silu"):
    """Of eight experts, two for each token."""
    named = {
        "hidden_states": meta(tokens, 1024),
        "topk_weights": meta(tokens, 2),
        "activation": activation,
        "rows": rows,
    }
    for name, linear in (
        ("w13", _linear(torch.int8, torch.float32, rows=2 * features)),
        ("w2", _linear(torch.int8, torch.float32, columns=features)),
    ):
        named |= {name: linear.weight, f"{name}_scale": linear.scale, f"{name}_block_rows": block_rows}
        named[f"{name}_block_columns"] = 32
    ids = meta(tokens, 2, dtype=torch.int32)
    return record("scaled_fused_experts", topk_ids=ids, expert_map=expert_map, **named)


def test_layers_that_are_of_copies():
    """Of exact rows, by how many an expert has, those elsewhere among them, and if slabs of both weights can be."""
    assert not plans.is_taken(_layer()) and plans.is_taken(_layer(tokens=1700))
    assert plans.is_taken(_layer(rows="quantised"))
    assert plans.is_taken(_layer(expert_map=meta(10, dtype=torch.int32)))
    assert not plans.is_taken(_layer(expert_map=meta(9, dtype=torch.int32)))
    large = {"features": 2**17, "block_rows": 2**18}
    assert plans.is_taken(_layer(2000, **large))
    assert not plans.is_taken(_layer(**large | {"block_rows": 2**17}))
    assert not plans.is_taken(_layer(**large))
    assert plans.is_taken(_layer(**large | {"block_rows": 2**16 + 1}))
    assert not plans.is_taken(_layer(**large | {"block_rows": 100, "activation": "relu2"}))
    assert plans.is_taken(_layer(**large | {"block_rows": 100}))


def test_what_the_kernel_is_for():
    """Not float64, nor float8 where a GPU does not convert it."""
    old = replace(H200, capability=80)
    taken = {
        (stored, dtype, gpu.capability): takes(
            record("dequantise_weight", *_linear(stored, dtype)[:2], None, None, 1, 32, dtype), gpu
        )
        for stored in IN_8_BITS
        for dtype in (torch.float32, torch.float64)
        for gpu in (old, H200)
    }
    not_taken = {
        (torch.float8_e4m3fn, torch.float32, 80),
        *((stored, torch.float64, gpu) for stored in IN_8_BITS for gpu in (80, 90)),
    }
    assert {key for key, value in taken.items() if not value} == not_taken


def test_programs():
    """One for 16 rows and 256 columns of each expert."""
    program = program_of("dequantise_weight", *_linear(PAIRS, PAIRS)[:2], None, None, 1, 32, torch.bfloat16)
    assert program.launches[0].grid == (8 * 64 * 4,)
