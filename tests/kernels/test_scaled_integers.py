"""Kernels of weights that are integers of 4 bits: every number, scales of every dtype, rows in tiles and one by one."""

from types import SimpleNamespace

import pytest
import torch

from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.scaled_pairs import (
    IN_16_BITS,
    IN_32_BITS,
    MIXED,
    scaled_pairs_config,
)
from tests.helpers import mixed
from tests.kernels import oracles, test_scaled_exact as of_layers
from tests.kernels.by_name import launch, program_of
from tests.kernels.catalogue import meta
from tests.kernels.oracles import assert_close
from tests.kernels.test_scaled_fused import ACTIVATIONS

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SCALES = (torch.bfloat16, torch.float16, torch.float32)
# Features, depth, block: by TMA and not, depths that end within a step, a group, a pair of groups.
SIZES = {
    "groups of 128": (130, 256, (1, 128)),
    "a short last step": (72, 160, (1, 32)),
    "a short last group": (33, 84, (1, 64)),
    "blocks": (40, 288, (8, 96)),
    "whole rows": (16, 50, (1, 50)),
    "one pair": (1, 2, (1, 32)),
}
EXPERTS, SLOTS = 4, 23
OFFSETS = {"ragged": [0, 5, 5, 9, 20], "none": [0, 0, 0, 0, 0], "one expert": [0, 0, 23, 23, 23]}


def dense(
    pairs: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], zero: torch.Tensor | None = None
) -> torch.Tensor:
    """What 4 bits stand for in float64, by a loop over columns."""
    zeros = torch.full(scale.shape, 8.0) if zero is None else zero
    columns, rows = [], torch.arange(pairs.shape[1]) // block[0]
    for column in range(2 * pairs.shape[2]):
        half = pairs[:, :, column // 2].to(torch.int64)
        code = half // 16 if column % 2 else half % 16
        of_column = (each[:, rows, column // block[1]].double() for each in (zeros, scale))
        columns.append((code.double() - next(of_column)) * next(of_column))
    return torch.stack(columns, 2)


def made(experts, features, depth, block, dtype):
    """Bytes and scales by which numbers are about one."""
    pairs = torch.randint(0, 256, (experts, features, depth // 2), dtype=torch.uint8)
    blocks = -(-features // block[0]), -(-depth // block[1])
    return pairs, (torch.rand(experts, *blocks) / 4 + 0.05).to(dtype)


def _product(x, pairs, scale, offsets, block, device, bias=None, slots=None):
    tensors = x, pairs, scale, torch.tensor(offsets, dtype=torch.int32), None, bias, None, None, slots
    on_device = (None if each is None else each.to(device) for each in tensors)
    return launch("scaled_grouped_gemm", *on_device, *block, x.dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "scale_dtype", "case"), mixed(SIZES, DTYPES, SCALES, OFFSETS, rounds=2), ids=str
)
def test_rows_in_order(size, dtype, scale_dtype, case, device):
    features, depth, block = SIZES[size]
    pairs, scale = made(EXPERTS, features, depth, block, scale_dtype)
    x, bias = torch.randn(SLOTS, depth).to(dtype), torch.randn(EXPERTS, features).to(dtype)
    out = _product(x, pairs, scale, OFFSETS[case], block, device, bias)
    offsets = torch.tensor(OFFSETS[case], dtype=torch.int32)
    assert_close(out, oracles.grouped_gemm(x, dense(pairs, scale, block), offsets, bias))
    assert out.dtype == dtype and not out[OFFSETS[case][-1] :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["transposed", "columns apart", "scales apart"])
def test_layouts_of_tokens_that_are_gathered(layout, dtype, device):
    features, depth, block = SIZES["a short last step"]
    pairs, scale = given = made(EXPERTS, features, depth, block, torch.bfloat16)
    if layout == "transposed":
        pairs = pairs.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "columns apart":
        pairs = torch.full((EXPERTS, features, depth), 255, dtype=torch.uint8)[:, :, ::2].copy_(pairs)
    else:
        scale = (
            torch.full((2 * EXPERTS, 5, features), float("nan")).bfloat16()[::2].transpose(1, 2).copy_(scale)
        )
    x, slots = torch.randn(8, depth).to(dtype), torch.randperm(24, dtype=torch.int32)
    out = _product(x, pairs, scale, OFFSETS["ragged"], block, device, slots=slots)
    offsets = torch.tensor(OFFSETS["ragged"], dtype=torch.int32)
    assert_close(out, oracles.grouped_gemm(x[slots.long() // 3], dense(*given, block), offsets, None))


@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number(dtype, scale_dtype, device):
    """A product with ones on a diagonal gives each number times its scale, rounded once."""
    pairs = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scale = torch.rand(1, 16, 1).to(scale_dtype)
    out = _product(torch.eye(32).to(dtype), pairs, scale, [0, 32], (1, 32), device).cpu()
    exact = dense(pairs, scale, (1, 32))[0].t().float()
    if device == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts bits off
        assert torch.allclose(out.float(), exact, rtol=2.0**-7, atol=0)
    else:
        assert torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize(
    ("rows", "dtype"), [(17, torch.bfloat16), (40, torch.float16), (200, torch.bfloat16)], ids=str
)
def test_tiles_that_are_higher(rows, dtype, device):
    features, depth, block = SIZES["blocks"]
    pairs, scale = made(EXPERTS, features, depth, block, dtype)
    offsets = [0, rows - 1, rows, 3 * rows + 5, 4 * rows - 2]
    x = torch.randn(4 * rows, depth).to(dtype)
    expected = oracles.grouped_gemm(x, dense(pairs, scale, block), torch.tensor(offsets), None)
    assert_close(_product(x, pairs, scale, offsets, block, device), expected)


def test_scales_of_others_and_their_rows_are_not_met(device):
    block = SIZES["a short last group"][2]
    pairs, scale = made(EXPERTS, 33, 84, block, torch.float32)
    scale[2, 7, 1], scale[3] = float("nan"), float("inf")
    x = torch.randn(SLOTS, 84)
    x[5], x[12:] = float("nan"), float("nan")
    out = _product(x, pairs, scale, [0, 4, 4, 9, 9], block, device).cpu()
    assert out[5].isnan().all() and out[4:9, 7].isnan().all() and not out[9:].any()
    assert not out[:4].isnan().any() and not out[[4, 6, 7, 8]][:, torch.arange(33) != 7].isnan().any()


def _config(dtype, scale, rows):
    scales = meta(4, 128, 1, dtype=scale)
    linear = SimpleNamespace(weight=meta(4, 128, 64), scale=scales, block_columns=128)
    return scaled_pairs_config(SimpleNamespace(x=meta(1, 128, dtype=dtype), weight=linear), rows, True, H200)


def test_float16_is_multiplied_in_16_bits():
    for dtype, scale, table in (
        (torch.float16, torch.float16, IN_16_BITS),
        (torch.float16, torch.float32, IN_16_BITS),
        (torch.float16, torch.uint8, IN_32_BITS),
        (torch.bfloat16, torch.uint8, IN_16_BITS),
        (torch.float32, torch.float32, IN_32_BITS),
    ):
        assert _config(dtype, scale, 4) == table[16]
    for scale, config in ((torch.uint8, MIXED), (torch.float16, MIXED), (torch.float32, MIXED)):
        assert {_config(torch.bfloat16, scale, rows) for rows in (16, 40)} == {config}


def _layer(size, dtype, activation, scales):
    """Integers in the place of what `test_scaled_exact` has, and the weights they stand for."""
    at, weights = of_layers._layer(size, dtype, ACTIVATIONS[activation]), {}
    for name, scale_dtype in zip(("w13", "w2"), scales, strict=True):
        experts, rows, half = at[name].shape
        block = at[f"{name}_block_rows"], at[f"{name}_block_columns"]
        at[name], at[f"{name}_scale"] = made(experts, rows, 2 * half, block, scale_dtype)
        weights[name] = dense(at[name], at[f"{name}_scale"], block)
    return at, weights


@pytest.mark.parametrize(
    ("size", "dtype", "activation", "scales"),
    mixed(
        ("a token", "more columns than a step has", "a last group cut short", "blocks", "no words", "T7", "hot"),
        DTYPES,
        ACTIVATIONS,
        [(each, torch.float32) for each in SCALES],
        rounds=1,
    ),
    ids=str,
)  # fmt: skip
def test_layers(size, dtype, activation, scales, device, monkeypatch):
    """Weights are rounded once to the rows' dtype on a GPU; interpreted they are float32."""
    at, weights = _layer(size, dtype, activation, scales)
    if device == "cuda":
        weights = {name: weight.to(dtype).double() for name, weight in weights.items()}
    monkeypatch.setattr(of_layers, "_weight", lambda at, name: weights[name])
    expected = of_layers._expected(at, ACTIVATIONS[activation])
    assert_close(of_layers._launched(at, device), expected)


def test_weights_of_two_formats(device, monkeypatch):
    """Each product has its own."""
    at, weights = _layer("a token", torch.float32, "silu", SCALES[:2])
    other = of_layers._layer("a token", torch.float32, ACTIVATIONS["silu"])
    for name in ("w2", "w2_scale"):
        at[name] = other[name]
    weights["w2"] = of_layers._weight(other, "w2")
    monkeypatch.setattr(of_layers, "_weight", lambda at, name: weights[name])
    assert_close(of_layers._launched(at, device), of_layers._expected(at, ACTIVATIONS["silu"]))


def test_few_tokens_need_no_float8():
    weights, ids = meta(1, 2, dtype=torch.float32), meta(1, 2, dtype=torch.int32)
    named = {"hidden_states": meta(1, 64), "topk_weights": weights, "topk_ids": ids, "activation": "silu"}
    for name, rows, columns in (("w13", 128, 64), ("w2", 64, 64)):
        named |= {name: meta(8, rows, columns // 2, dtype=torch.uint8), f"{name}_scale": meta(8, rows, 2)}
        named |= {f"{name}_block_rows": 1, f"{name}_block_columns": 32}
    for gpu in (H200, Gpu(80, 108, H200.shared_memory)):
        launches = program_of("scaled_fused_experts", gpu=gpu, rows="exact", **named).launches
        assert [each.kernel.__name__ for each in launches[:2]] == ["pairs_gemv_kernel"] * 2
