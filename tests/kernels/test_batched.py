"""The batched product on both paths: every weight layout, counts that make no sense, padding that must not be read."""

import pytest
import torch

from moe_ops import batched
from moe_ops.kernels.gpu import H200
from tests.helpers import mixed
from tests.kernels import oracles
from tests.kernels.by_name import launch, program_of, record
from tests.kernels.catalogue import meta, product
from tests.kernels.oracles import assert_close

COUNTS = {"ragged": [3, 0, 9, 1], "none": [0, 0, 0, 0], "full": [9, 9, 9, 9], "odd": [-5, 1 << 30, 9, 2]}
EXPERTS, ROWS = 4, 9


def _weight(shape: tuple[int, int, int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    experts, features, depth = shape
    if layout == "transposed":
        return torch.randn(experts, depth, features).to(dtype).transpose(1, 2)
    return torch.randn(shape).to(dtype)


def _counts(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def _poisoned(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    for expert, count in enumerate(counts):
        x[expert, max(count, 0) :] = float("nan")
    return x


@pytest.mark.parametrize(
    ("case", "layout", "dtype"),
    mixed(COUNTS, ("plain", "transposed"), (torch.bfloat16, torch.float32, torch.float64), rounds=2),
    ids=str,
)
def test_matches_the_oracle(dtype: torch.dtype, layout: str, case: str, device: str) -> None:
    weight, counts = _weight((EXPERTS, 48, 72), dtype, layout), COUNTS[case]
    x = _poisoned(torch.randn(EXPERTS, ROWS, 72).to(dtype), counts)
    bias = torch.randn(EXPERTS, 48).to(dtype)
    args = x.to(device), weight.to(device), _counts(counts, device)
    assert product(args[1]).weight_by_tma == (dtype == torch.bfloat16)
    out = launch("batched_gemm", *args, bias.to(device))
    assert_close(out, oracles.batched_gemm(x, weight, counts, bias))
    for expert, count in enumerate(counts):
        assert not out[expert, max(count, 0) :].any()
    assert_close(launch("batched_gemm", *args), oracles.batched_gemm(x, weight, counts))


@pytest.mark.parametrize("rows, features, depth", [(1, 13, 511), (1, 1, 1), (17, 130, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_odd_sizes(rows: int, features: int, depth: int, dtype: torch.dtype, device: str) -> None:
    weight, counts = _weight((3, features, depth), dtype, "plain"), [1, 0, rows]
    x = _poisoned(torch.randn(3, rows, depth).to(dtype), counts)
    out = launch("batched_gemm", x.to(device), weight.to(device), _counts(counts, device))
    assert_close(out, oracles.batched_gemm(x, weight, counts))


def test_rows_by_tma_bring_padding_along_and_leave_it(device: str) -> None:
    rows, counts = 160, [129, 1, 0]
    weight, x = torch.randn(3, 64, 64).bfloat16(), torch.randn(3, rows, 64).bfloat16()
    planned = program_of(
        "batched_gemm", meta(3, rows, 64), meta(3, 64, 64), meta(3, dtype=torch.int32), gpu=H200
    )
    assert any(each.args.get("x_desc") is not None for each in planned.launches)
    x = _poisoned(x, counts)
    out = launch("batched_gemm", x.to(device), weight.to(device), _counts(counts, device))
    assert_close(out, oracles.batched_gemm(x, weight, counts))


def test_more_experts_than_a_tile_record_is_long(device: str) -> None:
    counts = [index % 4 for index in range(70)]
    weight = torch.randn(70, 16, 16).bfloat16()
    x = _poisoned(torch.randn(70, 3, 16).bfloat16(), counts)
    out = launch("batched_gemm", x.to(device), weight.to(device), _counts(counts, device))
    assert_close(out, oracles.batched_gemm(x, weight, counts))


def test_rows_of_any_stride_but_no_gap_between_experts(device: str) -> None:
    counts, weight = [2, 5, 0], torch.randn(3, 8, 12)
    x = torch.randn(3, 5, 24)[..., ::2]
    out = launch("batched_gemm", x.to(device), weight.to(device), _counts(counts, device))
    assert_close(out, oracles.batched_gemm(x, weight, counts))
    gap = torch.randn(3, 6, 12).to(device)[:, :5]
    with pytest.raises(ValueError, match=r"x has strides \(72, 12, 1\): expected experts that follow"):
        launch("batched_gemm", gap, weight.to(device), _counts(counts, device))
    copied = batched._cuda(record("batched_gemm", gap, weight.to(device), _counts(counts, device)))
    assert_close(copied, oracles.batched_gemm(gap, weight, counts))
