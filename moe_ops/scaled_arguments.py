"""What the operators of quantised rows and weights take."""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from moe_ops.records import Role
from moe_ops.values import Index, ScaledLinear


class QuantiseRows(NamedTuple):
    """Of `quantise_rows`."""

    x: Annotated[Tensor, Role.PER_TOKEN, Role.CONSTANT]
    columns: int
    dtype: torch.dtype


class ScaledGroupedGemm(NamedTuple):
    """Of `scaled_grouped_gemm`: rows [S, A], or tokens [T, A] whose slots are given; result in `dtype`."""

    x: Tensor
    x_scale: Annotated[Tensor | None, Role.CONSTANT]
    weight: ScaledLinear
    expert_offsets: Index
    sorted_slots: Annotated[Tensor | None, Role.INDEX]
    dtype: torch.dtype
