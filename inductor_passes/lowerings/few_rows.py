"""Products of few rows on a CPU as ATen, which Inductor turns into C++ loops: those of layers that train.

`(weight[expert] * row).sum()` copies no weight and melts into what stands before and behind it, where a call for the
products of a few rows costs more than what it computes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes.graph_tools import arguments
from inductor_passes.lowerings.cpu_routing import in_memory
from moe_ops._checks import compute_dtype
from moe_ops.arguments import GroupedGemm, GroupedGemmWeightBackward

_FEW_ROWS, _MOST_ROWS, _FEW_PRODUCTS = 16, 64, 1 << 21
"""Rows of a product; up to so many where it multiplies no more numbers than this."""
_FEW_TERMS, _LARGE_GRADIENT = 8, 1 << 22
"""Rows of a weight gradient: each takes a sum over all of them. Numbers of one in float32 that are written twice, first
as zeros, for longer than a call takes; bfloat16's calls take longer.
"""


def has_few_rows(node: Node) -> bool:
    """Whether a product, or the gradient to its weight, is faster as loops than as a call."""
    args = arguments(node)
    num_rows, features = args.x.meta["val"].shape
    if not isinstance(num_rows, int) or num_rows < 1:
        return False
    if isinstance(args, GroupedGemmWeightBackward):
        gradient = node.meta["val"]
        is_large = gradient.dtype == torch.float32 and gradient.numel() >= _LARGE_GRADIENT
        return num_rows <= _FEW_TERMS and not is_large
    columns = args.weight.weight.meta["val"].shape[1]
    is_small = num_rows <= _MOST_ROWS and num_rows * features * columns <= _FEW_PRODUCTS
    return num_rows <= _FEW_ROWS or is_small


def product_of_few_rows(args: GroupedGemm) -> Tensor:
    """`grouped_gemm` of one weight: in the compute dtype, zeros in rows of no expert."""
    x, (weight, bias, *_), expert_offsets = args
    expert, chosen = _experts(expert_offsets, x.shape[0])
    rows = x.to(compute_dtype(x.dtype))
    if weight.stride(2) == 1:
        product = (weight[chosen].to(rows.dtype) * rows.unsqueeze(1)).sum(2)
    else:
        product = (weight.transpose(1, 2)[chosen].to(rows.dtype) * rows.unsqueeze(2)).sum(1)
    if bias is not None:
        product = product + bias[chosen].to(rows.dtype)
    return product.masked_fill((expert == weight.shape[0]).unsqueeze(1), 0.0).to(x.dtype)


def weight_gradient_of_few_rows(args: GroupedGemmWeightBackward) -> Tensor:
    """`grouped_gemm_weight_backward`: each row brings its expert's sum, and experts of no row are zeros.

    Rows of one expert bring the same, so it does not matter which is written last; those of none bring expert 0's.
    """
    grad, x, expert_offsets = args
    expert, chosen = _experts(expert_offsets, x.shape[0])
    is_alike = in_memory(expert == chosen.unsqueeze(1)).unsqueeze(2)  # [S, S, 1]

    def alike(rows: Tensor) -> Tensor:
        """The rows of each row's expert, zeros in the place of others, which may be NaN: [S, S, ...]."""
        return in_memory(torch.where(is_alike, rows.to(compute_dtype(rows.dtype)), 0.0))

    sums = (alike(grad).unsqueeze(3) * alike(x).unsqueeze(2)).sum(1).to(x.dtype)  # [S, B, A]
    out = sums.new_zeros((expert_offsets.shape[0] - 1, *sums.shape[1:]))
    return torch.ops.aten.index_put(out, [chosen], sums)


def _experts(expert_offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """[S] each: the expert of every row, their number for a row of none; and the same with 0 for that."""
    num_experts = expert_offsets.shape[0] - 1
    rows = torch.arange(num_rows)
    expert = in_memory((rows.unsqueeze(1) >= expert_offsets[1:]).sum(1))
    return expert, in_memory(expert.masked_fill(expert == num_experts, 0))


FORMULAS: dict[str, Callable[[Any], Tensor]] = {
    "grouped_gemm": product_of_few_rows,
    "grouped_gemm_weight_backward": weight_gradient_of_few_rows,
}
