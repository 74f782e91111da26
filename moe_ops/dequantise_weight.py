"""dequantise_weight: weights of 8 or 4 bits in a wider dtype, each block times its scale.

    weight[e, b, a] = stored[e, b, a] * scale[e, b // rows, a // columns]        rounded once

Of integers with a zero point its distance from 8 is added to what is stored first (`int4`).
E experts, B output and A input features. Products of many rows are faster with such a copy than with weights that are
converted for each tile, and a gradient to the rows of `scaled_grouped_gemm` multiplies with one.
"""

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.scaled import check_scaled, scaled_linear
from moe_ops.scaled_arguments import DequantiseWeight, dequantising
from moe_ops.types import ScaledWeight
from moe_ops.weight_formats import dequantised, expert_of


def dequantise_weight(weight: ScaledWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight that a quantised one stands for.

    Args:
        weight: of [E, B, A], and its scales.
        dtype: a floating point dtype of 16 bits or more.

    Returns:
        [E, B, A] in `dtype`.

    Raises:
        ValueError, TypeError: the message names argument, value and expectation.

    Gradient: none; it is a constant.

    Example:
        >>> w13 = moe_ops.dequantise_weight(moe_ops.ScaledWeight(w13_int8, w13_scale), torch.float32)
    """
    _checks.expect_dtype("dtype", dtype)
    return _library.call(dequantising(scaled_linear("weight", weight, None), dtype))


def _check(args: DequantiseWeight) -> None:
    check_scaled("weight", args.linear, "weight", args.weight)
    _checks.expect_floating_dtype("dtype", args.dtype)


def _reference(args: DequantiseWeight) -> Tensor:
    """One expert after the other, so that no more than one is there in the dtype that is computed in."""
    copy = _fake(args)
    for expert in range(args.weight.shape[0]):
        copy[expert] = dequantised(expert_of(args.linear, expert), args.dtype)
    return copy


def _cuda(args: DequantiseWeight) -> Tensor:
    if args.weight.numel() == 0:
        return _fake(args)
    return _library.launch(args) if _library.has_launches(args) else _reference(args)


def _fake(args: DequantiseWeight) -> Tensor:
    num_experts, features, _ = args.weight.shape
    return args.scale.new_empty((num_experts, features, args.linear.depth), dtype=args.dtype)


_library.define(DequantiseWeight, "Tensor", check=_check, cpu=_reference, cuda=_cuda, fake=_fake)
_library.define_compiled(DequantiseWeight, cpu=_reference, fake=_fake)
_autograd.define_constant(DequantiseWeight)
_library.define_vmap(DequantiseWeight)
