"""Kernels of rows whose scales are known before, on the GPU, or interpreted."""

import pytest
import torch

import moe_ops
from moe_ops import _library
from moe_ops.types import Activation
from tests.helpers import mixed
from tests.kernels.by_name import launch, program_of, record
from tests.kernels.test_scaled import STORED, expect_rounded_alike
from tests.kernels.test_scaled_fused import ACTIVATIONS, FEW, SIZES, _layer, _stages


@pytest.mark.parametrize(
    ("depth", "columns", "count", "dtype"),
    mixed([37, 130, 9000], [5, 128, 9000], [1, 3, 200], STORED),
    ids=str,
)
def test_rows_are_quantised_as_on_a_cpu(depth, columns, count, dtype, device):
    x, scales = torch.randn(5, depth), (torch.rand(2 * count) / 200)[::2]  # some are too large for the scale
    x[1, depth - 1], x[3, 0] = float("nan"), float("inf")
    rows, scale = launch("quantise_rows", x.to(device), scales.to(device), columns, dtype)
    expected_rows, expected_scale = moe_ops.quantise_rows(x, columns, dtype, scales)
    assert torch.equal(scale.cpu().nan_to_num(-1), expected_scale.nan_to_num(-1))
    known = expected_scale.isfinite().repeat_interleave(columns, 1)[:, :depth]
    exact = (x.double() / scales.max()).clamp(-500, 500)[known]
    expect_rounded_alike(rows[known.to(device)], expected_rows[known], exact)


def test_scales_that_are_no_scales(device):
    x = torch.tensor([[1.0, -2.0, 3.0]]).to(device)
    rows, scale = launch("quantise_rows", x, torch.zeros(5, device=device), 3, torch.int8)
    assert rows.tolist() == [[1, -2, 3]] and scale.tolist() == [[1]]
    unknown = torch.tensor([0.5, float("nan"), 2.0], device=device)
    assert launch("quantise_rows", x, unknown, 3, torch.int8)[1].isnan().all()
    assert launch("quantise_rows", x, -unknown[2:], 3, torch.int8)[1].tolist() == [[2]]


def _with_scales(size, stored, dtype, activation, device, given=("w13", "w2")):
    at = _layer(size, stored, dtype, activation)
    most = 127 if stored == torch.int8 else 448
    at |= {f"{name}_input_scale": torch.rand(3) * 4 / most for name in given}
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in at.items()}


@pytest.mark.parametrize(
    ("size", "stored", "dtype", "name", "given"),
    mixed(SIZES, STORED, (torch.bfloat16, torch.float32), ACTIVATIONS, [("w13", "w2"), ("w13",), ("w2",)]),
    ids=str,
)
def test_bits_are_those_of_the_stages(size, stored, dtype, name, given, device):
    at = _with_scales(size, stored, dtype, ACTIVATIONS[name], device, given)
    found, expected = launch("scaled_fused_experts", **at), _stages(at)
    assert expected.isfinite().all() and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("size", "name", "given"),
    mixed(FEW, ACTIVATIONS, [("w13", "w2"), ("w13",), ("w13", "w2"), ("w2",), ("w13", "w2")]),
    ids=str,
)
def test_few_tokens(size, name, given, device):
    """Of float32, which no stage rounds: as on a CPU, whose sums are float32, which those of tensor cores are not."""
    at = _with_scales(size, STORED[0], torch.float32, ACTIVATIONS[name], "cpu", given) | {"shared": None}
    on_device = {k: each.to(device) if isinstance(each, torch.Tensor) else each for k, each in at.items()}
    found = launch("scaled_fused_experts", **on_device).double().cpu()
    # Triton's interpreter rounds to float8 otherwise.
    expected = _library.call(record("scaled_fused_experts", **at)) if device == "cuda" else _stages(at)
    assert found.isfinite().all() and (found - expected.double()).norm() <= 3e-3 * expected.double().norm()


@pytest.mark.parametrize("size", ["T2", "one scale over steps", "T7"])
def test_a_token_that_is_not_finite(size, device):
    """A NaN makes its token one, and no other; what is infinite is the largest number that there is."""
    at = _with_scales(size, STORED[0], torch.bfloat16, Activation("silu"), device)
    clean = launch("scaled_fused_experts", **at)
    at["hidden_states"][0, 40] = float("inf")
    assert launch("scaled_fused_experts", **at).isfinite().all()
    at["hidden_states"][0, 40] = float("nan")
    found = launch("scaled_fused_experts", **at)
    assert found[0].isnan().all() and torch.equal(found[1:], clean[1:])


@pytest.mark.parametrize("size", ["T2", "groups", "deep"])
def test_short_rows_of_few_tokens_have_no_launch(size, device):
    """Whatever the blocks of their weights, for a row has one scale."""
    at = _with_scales(size, STORED[0], torch.bfloat16, Activation("silu"), device)
    names = [launch.kernel.__name__ for launch in program_of("scaled_fused_experts", **at).launches]
    first = ["quantise_rows_kernel"] if size == "deep" else []
    assert names == [*first, "scaled_gemv_kernel", "scaled_gemv_kernel", "_combine_kernel"]
