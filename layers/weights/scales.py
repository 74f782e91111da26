"""What shares a scale of quantised expert weights, and which blocks and dtypes go together."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from layers._checks import expect_positive, expect_type
from moe_ops.e2m1 import FLOAT8
from moe_ops.errors import value_error
from moe_ops.int4 import INTEGERS
from moe_ops.nvfp4 import NUMBERS
from moe_ops.pairs import group_of
from moe_ops.quantise_rows import expect_dtype
from moe_ops.scaled_experts import RowKind
from moe_ops.weight_formats import IN_4_BITS


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
        quantisation: Quantisation | None = getattr(module, "quantisation", None)
        known = None if quantisation is None else quantisation.kind_of(next(names, ""))
        value = getattr(param, "quant_method", known)
        value = value.value if isinstance(value, Enum) else value
        try:
            return WeightScale(value)
        except ValueError:
            kinds = ", ".join(repr(kind.value) for kind in WeightScale)
            raise ValueError(f"quant_method={value!r} of the scale: expected one of {kinds}") from None


WEIGHTS = ("w13_weight", "w2_weight")
SCALES = ("w13_weight_scale", "w2_weight_scale")
ZERO_POINTS = ("w13_weight_zero_point", "w2_weight_zero_point")
GLOBAL_SCALES = ("w13_weight_scale_2", "w2_weight_scale_2")
INPUT_SCALES = ("w13_input_scale", "w2_input_scale")

Rows = RowKind | Literal["static"]
"""What is multiplied with weights; "static": rows that are quantised with the layer's input scales."""
ROWS: tuple[str, ...] = (*get_args(RowKind), "static")


Blocks = tuple[tuple[int, int], tuple[int, int]]
"""Rows and columns that share a scale, of w13 and of w2."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the experts of a layer are quantised: what shares a scale, and whether tokens are quantised too.

    zero_points: whether what shares a scale shares a zero point as well.
    global_scales: whether each matrix has a scale besides.
    """

    kind: WeightScale
    block: tuple[int, int]
    rows: Rows = "quantised"
    zero_points: bool = False
    global_scales: bool = False

    @property
    def all_parameters(self) -> tuple[str, ...]:
        """Names of those that keep their dtypes where a model is cast."""
        return (*self.parameters, *(INPUT_SCALES if self.rows == "static" else ()))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of those that a layer has beside its weights, each expert its own."""
        of_blocks = (*SCALES, *ZERO_POINTS) if self.zero_points else SCALES
        return (*of_blocks, *GLOBAL_SCALES) if self.global_scales else of_blocks

    def kind_of(self, name: str) -> WeightScale | None:
        """What shares a number of such a parameter; None where `name` is none of them."""
        if name not in self.parameters:
            return None
        return WeightScale.TENSOR if name in GLOBAL_SCALES else self.kind


def expect_format(kind: WeightScale, block: tuple[int, int], dtype: torch.dtype, rows: Rows) -> None:
    """Raises TypeError, ValueError for rows, block and dtype that are none, and what is not for weights of 4 bits."""
    expect_block(block)
    if rows not in ROWS:
        raise ValueError(f"rows={rows!r}: expected one of {', '.join(map(repr, ROWS))}")
    if dtype not in IN_4_BITS:
        expect_dtype("dtype", dtype)
    elif not _is_of_pairs(kind, block[1], dtype):
        expected = f"GROUP of a multiple of {_group_of(dtype)} columns, or CHANNEL of {INTEGERS}"
        raise ValueError(f"{kind}, block={block} with weights of 4 bits: expected {expected}")
    elif rows != "exact":
        raise ValueError(f"rows={rows!r} with weights of 4 bits: expected 'exact'")


def expect_zero_points(zero_points: bool, dtype: torch.dtype) -> None:
    """Raises TypeError, ValueError where there can be none."""
    expect_type("zero_points", zero_points, bool)
    if zero_points and dtype != INTEGERS:
        raise ValueError(f"zero_points=True with dtype={dtype}: expected {INTEGERS}, integers of 4 bits")


def _is_of_pairs(kind: WeightScale, columns: int, dtype: torch.dtype) -> bool:
    if kind is WeightScale.CHANNEL:
        return dtype == INTEGERS
    return kind is WeightScale.GROUP and columns % _group_of(dtype) == 0


def _group_of(dtype: torch.dtype) -> int:
    return group_of(FLOAT8 if dtype == NUMBERS else dtype)


def expect_block(block: tuple[int, int]) -> None:
    """Raises ValueError for anything but two positive numbers."""
    if not isinstance(block, tuple) or len(block) != 2:
        raise ValueError(f"block={block!r}: expected (rows, columns)")
    for name, size in zip(("block rows", "block columns"), block):
        expect_positive(name, size)


def expect_even(hidden_size: int, features: int) -> None:
    """Raises ValueError for rows that are no whole bytes of numbers of 4 bits."""
    for name, size in (("hidden_size", hidden_size), ("intermediate_size of the shard", features)):
        if size % 2:
            raise ValueError(f"{name} is {size}: expected an even number with weights of 4 bits")


def blocks_of_kind(
    kind: WeightScale, block: tuple[int, int], sizes: tuple[int, int, int], interleaved: bool
) -> Blocks:
    """Rows and columns of a block of w13, and of w2. sizes: rows of w13, H and I.

    Raises ValueError where a block has gate rows and up rows.
    """
    rows, columns = block
    gate_up, hidden_size, features = sizes
    if kind is WeightScale.TENSOR:
        blocks = (features, hidden_size), (hidden_size, features)
    elif kind is WeightScale.CHANNEL:
        blocks = (1, hidden_size), (1, features)
    else:
        size = rows if kind is WeightScale.BLOCK else 1, columns
        blocks = size, size
    if gate_up != features:
        _expect_apart(blocks[0][0], features, interleaved)
    return blocks


def _expect_apart(rows: int, features: int, interleaved: bool) -> None:
    if rows == 1:
        return
    if interleaved:
        value_error("scales of blocks with gate and up rows in turns: expected one of CHANNEL and GROUP")
    if features % rows:
        value_error(
            "intermediate_size of the shard is {}: expected a multiple of the block's {}", features, rows
        )
