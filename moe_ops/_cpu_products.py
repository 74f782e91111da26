"""The products of a layer's experts on the CPU, fast enough to use.

Torch's own way is one product after the other. A small one costs more to call than to compute and leaves cores waiting
for each other; a core that is busy elsewhere holds up each of them. So small products are one `bmm` of all experts,
each padded to the rows of the fullest, where that costs less than it spares. Large float32 ones go through oneDNN.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ops import _compat
from moe_ops.arguments import GroupedLinear, PairedLinear
from moe_ops.errors import value_error

_FEW_ROWS = 4  # that a product takes column-major
_LARGE_EXPERT = 1 << 17  # weights: more than stay in a core's cache
_HUGE_EXPERT = 1 << 20  # weights: those of a product that is better alone
_MANY_EXPERTS = 32  # with rows: float32 calls of fewer are as good
_CALL = {torch.bfloat16: 3_000_000, torch.float32: 1_500_000}
"""What a call costs, in multiplications of the same time."""
_COPY = {torch.bfloat16: 26, torch.float32: 125}
"""What bringing one element of a padded row in or out costs, in the same unit."""
_SUMMED = 2
"""How many times that in a product that sums over rows: padding has to be zeros, and rows lie across."""
_READ = 40
"""What reading a weight costs that no row needs, in the same unit."""
_WIDENED, _NARROW_ROWS = 1 << 18, 3
"""Weights that are made float32 at a time, as many as stay in a core's cache; up to so many rows they stay bfloat16."""
_FROM_PYTHON = 100_000
"""Slow multiplications that take as long as a call from Python."""


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor | None = None) -> Tensor:
    """[m, B] = x [m, A] @ weight [B, A].T + bias [B], of any strides, accumulated in float32 or float64.

    A few float32 rows are faster column-major: 60 against 116 us at 2 rows and 512 x 512 on one core, where a weight's
    rows are contiguous; where its columns are, 1076 against 101. One row is a matrix-vector product. More rows are
    faster in oneDNN: 3.0 against 3.4 ms at 64 and 2048 x 1024. `buffer` is a `_buffer` that several products share.
    """
    rows = x.shape[0]
    if _is_widened(x.dtype, rows, weight.stride(1) == 1):
        buffer = _buffer(weight) if buffer is None else buffer
        product = _in_float32(x.float(), weight, buffer).to(x.dtype)
    elif x.dtype != torch.float32 or rows == 0:
        product = F.linear(x, weight)
    elif rows == 1:
        product = torch.mv(weight, x[0]).unsqueeze(0)
    elif rows <= _FEW_ROWS and weight.stride(1) == 1:
        product = torch.mm(weight, x.t()).t()
    elif rows > _FEW_ROWS and weight.numel() > _LARGE_EXPERT and _compat.has_onednn():
        product = _compat.onednn_linear(x, weight)
    else:
        product = F.linear(x, weight)
    return product if bias is None else product.add_(bias)


def _is_slow(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and not _compat.has_bfloat16_products()


def _is_widened(dtype: torch.dtype, rows: int, is_standard: bool) -> bool:
    """Whether a product of so many rows is one of float32: its kernel is ~50 times as fast as float16's.

    Of bfloat16 on processors that do not multiply it, 64 rows and 512 x 512: 0.6 against 4.0 ms, against 24.5 where
    columns of the weight are contiguous.
    """
    return dtype == torch.float16 or (_is_slow(dtype) and (rows > _NARROW_ROWS or not is_standard))


def _in_float32(x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    """`expert_linear` of 16 bits in float32, all weights in one piece of memory in turn: new pages take longer."""
    products, is_standard = [], weight.stride(1) == 1
    for part in weight.split(max(1, _WIDENED // max(1, weight.shape[1]))):
        lying = part if is_standard else part.t()
        wide = buffer[: part.numel()].view(lying.shape).copy_(lying)
        products.append(F.linear(x, wide if is_standard else wide.t()))
    return torch.cat(products, 1) if len(products) > 1 else products[0]


def _buffer(weight: Tensor) -> Tensor:
    """For `_in_float32` of weights [B, A], or [E, B, A]."""
    features, depth = weight.shape[-2:]
    return weight.new_empty(min(features * depth, max(_WIDENED, depth)), dtype=torch.float32)


def paired_product(x: Tensor, linear: PairedLinear, expert: int) -> Tensor:
    """[m, B] of rows x [m, A] with the weight of `expert`; of a pair [m, 2B]."""
    products = [
        expert_linear(x, part.weight[expert], None if part.bias is None else part.bias[expert])
        for part in linear.parts
    ]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


def grouped_products(x: Tensor, linear: PairedLinear, expert_offsets: Tensor) -> Tensor:
    """`grouped_product`, of a pair one beside the other: [S, 2B]."""
    products = [grouped_product(x, part, expert_offsets) for part in linear.parts]
    return products[0] if len(products) == 1 else torch.cat(products, 1)


def grouped_product(x: Tensor, linear: GroupedLinear, expert_offsets: Tensor) -> Tensor:
    """[S, B]: rows expert_offsets[e] to expert_offsets[e + 1] of x [S, A] times the weight [B, A] of e, plus bias.

    Rows that no expert has are zero.
    """
    weight = linear.weight
    offsets = read_offsets(expert_offsets, x.shape[0])
    if (most := _rows_to_pad_to(offsets, x.dtype, weight.shape[1:])) is not None:
        out = _all_at_once(x, linear, _padding(tuple(offsets), most))
    elif _suits_torch_grouped_mm(x, linear, offsets):
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=_ends(expert_offsets))
    else:
        out = _one_by_one(x, linear, offsets)
    if offsets[-1] < x.shape[0]:
        out[offsets[-1] :].zero_()
    return out


def _one_by_one(x: Tensor, linear: GroupedLinear, offsets: list[int]) -> Tensor:
    """A call for each expert. Weights that are made float32 share a buffer."""
    weight, bias = linear
    out, buffer = x.new_empty((x.shape[0], weight.shape[1])), _buffer(weight) if x.itemsize == 2 else None
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if start < end:
            expert_bias = None if bias is None else bias[expert]
            out[start:end] = expert_linear(x[start:end], weight[expert], expert_bias, buffer)
    return out


def grouped_outer_product(grad: Tensor, x: Tensor, expert_offsets: Tensor) -> Tensor:
    """[E, B, A]: grad [m, B].T @ x [m, A] over the rows of each expert, zeros where it has none."""
    offsets = read_offsets(expert_offsets, x.shape[0])
    out_shape = (len(offsets) - 1, grad.shape[1], x.shape[1])
    if (most := _rows_to_pad_to(offsets, x.dtype, out_shape[1:], _SUMMED)) is not None:
        return _outer_all_at_once(grad, x, _padding(tuple(offsets), most))
    if _suits_torch_grouped_outer(grad, x, offsets):
        return F.grouped_mm(grad.t(), x, offs=_ends(expert_offsets))
    out = x.new_empty(out_shape)
    for expert_out, (start, end) in zip(out.unbind(0), pairwise(offsets), strict=True):
        if start < end:
            _outer(grad[start:end], x[start:end], expert_out)
        else:
            expert_out.zero_()
    return out


def _ends(expert_offsets: Tensor) -> Tensor:
    """Where the rows of each expert end, side by side in memory, as torch 2.14's grouped product takes them."""
    return expert_offsets.contiguous()[1:]


def _outer(grad: Tensor, x: Tensor, out: Tensor) -> None:
    """out [B, A] = grad [m, B].T @ x [m, A]."""
    if _is_widened(x.dtype, grad.shape[0], True):
        rows, features = x.float(), max(1, _WIDENED // max(1, x.shape[1]))
        for columns, part in zip(grad.t().split(features), out.split(features), strict=True):
            part.copy_(torch.mm(columns.float(), rows))
    else:
        torch.mm(grad.t(), x, out=out)


def read_offsets(expert_offsets: Tensor, num_rows: int) -> list[int]:
    """The offsets as numbers. Raises ValueError for some that are no plan of so many rows."""
    offsets = expert_offsets.tolist()
    if offsets[0] != 0 or offsets[-1] > num_rows or offsets != sorted(offsets):
        value_error("expert_offsets={}: expected numbers from 0 up to at most {} rows", offsets, num_rows)
    return offsets


def _rows_to_pad_to(
    offsets: list[int], dtype: torch.dtype, features: Sequence[int], copies: int = 1
) -> int | None:
    """Rows of the fullest expert where one `bmm` of all experts beats a call for each, else None."""
    (columns, depth), cores = features, torch.get_num_threads()
    numel = columns * depth
    sizes = [end - start for start, end in pairwise(offsets)]
    most, busy = max(sizes, default=0), len(sizes) - sizes.count(0)
    if dtype == torch.float32:  # calls are as good on one core
        cores -= 1
        busy = busy if busy >= _MANY_EXPERTS else 0
    if dtype not in _CALL or busy == 0 or _is_slow(dtype):
        return None
    rows = most * len(sizes)
    added = (rows - offsets[-1]) * numel
    copied = rows * (columns + depth) * _COPY[dtype] * copies
    read = sizes.count(0) * numel * _READ
    # Each further core makes small calls dearer.
    return most if added + copied + read < cores * busy * _CALL[dtype] else None


class _Padding(NamedTuple):
    """Rows in the order of their experts, and the same with as many for each: `most`.

    places: [R], of each row. sources: [E, most], the row that stands there; where none does, one that exists.
    """

    places: Tensor
    sources: Tensor


@lru_cache(maxsize=8)
def _padding(offsets: tuple[int, ...], most: int) -> _Padding:
    """Kept, since it takes as long as a small product: the two of a layer and the four of its backward share it."""
    starts, rows = torch.tensor(offsets, device="cpu"), torch.arange(offsets[-1], device="cpu")
    shift = torch.arange(0, most * (len(offsets) - 1), most, device="cpu") - starts[:-1]
    places = rows + shift.repeat_interleave(starts.diff(), output_size=offsets[-1])
    sources = rows.new_zeros(len(shift) * most).index_copy_(0, places, rows)
    return _Padding(places, sources.unflatten(0, (len(shift), most)))


def _all_at_once(x: Tensor, linear: GroupedLinear, padding: _Padding) -> Tensor:
    """One `bmm` of all experts, each with the rows of the fullest."""
    (weight, bias), (places, sources) = linear, padding
    inputs = x.index_select(0, sources.flatten()).unflatten(0, sources.shape)
    if x.dtype == torch.float32 and sources.shape[1] <= _FEW_ROWS and weight.stride(2) == 1:
        products = torch.bmm(weight, inputs.transpose(1, 2)).transpose(1, 2)
    else:
        products = torch.bmm(inputs, weight.transpose(1, 2))
    if bias is not None:
        products += bias[:, None]
    out = x.new_empty((x.shape[0], weight.shape[1]))
    torch.index_select(products.flatten(0, 1), 0, places, out=out[: places.shape[0]])
    return out


def _outer_all_at_once(grad: Tensor, x: Tensor, padding: _Padding) -> Tensor:
    """`grouped_outer_product` as one `bmm`; padding is zeros, for no other row may be part of a sum."""
    places, sources = padding

    def pad(rows: Tensor) -> Tensor:
        padded = rows.new_zeros((sources.numel(), rows.shape[1]))
        return padded.index_copy_(0, places, rows[: places.shape[0]]).unflatten(0, sources.shape)

    return torch.bmm(pad(grad).transpose(1, 2), pad(x))


def _suits_torch_grouped_outer(grad: Tensor, x: Tensor, offsets: list[int]) -> bool:
    """A loop over experts in C++, with the strides of `_suits_torch_grouped_mm`."""
    if _is_slow(x.dtype) and _widens(offsets, grad.shape[1] * x.shape[1]):
        return False
    lanes = 16 // x.element_size()
    aligned = x.dtype in _CALL and grad.shape[1] % lanes == 0 and x.shape[1] % lanes == 0
    return aligned and all(rows.is_contiguous() and rows.numel() > 0 for rows in (grad, x))


def _suits_torch_grouped_mm(x: Tensor, linear: GroupedLinear, offsets: list[int]) -> bool:
    """A loop over experts in C++. It wants strides in multiples of 16 bytes."""
    weight, bias = linear
    if bias is not None or x.dtype not in _CALL or _is_better_alone(x, weight, offsets):
        return False
    lanes = 16 // x.element_size()
    aligned = weight.shape[1] % lanes == 0 and weight.shape[2] % lanes == 0 and weight.numel() > 0
    dense = weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()
    return aligned and dense and x.is_contiguous() and x.shape[0] > 0


def _is_better_alone(x: Tensor, weight: Tensor, offsets: list[int]) -> bool:
    """Whether `expert_linear` knows something faster than a plain product that outweighs a call from Python."""
    numel, few = weight.shape[1] * weight.shape[2], x.shape[0] <= _FEW_ROWS * weight.shape[0]
    if x.dtype != torch.float32:
        return _is_slow(x.dtype) and (weight.stride(2) != 1 or _widens(offsets, numel))
    return numel >= (_HUGE_EXPERT // 2 if few and weight.stride(2) == 1 else _HUGE_EXPERT)


def _widens(offsets: list[int], numel: int) -> bool:
    """Whether products in float32, of weights of so many numbers, spare more than calls from Python take."""
    sizes = [end - start for start, end in pairwise(offsets)]
    spared = sum(max(0, size - _NARROW_ROWS) for size in sizes)
    return spared * numel > (len(sizes) - sizes.count(0)) * _FROM_PYTHON
