"""Arguments of operators that take NVFP4, for which there is no check of schemas: it would compute with float8."""

import torch

from tests.ops.samples import IDS, OFFSETS, PAIRS, SLOTS

FLOAT8 = torch.rand(3, 5, 1).to(torch.float8_e4m3fn)


def samples_in_float8():
    """By operator, with global scales."""
    down, of_down = PAIRS.view(3, 10, 2)[:, :8], FLOAT8.repeat(1, 2, 1)[:, :8]
    scales, weights = (torch.rand(3, 2), torch.rand(3, 1)), torch.rand(3, 2)
    return {
        "dequantise_weight": (PAIRS, FLOAT8, None, torch.rand(3, 5), 1, 16, torch.float64),
        "scaled_grouped_gemm": (torch.randn(3, 8), PAIRS, FLOAT8, OFFSETS, *(None,) * 3, scales[1], SLOTS)
        + (1, 16, torch.float32),
        "scaled_fused_experts": (torch.randn(3, 8), PAIRS[:, :4], FLOAT8[:, :4], down, of_down, weights, IDS)
        + (None, None, scales[0], None, None, scales[1], *(None,) * 6, 1, 16, 1, 16, "relu2", "exact"),
    }
