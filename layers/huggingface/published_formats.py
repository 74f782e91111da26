"""Weights of 4 bits as GPTQ, AWQ, compressed-tensors and ModelOpt publish them: tensors of a matrix, what they become.

A matrix has B rows and A columns, and G groups of columns that share a scale. What is here knows of no model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from layers.weights.packed_integers import (
    integers_of_awq,
    integers_of_gptq,
    zeros_of_compressed_tensors,
)
from moe_ops.errors import value_error
from moe_ops.int4 import INTEGERS, ZERO
from moe_ops.nvfp4 import NUMBERS
from moe_ops.pairs import PAIRS
from moe_ops.types import ScaledWeight
from moe_ops.values import ScaledLinear

Tensors = dict[str, Tensor]
"""Of a matrix, by the ends of their names."""

_IN_COLUMNS = ("qweight", "qzeros", "scales")
_GROUP = 16  # of NVFP4


@dataclass(frozen=True, slots=True)
class Published:
    """What a checkpoint has of each quantised matrix.

    parts: its tensors, by the ends of their names: numbers, scales and what else there must be.
    beside: what there may be.
    make: turns them into a matrix in our layout: weight [B, A / 2], scale and zero point [B, G], global scale [1].
    columns: how many share a scale, None for all of a row.
    stored: the dtype of numbers. dtype: what names the format where weights are made.
    """

    parts: tuple[str, ...]
    beside: tuple[str, ...]
    make: Callable[[Tensors], ScaledWeight]
    columns: int | None
    zero_points: bool = False
    stored: torch.dtype = torch.int32
    dtype: torch.dtype = INTEGERS

    @property
    def numbers(self) -> str:
        """The first part."""
        return self.parts[0]

    @property
    def scale(self) -> str:
        """The part that is the scales."""
        return next(each for each in self.parts if each in ("scales", "weight_scale"))

    @property
    def has_global_scale(self) -> bool:
        """Whether a matrix has one."""
        return self.dtype == NUMBERS

    def is_in(self, tensors: Tensors) -> bool:
        """Whether the matrix that has these is quantised."""
        return self.numbers in tensors and tensors[self.numbers].dtype == self.stored

    def unpack(self, tensors: Tensors) -> ScaledLinear:
        """A matrix in our layout. Raises ValueError for tensors that do not belong together."""
        made = self.make(tensors)
        depth, groups = 2 * made.weight.shape[-1], made.scale.shape[-1]
        group = self.group(depth)
        if groups != depth // group:
            value_error(
                "{} has {} groups of {} columns: expected {}", self.scale, groups, depth, depth // group
            )
        return ScaledLinear(made.weight, made.scale, None, 1, group, made.zero, made.global_scale)

    def group(self, columns: int) -> int:
        """How many columns of a row share a scale. Raises ValueError where they do not fill it."""
        group = columns if self.columns is None else min(self.columns, columns)
        if columns % group:
            value_error("group_size={} of rows of {} columns: expected a divisor", group, columns)
        return group


def gptq(columns: int | None, zero_points: bool, is_v2: bool) -> Published:
    """`is_v2`: zero points are stored as they are, and not less 1."""
    make = partial(_of_gptq, zero_points, is_v2)
    return Published(_IN_COLUMNS, ("g_idx",), make, columns, zero_points)


def awq(columns: int | None) -> Published:
    """In the layout of its GEMM version."""
    return Published(_IN_COLUMNS, (), _of_awq, columns, zero_points=True)


def pack_quantized(columns: int | None, zero_points: bool) -> Published:
    """Integers of compressed-tensors."""
    parts = ("weight_packed", "weight_scale", *(("weight_zero_point",) if zero_points else ()))
    return Published(parts, ("weight_shape",), _of_packed, columns, zero_points)


def nvfp4_pack_quantized() -> Published:
    """NVFP4 of compressed-tensors, whose global scale is what weights were multiplied with."""
    parts = "weight_packed", "weight_scale", "weight_global_scale"

    def make(tensors: Tensors) -> ScaledWeight:
        weight, scale, divisor = (tensors[part] for part in parts)
        return ScaledWeight(weight, scale, global_scale=1 / divisor.float().reshape(1))

    return Published(parts, ("input_global_scale",), make, _GROUP, stored=PAIRS, dtype=NUMBERS)


def nvfp4_of_modelopt() -> Published:
    """NVFP4 of ModelOpt, whose second scale is what weights are multiplied with."""
    parts = "weight", "weight_scale", "weight_scale_2"

    def make(tensors: Tensors) -> ScaledWeight:
        weight, scale, factor = (tensors[part] for part in parts)
        return ScaledWeight(weight, scale, global_scale=factor.float().reshape(1))

    return Published(parts, ("input_scale",), make, _GROUP, stored=PAIRS, dtype=NUMBERS)


def _of_gptq(zero_points: bool, is_v2: bool, tensors: Tensors) -> ScaledWeight:
    qweight, qzeros, scales = (tensors[part] for part in _IN_COLUMNS)
    found = integers_of_gptq(qweight, qzeros, scales, tensors.get("g_idx"), is_v2=is_v2)
    if not zero_points and bool((found.zero != ZERO).any()):
        value_error("qzeros has zero points other than {} with sym=True: expected sym=False", ZERO)
    return ScaledWeight(found.weight, found.scale, zero=found.zero if zero_points else None)


def _of_awq(tensors: Tensors) -> ScaledWeight:
    found = integers_of_awq(*(tensors[part] for part in _IN_COLUMNS))
    return ScaledWeight(found.weight, found.scale, zero=found.zero)


def _of_packed(tensors: Tensors) -> ScaledWeight:
    weight, scale = tensors["weight_packed"].contiguous().view(PAIRS), tensors["weight_scale"]
    packed = tensors.get("weight_zero_point")
    zero = None if packed is None else zeros_of_compressed_tensors(packed, scale.shape[0])
    return ScaledWeight(weight, scale, zero=zero)
