"""Products of quantised weights that keep a whole GPU busy."""

import pytest
import torch

import moe_ops
from moe_ops.scaled import scaled_linear
from moe_ops.weight_formats import dequantised, quantised_weight
from tests.helpers import relative_error


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint4, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows_each", [16, 32, 64, 128, 512])
def test_much_at_once_gives_the_same_bits(dtype, rows_each):
    """Tensor cores of a whole GPU, busy: what one product still reads, no other step may write."""
    experts, features, depth = 16, 4096, 4096
    x = torch.randn(experts * rows_each, depth, device="cuda", dtype=torch.bfloat16)
    dense = torch.randn(experts, features, depth, device="cuda", dtype=torch.bfloat16) / 64
    weight = quantised_weight(dense, (1, 32 if dtype in (torch.uint8, torch.uint4) else depth), dtype)
    offsets = torch.arange(experts + 1, device="cuda", dtype=torch.int32) * rows_each
    found = [moe_ops.scaled_grouped_gemm(x, weight, offsets) for _ in range(6)]
    assert all(torch.equal(each, found[0]) for each in found)
    meant = dequantised(scaled_linear("weight", weight, None), torch.bfloat16)
    assert relative_error(found[0], moe_ops.grouped_gemm(x, meant, offsets)) < 3e-3
