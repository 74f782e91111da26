"""Which tensors are loaded by TMA: decided by `allows` and nowhere else. What it refuses, the pointer kernels take.

The hardware copies boxes of a tensor and needs every box to start on 16 bytes; else it stops the kernel with an
illegal instruction. All addresses of a plan are sums of the tensor's start, strides times coordinates, and the column
at which a box starts, so it is enough, and required, that

1. the GPU has TMA, and the dtype is bfloat16 or float16;
2. the tensor starts on 16 bytes;
3. the last dimension is contiguous, and every other stride is a multiple of 16 bytes;
4. no elements overlap: a stride is at least as long as the whole dimension inside it, so none is 0;
5. the boxes' first columns are multiples of 16 bytes, as the boxes themselves are;
6. there are elements: no dimension is 0.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import ALIGNMENT, TensorMeta

_DTYPES = (torch.bfloat16, torch.float16)
_LONGEST_STRIDE = 1 << 40  # bytes, what a descriptor can hold


@dataclass(frozen=True, slots=True)
class Boxed:
    """A tensor as boxes are cut from it: dimensions outermost first, the last one contiguous.

    In the last dimension boxes start at multiples of their width, counted from each of `first_columns`.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first_columns: tuple[int, ...] = (0,)


def allows(gpu: Gpu, source: TensorMeta, boxed: Boxed) -> bool:
    """Whether a plan for `gpu` may load `boxed`, a view of the whole of `source`, by TMA; the rule above."""
    return source.dtype in _DTYPES and allows_bytes(gpu, source, boxed)


def allows_bytes(gpu: Gpu, source: TensorMeta, boxed: Boxed) -> bool:
    """The same for any dtype: 8 bits are moved as 16 are."""
    in_16_bytes = ALIGNMENT // source.dtype.itemsize
    *outer, last = boxed.strides
    inside = [size * stride for size, stride in zip(boxed.shape[1:], boxed.strides[1:], strict=True)]
    return (
        gpu.has_tma
        and source.aligned
        and all(boxed.shape)
        and last == 1
        and all(stride % in_16_bytes == 0 for stride in outer)
        and all(stride >= covered for stride, covered in zip(outer, inside, strict=True))
        and max(outer) * source.dtype.itemsize < _LONGEST_STRIDE
        and all(column % in_16_bytes == 0 for column in boxed.first_columns)
    )


def boxed_rows(rows: TensorMeta) -> Boxed:
    """Rows [S, A] that lie in order."""
    return Boxed(rows.shape, rows.strides)


def boxed_weight(weight: TensorMeta, halves: bool) -> Boxed:
    """A weight [E, B, A]. halves: each box of gate rows comes with the up rows that belong to it, B/2 further on."""
    (experts, rows, depth), (per_expert, per_row, per_column) = weight.shape, weight.strides
    if is_transposed(weight):  # gate and up columns are too far apart for one box: two boxes
        first_columns = (0, rows // 2) if halves else (0,)
        return Boxed((experts, depth, rows), (per_expert, per_column, per_row), first_columns)
    if halves:  # one box brings both
        strides = (per_expert, rows // 2 * per_row, per_row, per_column)
        return Boxed((experts, 2, rows // 2, depth), strides)
    return Boxed(weight.shape, weight.strides)


@lru_cache(maxsize=1024)
def allows_weight(gpu: Gpu, weight: TensorMeta, halves: bool) -> bool:
    """`allows` of a `boxed_weight`, which a plan asks for more than once."""
    return allows(gpu, weight, boxed_weight(weight, halves))


def is_transposed(weight: TensorMeta | torch.Tensor) -> bool:
    """Whether the output dimension of the weight [E, B, A] is the contiguous one."""
    return weight.stride(2) != 1
