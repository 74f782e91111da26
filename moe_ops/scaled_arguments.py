"""What the operators of quantised rows and weights take."""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from moe_ops.records import Role
from moe_ops.values import (
    Epilogue,
    ExpertWeights,
    GroupedLinear,
    Ids,
    Index,
    PairedLinear,
    PerToken,
    PerTokenOrNone,
    Placement,
    ScaledLinear,
)


class QuantiseRows(NamedTuple):
    """Of `quantise_rows`."""

    x: Annotated[Tensor, Role.PER_TOKEN, Role.CONSTANT]
    columns: int
    dtype: torch.dtype
    input_scale: Annotated[Tensor | None, Role.CONSTANT] = None


class DequantiseWeight(NamedTuple):
    """Of `dequantise_weight`; see `ScaledLinear`."""

    weight: Annotated[Tensor, Role.CONSTANT]
    scale: Annotated[Tensor, Role.CONSTANT]
    block_rows: int
    block_columns: int
    dtype: torch.dtype
    zero: Annotated[Tensor | None, Role.CONSTANT] = None
    global_scale: Annotated[Tensor | None, Role.CONSTANT] = None

    @property
    def linear(self) -> ScaledLinear:
        """Its product, without a bias."""
        weight, scale, rows, columns, _, *beside = self
        return ScaledLinear(weight, scale, None, rows, columns, *beside)


class ScaledGroupedGemm(NamedTuple):
    """Of `scaled_grouped_gemm`: rows [S, A], or tokens [T, A] whose slots are given; result in `dtype`."""

    x: Tensor
    x_scale: Annotated[Tensor | None, Role.CONSTANT]
    weight: ScaledLinear
    expert_offsets: Index
    sorted_slots: Annotated[Tensor | None, Role.INDEX]
    dtype: torch.dtype


class ScaledFusedExperts(NamedTuple):
    """Of `scaled_fused_experts`, with "quantised" or "exact" rows; the scales of quantised ones may be given."""

    hidden_states: Annotated[Tensor, Role.PER_TOKEN, Role.CONSTANT]
    w13: ScaledLinear
    w2: ScaledLinear
    topk_weights: PerToken
    topk_ids: Ids
    placement: Placement
    shared: PerTokenOrNone
    activation: str
    epilogue: Epilogue = Epilogue()
    rows: str = "quantised"
    w13_input_scale: Annotated[Tensor | None, Role.CONSTANT] = None
    w2_input_scale: Annotated[Tensor | None, Role.CONSTANT] = None

    @property
    def experts(self) -> ExpertWeights:
        """As those of other layers, without scales."""
        return without_scales(self.w13, self.w2)


def dequantising(linear: ScaledLinear, dtype: torch.dtype) -> DequantiseWeight:
    """What `dequantise_weight` takes of a product's weight."""
    weight, scale, _, rows, columns, *beside = linear
    return DequantiseWeight(weight, scale, rows, columns, dtype, *beside)


def without_scales(w13: ScaledLinear, w2: ScaledLinear) -> ExpertWeights:
    """Weights and biases alone."""
    return ExpertWeights(PairedLinear(w13.weight, w13.bias), GroupedLinear(w2.weight, w2.bias))
