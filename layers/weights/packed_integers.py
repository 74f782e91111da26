"""Integers of 4 bits as AWQ, GPTQ and compressed-tensors publish them, as the tensors that a quantised layer has.

Eight codes are in an int32, the first in its lowest bits, of a row's columns or of a column's rows, AWQ's in an order
of their own. A matrix goes from A features to B; what is in front of it, such as experts, stays.

           weight                    zero points                             scales        zero points are stored
    AWQ    qweight [..., A, B / 8]   qzeros [..., groups, B / 8]             [groups, B]   as codes
    GPTQ   qweight [..., A / 8, B]   qzeros [..., groups, B / 8]             [groups, B]   less 1, in "gptq_v2" as codes
    c-t    weight_packed             weight_zero_point                       [B, groups]   as codes
           [..., B, A / 8]           [..., ceil(B / 8), groups]
"""

from typing import NamedTuple

import torch
from torch import Tensor

from layers._checks import expect_positive, expect_type
from moe_ops.errors import value_error
from moe_ops.pairs import PAIRS, paired

_CODES, _BITS = 8, 4  # in an int32, and of each
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which column is in which bits
_IN_ORDER = tuple(range(_CODES))
_LAST = 15


class PackedIntegers(NamedTuple):
    """A matrix, or stacks of them: what `weight_loader` takes for weight, scale and zero point.

    weight: [..., B, A / 2] torch.uint8. scale: [..., B, groups]. zero: [..., B, groups] torch.uint8.
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor


def integers_of_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> PackedIntegers:
    """The tensors of a matrix that AWQ has quantised, in the layout of its GEMM version.

    Args:
        qweight: [..., A, B / 8] int32.
        qzeros: [..., groups, B / 8] int32.
        scales: [..., groups, B] floating.

    Returns:
        Weight [..., B, A / 2], scale and zero point [..., B, groups]; `layers.quantise_experts(..., WeightScale.GROUP,
        (1, A / groups), dtype=torch.uint4, zero_points=True)` makes a layer that has such.

    Raises:
        TypeError: a tensor is none, or of another dtype.
        ValueError: shapes do not belong together.

    Example:
        >>> weight, scale, zero = integers_of_awq(qweight, qzeros, scales)
        >>> experts.weight_loader(experts.w13_weight_zero_point, zero, f"{name}.qzeros", "w1", expert)
    """
    _expect_words(qweight=qweight, qzeros=qzeros)
    codes, zeros = _unpacked(qweight, _AWQ_ORDER), _unpacked(qzeros, _AWQ_ORDER)
    _expect_groups(codes.shape[-2], zeros.shape[-2])
    return _of_rows(paired(codes.mT.contiguous()), zeros, scales)


def integers_of_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, is_v2: bool = False
) -> PackedIntegers:
    """The same of a matrix that GPTQ has quantised.

    Args:
        qweight: [..., A / 8, B] int32.
        qzeros: [..., groups, B / 8] int32.
        scales: [..., groups, B] floating.
        g_idx: None, or [..., A], the group of each column, which must be in order: those of `desc_act` are not.
        is_v2: whether zero points are stored as they are, as `checkpoint_format` "gptq_v2" says. Else they are stored
            less 1.

    Raises:
        TypeError: a tensor is none, or of another dtype.
        ValueError: shapes do not belong together; groups are not in order; or zero points that are stored less 1 are 15
            there, which some read as 16 and some as 0.
    """
    _expect_words(qweight=qweight, qzeros=qzeros)
    expect_type("is_v2", is_v2, bool)
    weight, zeros = qweight.mT.contiguous().view(PAIRS), _unpacked(qzeros, _IN_ORDER)
    if not is_v2:
        if bool((zeros == _LAST).any()):
            value_error("qzeros has 15 with is_v2=False: expected 0 to 14, zero points less 1")
        zeros = zeros + 1
    depth, groups = 2 * weight.shape[-1], zeros.shape[-2]
    _expect_groups(depth, groups)
    if g_idx is not None:
        _expect_order(g_idx, depth, groups)
    return _of_rows(weight, zeros, scales)


def zeros_of_compressed_tensors(weight_zero_point: Tensor, rows: int) -> Tensor:
    """The zero points of a matrix of `rows` rows that compressed-tensors has packed.

    Its weights are bytes in order, `weight_packed.view(torch.uint8)`, and its scales are taken as they are.

    Args:
        weight_zero_point: [..., ceil(rows / 8), groups] int32.
        rows: B.

    Returns:
        [..., B, groups] torch.uint8.

    Raises:
        TypeError: no tensor of int32, or no number of rows.
        ValueError: not so many rows.
    """
    _expect_words(weight_zero_point=weight_zero_point)
    expect_positive("rows", rows)
    found = -(-rows // _CODES)
    if weight_zero_point.shape[-2] != found:
        shape = list(weight_zero_point.shape)
        value_error("weight_zero_point has shape {}: expected {} words of {} rows", shape, found, rows)
    return _unpacked(weight_zero_point.mT, _IN_ORDER).mT[..., :rows, :].to(PAIRS).contiguous()


def _expect_words(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        expect_type(name, tensor, Tensor)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected torch.int32, eight codes in each")
        if tensor.dim() < 2:
            value_error("{} has shape {}: expected a matrix, or stacks of them", name, list(tensor.shape))


def _unpacked(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """[..., N] words as [..., 8N] codes; `order` says which is in which bits of a word."""
    pairs = words.contiguous().view(PAIRS)
    codes = torch.stack((pairs & _LAST, pairs >> _BITS), -1).flatten(-2).unflatten(-1, (-1, _CODES))
    return codes[..., [order.index(place) for place in _IN_ORDER]].flatten(-2)


def _of_rows(weight: Tensor, zeros: Tensor, scales: Tensor) -> PackedIntegers:
    """Of bytes [..., B, A / 2], and of zero points and scales [..., groups, B]."""
    expect_type("scales", scales, Tensor)
    if not scales.is_floating_point():
        raise TypeError(f"scales has dtype {scales.dtype}: expected a floating point dtype")
    (*outer, features, _), groups = weight.shape, zeros.shape[-2]
    for name, tensor in (("qzeros, unpacked,", zeros), ("scales", scales)):
        if tensor.shape != (*outer, groups, features):
            expected = [*outer, groups, features]
            value_error("{} has shape {}: expected {}", name, list(tensor.shape), expected)
    return PackedIntegers(weight, scales.mT.contiguous(), zeros.mT.to(PAIRS).contiguous())


def _expect_groups(depth: int, groups: int) -> None:
    if groups < 1 or depth % groups or depth % 2:
        value_error("qweight has {} columns: expected an even number, of {} groups", depth, groups)


def _expect_order(g_idx: Tensor, depth: int, groups: int) -> None:
    expect_type("g_idx", g_idx, Tensor)
    if g_idx.shape[-1:] != (depth,):
        value_error("g_idx has shape {}: expected {} columns", list(g_idx.shape), depth)
    in_order = torch.arange(depth, device=g_idx.device) // (depth // groups)
    if not bool((g_idx == in_order).all()):
        value_error("g_idx has columns in another order than their groups: expected 0, 0, ..., 1, 1, ...")
