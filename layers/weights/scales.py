"""Scales of quantised expert weights as parameters: stored and sharded here, used by kernels."""

from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from layers._checks import expect_positive, expect_type


class WeightScale(Enum):
    """How many weights share a scale; a parameter says it in its attribute `quant_method`.

    TENSOR: one per matrix. CHANNEL: one per output row. GROUP: one per row and `group` columns. BLOCK: one per
    block of rows and columns.
    """

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"

    @staticmethod
    def of(param: Tensor, module: nn.Module) -> "WeightScale":
        """The kind of a scale parameter of `module`. Raises ValueError when its `quant_method` names none.

        A copy, what `to_empty` makes and what is assigned have no such attribute: of those the module knows it.
        """
        names = (name for name, each in module.named_parameters(recurse=False) if each is param)
        known = getattr(module, "weight_scales", {}).get(next(names, ""))
        value = getattr(param, "quant_method", known)
        value = value.value if isinstance(value, Enum) else value
        try:
            return WeightScale(value)
        except ValueError:
            kinds = ", ".join(repr(kind.value) for kind in WeightScale)
            raise ValueError(f"quant_method={value!r} of the scale: expected one of {kinds}") from None


def add_weight_scales(
    module: Any, kind: WeightScale, block: tuple[int, int] = (128, 128), *, dtype: torch.dtype = torch.float32
) -> None:
    """Registers `w13_weight_scale` and `w2_weight_scale` on a `FusedMoE`, filled with ones.

    With I the intermediate size on this rank, G = 2I (I for ungated activations) and a `block` of b rows and c
    columns, the shapes are

        TENSOR   [E, 2] ([E, 1] ungated)         and [E]
        CHANNEL  [E, G, 1]                       and [E, H, 1]
        GROUP    [E, G, H / c]                   and [E, H, I / c]
        BLOCK    [E, (G / I) ceil(I / b), ceil(H / c)] and [E, ceil(H / b), ceil(I / c)]

    Args:
        module: a `FusedMoE`; `module.weight_loader` fills the scales from a checkpoint.
        kind: what shares a scale.
        block: rows and columns of a block; GROUP reads the columns only.
        dtype: of the scales.

    Raises:
        TypeError, ValueError: `module` is no `FusedMoE`, `kind` no `WeightScale`, a size of the block is not
            positive, groups or blocks do not fit the sizes of the shard, or a style of `layers.parallel` has sharded
            the module.
    """
    from layers.fused_moe import FusedMoE  # its loader knows the kinds of scales

    expect_type("module", module, FusedMoE)
    expect_type("kind", kind, WeightScale)
    if module.parallel is not None:
        raise ValueError("module is sharded by layers.parallel: expected no scales of weights among ranks")
    if not isinstance(block, tuple) or len(block) != 2:
        raise ValueError(f"block={block!r}: expected (rows, columns)")
    for name, size in zip(("block rows", "block columns"), block):
        expect_positive(name, size)
    shapes = _shapes(module, kind, *block)
    module.weight_scales = {"w13_weight_scale": kind.value, "w2_weight_scale": kind.value}
    for name, shape in zip(("w13_weight_scale", "w2_weight_scale"), shapes, strict=True):
        scale = torch.ones(shape, dtype=dtype, device=module.w13_weight.device)
        param = nn.Parameter(scale, requires_grad=False)
        param.quant_method = kind.value  # type: ignore[attr-defined]
        module.register_parameter(name, param)


def _shapes(
    module: Any, kind: WeightScale, rows: int, columns: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    E, gate_up, H = module.w13_weight.shape
    I = module.w2_weight.shape[2]
    halves = gate_up // I
    if kind is WeightScale.TENSOR:
        return (E, halves), (E,)
    if kind is WeightScale.CHANNEL:
        return (E, gate_up, 1), (E, H, 1)
    if kind is WeightScale.GROUP:
        _expect_multiple("hidden_size", H, columns)
        _expect_multiple("intermediate_size of the shard", I, columns)
        return (E, gate_up, H // columns), (E, H, I // columns)
    if module.shard.size > 1:  # a block that two ranks share has no place in either
        _expect_multiple("intermediate_size of the shard", I, rows)
        _expect_multiple("intermediate_size of the shard", I, columns)
    return (E, halves * -(-I // rows), -(-H // columns)), (E, -(-H // rows), -(-I // columns))


def _expect_multiple(name: str, size: int, part: int) -> None:
    if size % part:
        raise ValueError(f"{name} is {size}: expected a multiple of the block's {part}")
