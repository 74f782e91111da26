"""Kernels of integers of 4 bits with zero points: every number, scales of every dtype, rows in tiles and one by one."""

import itertools

import pytest
import torch

from tests.helpers import mixed, usually
from tests.kernels import oracles, test_scaled_exact as of_layers
from tests.kernels.by_name import launch
from tests.kernels.oracles import assert_close
from tests.kernels.test_scaled_fused import ACTIVATIONS
from tests.kernels.test_scaled_integers import DTYPES, EXPERTS, OFFSETS, SCALES, SIZES, SLOTS, dense, made


def zeros_for(scale):
    """Of strides that are not the scale's."""
    return torch.randint(0, 16, scale.shape, dtype=torch.uint8).mT.contiguous().mT


def _product(x, pairs, scale, zero, offsets, block, device, bias=None, slots=None):
    tensors = x, pairs, scale, torch.tensor(offsets, dtype=torch.int32), None, bias, zero, None, slots
    on_device = (None if each is None else each.to(device) for each in tensors)
    return launch("scaled_grouped_gemm", *on_device, *block, x.dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "scale_dtype", "case"), mixed(SIZES, DTYPES, SCALES, OFFSETS, rounds=2), ids=str
)
def test_rows_in_order(size, dtype, scale_dtype, case, device):
    features, depth, block = SIZES[size]
    pairs, scale = made(EXPERTS, features, depth, block, scale_dtype)
    zero, x = zeros_for(scale), torch.randn(SLOTS, depth).to(dtype)
    bias, offsets = torch.randn(EXPERTS, features).to(dtype), torch.tensor(OFFSETS[case], dtype=torch.int32)
    out = _product(x, pairs, scale, zero, OFFSETS[case], block, device, bias)
    assert_close(out, oracles.grouped_gemm(x, dense(pairs, scale, block, zero), offsets, bias))
    assert out.dtype == dtype and not out[OFFSETS[case][-1] :].any()


@pytest.mark.parametrize("zero", range(0, 16, 3))
@pytest.mark.parametrize(("dtype", "scale_dtype"), mixed(DTYPES, SCALES), ids=str)
def test_every_number(dtype, scale_dtype, zero, device):
    """A product with ones on a diagonal gives each number times its scale, rounded once."""
    pairs = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scale, zeros = torch.rand(1, 16, 1).to(scale_dtype), torch.full((1, 16, 1), zero, dtype=torch.uint8)
    out = _product(torch.eye(32).to(dtype), pairs, scale, zeros, [0, 32], (1, 32), device).cpu()
    exact = dense(pairs, scale, (1, 32), zeros)[0].t().float()
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
    zero, offsets = zeros_for(scale), [0, rows - 1, rows, 3 * rows + 5, 4 * rows - 2]
    x = torch.randn(4 * rows, depth).to(dtype)
    expected = oracles.grouped_gemm(x, dense(pairs, scale, block, zero), torch.tensor(offsets), None)
    assert_close(_product(x, pairs, scale, zero, offsets, block, device), expected)


def test_scales_of_others_and_their_rows_are_not_met(device):
    block = SIZES["a short last group"][2]
    pairs, scale = made(EXPERTS, 33, 84, block, torch.float32)
    scale[2, 7, 1], scale[3] = float("nan"), float("inf")
    x = torch.randn(SLOTS, 84)
    x[5], x[12:] = float("nan"), float("nan")
    out = _product(x, pairs, scale, zeros_for(scale), [0, 4, 4, 9, 9], block, device).cpu()
    assert out[5].isnan().all() and out[4:9, 7].isnan().all() and not out[9:].any()
    assert not out[:4].isnan().any() and not out[[4, 6, 7, 8]][:, torch.arange(33) != 7].isnan().any()


def _layer(size, dtype, activation, names):
    """What `test_scaled_exact` has, integers in its place, of which those called so have zero points; its weights."""
    at, weights = of_layers._layer(size, dtype, ACTIVATIONS[activation]), {}
    for name in ("w13", "w2"):
        experts, rows, half = at[name].shape
        block = at[f"{name}_block_rows"], at[f"{name}_block_columns"]
        at[name], scale = made(experts, rows, 2 * half, block, torch.float32)
        at[f"{name}_scale"] = scale / 8  # numbers are larger, and float16 has to hold their squares
        at[f"{name}_zero"] = zeros_for(at[f"{name}_scale"]) if name in names else None
        weights[name] = dense(at[name], at[f"{name}_scale"], block, at[f"{name}_zero"])
    return at, weights


@pytest.mark.parametrize(
    ("size", "dtype", "activation", "names"),
    mixed(
        ("a token", "more columns than a step has", "a last group cut short", "blocks", "no words", "T7", "hot"),
        DTYPES,
        ACTIVATIONS,
        [("w13", "w2"), ("w2",), ("w13",)],
    )
    + usually(itertools.product(("more than are written out",), DTYPES, ("ungated",), [("w13",), ("w2",)]), ()),
    ids=str,
)  # fmt: skip
def test_layers(size, dtype, activation, names, device, monkeypatch):
    at, weights = _layer(size, dtype, activation, names)
    monkeypatch.setattr(of_layers, "_weight", lambda at, name: weights[name])
    expected = of_layers._expected(at, ACTIVATIONS[activation])
    assert_close(of_layers._launched(at, device), expected)
