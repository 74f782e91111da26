"""Which products the CPU makes of a layer: padding stays bounded however skewed the routing, and values are right."""

from itertools import accumulate

import pytest
import torch

import moe_ops
from moe_ops import _compat, _cpu_products
from moe_ops.arguments import GroupedLinear
from moe_ops.reference import reference_experts
from moe_ops.types import Activation
from tests.helpers import assert_matches_oracle

E = 64
SKEWED = {
    "one hot": [0] * 20 + [4096] + [0] * 43,
    "hot among few": [1] * 20 + [4096] + [2] * 43,
    "falling": [int(4096 / (rank + 1)) for rank in range(E)],
    "few rows, one busy": [0] * 63 + [16],
}
SMALL, LARGE = (128, 64), (512, 512)
HAS_PRODUCTS = _compat.has_bfloat16_products


@pytest.fixture(autouse=True)
def processor(request, monkeypatch):
    """One that multiplies bfloat16, unless a test is given another."""
    monkeypatch.setattr(_compat, "has_bfloat16_products", lambda: getattr(request, "param", True))


def offsets_of(sizes):
    return [0, *accumulate(sizes)]


def rows_to_pad_to(sizes, shape=SMALL, dtype=torch.bfloat16, threads=2, monkeypatch=None):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weight = torch.empty(len(sizes), *shape, dtype=dtype, device="meta")
    return _cpu_products._rows_to_pad_to(offsets_of(sizes), weight.dtype, weight.shape[1:])


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", SKEWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_skewed_rows_are_not_padded(name, shape, threads, dtype, monkeypatch):
    assert rows_to_pad_to(SKEWED[name], shape, dtype, threads, monkeypatch) is None


# What was measured on an EPYC, for one and two threads.
@pytest.mark.parametrize(
    ("sizes", "shape", "dtype", "threads", "pays"),
    [
        ([12, 16, 9, 14] * 4, SMALL, torch.bfloat16, 1, True),  # 0.16 ms padded, 0.29 one by one
        ([12, 16, 9, 14] * 4, SMALL, torch.float32, 2, False),  # 0.14, 0.12
        ([12, 16, 9, 14] * 8, SMALL, torch.float32, 2, True),  # 0.14, 0.20
        ([12, 16, 9, 14] * 8, SMALL, torch.float32, 1, False),
        ([12, 16, 9, 14] * 8, (256, 256), torch.float32, 2, True),  # 0.63, 0.79
        ([6, 12, 7, 7] * 8, (512, 256), torch.float32, 2, False),  # 0.91, 0.73, on a Xeon
        ([8, 17, 4, 3] * 16, (256, 256), torch.float32, 2, False),  # 1.01, 0.76, on a Xeon
        ([2, 3, 1, 4] * 8, LARGE, torch.bfloat16, 1, True),  # 2.7, 3.0
        ([30, 34, 28, 30] * 8, LARGE, torch.bfloat16, 1, True),  # 6.4, 7.3
        ([30, 44, 20, 28] * 8, LARGE, torch.bfloat16, 1, False),  # 5.8, 5.0
        ([30, 42, 22, 28] * 8, (512, 256), torch.bfloat16, 1, True),  # 3.0, 3.1
        ([20, 49, 20, 20] * 8, LARGE, torch.bfloat16, 1, False),  # 6.6, 5.2
        ([20, 49, 20, 20] * 8, LARGE, torch.bfloat16, 2, False),  # 3.4, 3.1
        ([20, 49, 20, 20] * 8, LARGE, torch.bfloat16, 4, True),
        ([12, 16, 9, 14] * 4, SMALL, torch.float64, 8, False),
        ([5, 5, 5, 0, 0] * 4, SMALL, torch.bfloat16, 1, True),  # 0.12, 0.21
        ([5, 5, 0, 0, 0] * 4, SMALL, torch.bfloat16, 1, True),  # 0.11, 0.15
        ([2, 0, 0, 0] * 8, LARGE, torch.bfloat16, 2, False),  # 0.88, 0.33
        ([3, 0, 0, 0] * 8, (256, 256), torch.bfloat16, 1, False),
        ([0] * 16, SMALL, torch.bfloat16, 1, False),
    ],
)
def test_padding_where_it_costs_less_than_calls(sizes, shape, dtype, threads, pays, monkeypatch):
    found = rows_to_pad_to(sizes, shape, dtype, threads, monkeypatch)
    assert found == (max(sizes) if pays else None)


@pytest.mark.parametrize(
    ("sizes", "shape", "pays"),  # measured on a Xeon, one thread
    [
        ([22, 10, 16, 16] * 2, (384, 128), True),  # 0.15, 0.22
        ([138, 118, 128, 128] * 2, (384, 128), False),  # 0.60, 0.48
        ([76, 52, 64, 64] * 2, (128, 192), True),  # 0.25, 0.27
        ([15, 1, 8, 8] * 8, LARGE, True),  # 1.59, 1.98
        ([139, 117, 128, 128] * 4, (256, 256), False),  # 1.21, 1.00
        ([26, 10, 14, 14] * 8, (512, 256), True),  # 0.87, 1.24
    ],
)
def test_sums_over_rows_are_padded_where_that_costs_less_than_calls(sizes, shape, pays, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    padded, called = [], _cpu_products._outer_all_at_once
    monkeypatch.setattr(_cpu_products, "_outer_all_at_once", lambda *args: padded.append(1) or called(*args))
    grad, x = (torch.randn(sum(sizes), columns).bfloat16() for columns in shape)
    offsets = torch.tensor(offsets_of(sizes), dtype=torch.int32)
    out = _cpu_products.grouped_outer_product(grad, x, offsets)
    assert bool(padded) == pays
    rows = zip(grad.double().split(sizes), x.double().split(sizes), strict=True)
    assert_matches_oracle(out, torch.stack([one.T @ other for one, other in rows]))


def test_where_rows_go_is_found_once():
    """Whatever device tensors are made on by default, and in whichever mode they are first needed."""
    offsets = (0, 2, 2, 5)
    _cpu_products._padding.cache_clear()
    with torch.device("meta"), torch.inference_mode():
        padding = _cpu_products._padding(offsets, 3)
    assert padding.places.tolist() == [0, 1, 6, 7, 8]
    assert padding.sources.tolist() == [[0, 1, 0], [0, 0, 0], [2, 3, 4]]
    assert _cpu_products._padding(offsets, 3) is padding
    x, weight = (
        torch.randn(5, 4).bfloat16().requires_grad_(),
        torch.randn(3, 6, 4).bfloat16().requires_grad_(),
    )
    out = moe_ops.grouped_gemm(x, weight, torch.tensor(offsets, dtype=torch.int32))
    assert _cpu_products._padding.cache_info().hits == 2
    out.sum().backward()
    assert_matches_oracle(x.grad, weight.detach().double().sum(1)[[0, 0, 2, 2, 2]])


def expected_product(x, weight, bias, sizes):
    expert = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    rows = x.double()[: len(expert)]
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    out[: len(expert)] = torch.einsum("sa,sba->sb", rows, weight.double()[expert])
    if bias is not None:
        out[: len(expert)] += bias.double()[expert]
    return out


@pytest.mark.parametrize("processor", [True, False], indirect=True)
@pytest.mark.parametrize("sizes", [[3, 1, 2, 4], [7, 9, 0, 8], [40, 30, 0, 35], [0, 0, 1, 0]], ids=str)
@pytest.mark.parametrize("shape", [(5, 11), (8, 16)], ids=["odd", "aligned"])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values(processor, sizes, shape, padded, bias, transposed, dtype, monkeypatch):
    """Padded or not, with rows that no expert has."""
    monkeypatch.setattr(_cpu_products, "_rows_to_pad_to", lambda *_: max(sizes) if padded else None)
    weight = torch.randn(4, *shape, dtype=torch.float64).to(dtype)
    weight = weight.mT.contiguous().mT if transposed else weight
    x, given = (
        torch.randn(sum(sizes) + 2, shape[1]).to(dtype),
        torch.randn(4, shape[0]).to(dtype) if bias else None,
    )
    offsets = torch.tensor(offsets_of(sizes), dtype=torch.int32)
    out = _cpu_products.grouped_product(x, GroupedLinear(weight, given), offsets)
    assert_matches_oracle(out, expected_product(x, weight, given, sizes))
    assert not out[-2:].any()


@pytest.mark.parametrize("transposed", [True, False])
def test_large_float32_experts_go_through_onednn(transposed, monkeypatch):
    called = []
    linear = _compat.onednn_linear
    monkeypatch.setattr(_compat, "has_onednn", lambda: True)
    monkeypatch.setattr(_compat, "onednn_linear", lambda x, w: called.append(len(x)) or linear(x, w))
    weight = torch.randn(3, 401, 333)
    weight = weight.mT.contiguous().mT if transposed else weight
    x, bias, sizes = torch.randn(29, 333), torch.randn(3, 401), [5, 4, 20]
    offsets = torch.tensor(offsets_of(sizes), dtype=torch.int32)
    out = _cpu_products.grouped_product(x, GroupedLinear(weight, bias), offsets)
    assert called == [5, 20]  # four rows go column-major
    assert_matches_oracle(out, expected_product(x, weight, bias, sizes))


@pytest.mark.parametrize("transposed", [True, False])
def test_few_float32_rows_go_column_major_where_a_weights_rows_are_contiguous(transposed, monkeypatch):
    """Where its columns are, that takes ten times as long."""
    weight = torch.randn(2, 24, 16)
    weight = weight.mT.contiguous().mT if transposed else weight
    x, sizes, firsts = torch.randn(7, 16), [4, 3], []
    for name in ("mm", "bmm"):
        product = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda a, b, product=product: firsts.append(tuple(a.shape)) or product(a, b)
        )
    offsets = torch.tensor(offsets_of(sizes), dtype=torch.int32)
    expected = expected_product(x, weight, None, sizes)
    for most in (None, 4):
        monkeypatch.setattr(_cpu_products, "_rows_to_pad_to", lambda *_, most=most: most)
        monkeypatch.setattr(_cpu_products, "_suits_torch_grouped_mm", lambda *_: False)
        out = _cpu_products.grouped_product(x, GroupedLinear(weight, None), offsets)
        assert_matches_oracle(out, expected)
    assert firsts == ([(2, 4, 16)] if transposed else [(24, 16), (24, 16), (2, 24, 16)])


@pytest.mark.parametrize(
    ("rows", "shape", "transposed", "dtype", "by_torch"),
    [
        (32, (1024, 504), False, torch.float32, True),
        (32, (1024, 512), False, torch.float32, False),  # at most four rows an expert
        (33, (1024, 512), False, torch.float32, True),
        (32, (1024, 512), True, torch.float32, True),
        (32, (1024, 1024), True, torch.float32, False),
        (32, (2048, 1024), False, torch.bfloat16, True),
        (32, (1024, 512), False, torch.float64, False),
        (32, (1024, 510), False, torch.bfloat16, False),  # rows that start off 16 bytes
        (0, (16, 16), False, torch.bfloat16, False),
    ],
)
def test_torchs_loop_over_experts_where_it_is_no_slower(rows, shape, transposed, dtype, by_torch):
    weight = torch.empty(8, *shape, dtype=dtype, device="meta")
    weight = torch.empty(8, *shape[::-1], dtype=dtype, device="meta").mT if transposed else weight
    x, offsets = torch.empty(rows, shape[1], dtype=dtype), [0] * 8 + [rows]
    assert _cpu_products._suits_torch_grouped_mm(x, GroupedLinear(weight, None), offsets) == by_torch


@pytest.mark.parametrize("multiplies", [True, False])
def test_onednn_is_asked_for_only_where_it_is_on(multiplies, monkeypatch):
    monkeypatch.setattr(_compat, "_onednn_multiplies_bfloat16", lambda: multiplies)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not _compat.has_onednn() and not HAS_PRODUCTS()
    assert _compat.has_onednn() == torch.backends.mkldnn.is_available()
    assert HAS_PRODUCTS() == (multiplies and _compat.has_onednn())


NO_PRODUCTS = pytest.mark.parametrize("processor", [False], indirect=True)


def rows_of(module, name, monkeypatch):
    """Of which dtype and length is what products of torch's get, in the end."""
    product, given = getattr(module, name), []
    monkeypatch.setattr(
        module, name, lambda a, b, **out: given.append((a.dtype, a.shape[0])) or product(a, b, **out)
    )
    return given


@NO_PRODUCTS
@pytest.mark.parametrize(("transposed", "narrow"), [(False, [2, 3, 1]), (True, [])])
@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16_is_widened_where_it_is_not_multiplied(processor, transposed, narrow, bias, monkeypatch):
    """But for a few rows of weights that lie as they are read."""
    made, buffer = [], _cpu_products._buffer
    monkeypatch.setattr(_cpu_products, "_buffer", lambda weight: made.append(1) or buffer(weight))
    monkeypatch.setattr(_cpu_products, "_widens", lambda *_: True)
    given = rows_of(_cpu_products.F, "linear", monkeypatch)
    weight, added = torch.randn(4, 24, 16).bfloat16(), torch.randn(4, 24).bfloat16() if bias else None
    weight = weight.mT.contiguous().mT if transposed else weight
    x, sizes = torch.randn(13, 16).bfloat16(), [2, 3, 7, 1]
    offsets = torch.tensor(offsets_of(sizes), dtype=torch.int32)
    out = _cpu_products.grouped_product(x, GroupedLinear(weight, added), offsets)
    assert [rows for dtype, rows in given if dtype == torch.bfloat16] == narrow
    assert [rows for _, rows in given] == sizes and len(made) == 1
    assert_matches_oracle(out, expected_product(x, weight, added, sizes))


@NO_PRODUCTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_once", [100, 7])
def test_large_weights_are_widened_by_and_by(processor, at_once, dtype, monkeypatch):
    """The last piece is shorter than the others; none is shorter than a row."""
    monkeypatch.setattr(_cpu_products, "_WIDENED", at_once)
    x, weight, bias = (
        torch.randn(9, 11).to(dtype),
        torch.randn(1, 20, 11).to(dtype),
        torch.randn(1, 20).to(dtype),
    )
    out = _cpu_products.expert_linear(x, weight[0], bias[0])
    assert out.dtype == dtype
    assert_matches_oracle(out, expected_product(x, weight, bias, [9]))


@NO_PRODUCTS
def test_sums_over_many_rows_are_widened(processor, monkeypatch):
    monkeypatch.setattr(_cpu_products, "_WIDENED", 100)
    given = rows_of(torch, "mm", monkeypatch)
    grad, x, sizes = torch.randn(11, 20).bfloat16(), torch.randn(11, 11).bfloat16(), [3, 0, 6, 2]
    offsets = torch.tensor(offsets_of(sizes), dtype=torch.int32)
    out = _cpu_products.grouped_outer_product(grad, x, offsets)
    assert given == [
        (torch.bfloat16, 20),
        *((torch.float32, columns) for columns in (9, 9, 2)),
        (torch.bfloat16, 20),
    ]
    rows = zip(grad.double().split(sizes), x.double().split(sizes), strict=True)
    assert_matches_oracle(out, torch.stack([one.T @ other for one, other in rows]))


@NO_PRODUCTS
@pytest.mark.parametrize(
    ("sizes", "shape", "transposed", "by_torch"),  # measured on an EPYC with AVX2 only, one thread
    [
        ([3] * 128, (1536, 128), False, True),  # 28.0 ms, 28.3
        ([8] * 128, (1536, 128), False, False),  # 72.7, 27.1
        ([4] * 128, (128, 768), False, True),  # 13.8, 15.2
        ([12] * 128, (128, 768), False, False),  # 39.7, 19.7
        ([16] * 8, (128, 64), False, False),  # 0.97, 0.40
        ([4] * 8, (128, 64), False, True),
        ([1] * 7 + [64], (512, 512), False, False),
        ([0] * 7 + [4], (512, 512), False, False),
        ([1] * 8, (512, 512), True, False),
    ],
)
def test_torchs_loop_where_little_is_widened(processor, sizes, shape, transposed, by_torch):
    weight, offsets = torch.empty(len(sizes), *shape, dtype=torch.bfloat16, device="meta"), offsets_of(sizes)
    weight = weight.mT.contiguous().mT if transposed else weight
    grad, x = (torch.empty(offsets[-1], columns).bfloat16() for columns in shape)
    assert _cpu_products._suits_torch_grouped_mm(x, GroupedLinear(weight, None), offsets) == by_torch
    assert _cpu_products._suits_torch_grouped_outer(grad, x, offsets) == (by_torch or transposed)


@NO_PRODUCTS
def test_bfloat16_is_not_padded_where_it_is_not_multiplied(processor, monkeypatch):
    assert rows_to_pad_to([12, 16, 9, 14] * 4, SMALL, torch.bfloat16, 1, monkeypatch) is None


def test_padding_reads_no_row_of_another_expert():
    """A row that is NaN stays alone, also in what is padded with it."""
    x, weight = torch.randn(40, 16).bfloat16(), torch.randn(4, 8, 16).bfloat16()
    offsets = torch.tensor([0, 9, 20, 28, 40], dtype=torch.int32)
    clean = moe_ops.grouped_gemm(x, weight, offsets)
    x[0] = float("nan")
    out = moe_ops.grouped_gemm(x, weight, offsets)
    assert out[0].isnan().all() and torch.equal(out[1:], clean[1:])


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize(
    "hot", [[3], [3, 4], [0, 63], [10, 30, 31], list(range(64))], ids=lambda hot: str(hot)[:12]
)
def test_skewed_values(hot, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, w13, w2 = torch.randn(40, 8), torch.randn(E, 12, 8), torch.randn(E, 8, 6)
    ids = torch.tensor(hot)[torch.randint(len(hot), (40, 2))]
    ids[::7, 1] = torch.tensor([-1, E, 0, 5, -1, E - 1])
    weights = torch.rand(40, 2)
    out = moe_ops.fused_experts(x, w13, w2, weights, ids)
    doubles = [tensor.double() for tensor in (x, w13, w2, weights)]
    assert_matches_oracle(out, reference_experts(*doubles, ids, Activation()))
