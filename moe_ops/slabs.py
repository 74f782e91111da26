"""Slabs of quantised weights: the same features of every expert, so many that a copy is not larger than 2 GiB.

A product with a slab makes some columns of all rows, which are added up as with a whole copy. With some experts at a
time a token's sum would be rounded between them.
"""

import math
from typing import Any

import torch

from moe_ops.types import is_gated_spec, is_interleaved_spec

_MOST_BYTES = 2 << 30
_TILE = 128  # features that a product makes at once, at most two of these


def features_at_once(linear: Any, dtype: torch.dtype, halves: int = 1) -> int:
    """How many features of each half are copied at a time, all of them or whole tiles and blocks; 0 if none can be.

    With two halves, gate and up, a slab is the same features of both.
    """
    (num_experts, features, _), rows = linear.weight.shape, linear.block_rows
    features //= halves
    most = _MOST_BYTES // max(halves * num_experts * linear.depth * dtype.itemsize, 1)
    if features <= most:
        return features
    starts_a_block = halves == 1 or features % rows == 0 or rows >= halves * features
    unit = math.lcm(_TILE, rows) if rows < features else _TILE
    if most < unit or not starts_a_block:
        return 0
    slabs = -(-features // (most // unit * unit))
    return -(-features // (slabs * unit)) * unit


def halves_in(activation: str) -> int:
    """Of how many halves a first weight consists whose slabs are parts of both: of two where gate and up are apart."""
    return 2 if is_gated_spec(activation) and not is_interleaved_spec(activation) else 1
