"""dense_gemm: a product in which every token takes part, such as a router's or a shared expert's.

    out[t] = x[t] @ weight.T + bias      summed in float32 (float64 for float64), rounded once, to `dtype`

T tokens, A input and B output features. Its logits feed `topk_routing`. With `dtype` float32 those of half-precision
tokens are exact to float32 without float32 copies of tokens and weight: a product of two halves is exact there. On
CUDA few tokens run a kernel of ours that reads each weight once for all of them; more are a library's product. Static
shapes, no host sync.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import DenseGemm, PairedLinear
from moe_ops.invariant_arguments import BatchInvariantGemm
from moe_ops.records import partial


def dense_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    emit: Literal["auto", "batch_invariant"] = "auto",
) -> Tensor:
    """Multiplies all tokens with one weight.

    Args:
        x: [T, A], any floating dtype.
        weight: [B, A], dtype of x, any strides; on a GPU never copied.
        bias: [B], dtype of x.
        dtype: of the result: that of x (the default), or float32 for a half.
        emit: "batch_invariant" as in `fused_experts`; the weight then has stride 1 in one of its dimensions.

    Returns:
        [T, B] in `dtype`.

    Raises:
        ValueError: ranks, sizes or devices that do not fit.
        TypeError: dtypes that differ, or a `dtype` that is none of these.

    Under `torch.autocast` x, weight and bias are cast as `torch.mm` would cast them. Gradient: to x, weight and bias;
    twice differentiable.

    Example:
        >>> router_logits = moe_ops.dense_gemm(hidden, router_weight, dtype=torch.float32)
    """
    x, weight, bias = _library.autocast((x, weight, bias))
    _checks.expect_tensor("x", x)
    dtype = x.dtype if dtype is None else dtype
    _checks.expect_result_dtype("dtype", dtype, x.dtype)
    args = DenseGemm(x, weight, bias, dtype)
    return _one_expert(args) if _checks.asks_for_invariance(emit) else _library.call(args)


def _one_expert(args: DenseGemm) -> Tensor:
    """The product as that of the only expert, in the dtype of the result."""
    _check(args)
    x, weight = args.x.to(args.dtype), args.weight.to(args.dtype)
    bias = None if args.bias is None else args.bias.to(args.dtype).unsqueeze(0)
    offsets = torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]
    linear = PairedLinear(weight.unsqueeze(0), bias)
    return _library.call(BatchInvariantGemm(x, linear, offsets))


def _check(args: DenseGemm) -> None:
    x, weight, bias, dtype = args
    _checks.expect_floating("x", x)
    _checks.expect_shape("x", x, ("T", "A"))
    _checks.expect_shape("weight", weight, ("B", x.shape[1]))
    if bias is not None:
        _checks.expect_shape("bias", bias, (weight.shape[0],))
    _checks.expect_same_dtype(x.dtype, "x", weight=weight, bias=bias)
    _checks.expect_same_device(x.device, "x", weight=weight, bias=bias)
    _checks.expect_result_dtype("dtype", dtype, x.dtype)


def reference(args: DenseGemm) -> Tensor:
    """The definition of `dense_gemm`, in plain PyTorch."""
    x, weight, bias, dtype = args
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _cuda(args: DenseGemm) -> Tensor:
    if args.x.shape[0] * args.weight.shape[0] == 0:
        return _fake(args)
    if _library.has_launches(args):
        return _library.launch(args)
    return _library.launch_library(args, F.linear if args.dtype == args.x.dtype else _in_float32)


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return out if bias is None else out + bias


def _fake(args: DenseGemm) -> Tensor:
    return args.x.new_empty((args.x.shape[0], args.weight.shape[0]), dtype=args.dtype)


_library.define(DenseGemm, "Tensor", check=_check, cpu=reference, cuda=_cuda, fake=_fake)


def _save(args: DenseGemm, output: Tensor) -> Any:
    return args


def _backward(args: DenseGemm, needs: DenseGemm, grad: Tensor) -> DenseGemm:
    x, weight = args.x, args.weight
    return partial(
        DenseGemm,
        x=(grad @ weight.to(grad.dtype)).to(x.dtype) if needs.x else None,
        weight=(grad.t() @ x.to(grad.dtype)).to(x.dtype) if needs.weight else None,
        bias=grad.sum(0).to(x.dtype) if needs.bias else None,
    )


def _tangent(args: DenseGemm, tangents: DenseGemm) -> _autograd.Tangents:
    (x, weight, _, dtype), (to_x, to_weight, to_bias, _) = args, tangents
    out = _library.call(DenseGemm(_autograd.or_zeros(to_x, x), weight, to_bias, dtype))
    return (out if to_weight is None else out + _library.call(DenseGemm(x, to_weight, None, dtype)),)


_autograd.define_gradient(DenseGemm, _save, _backward, _tangent)
_library.define_flops(DenseGemm, lambda shapes: 2 * shapes.x[0] * shapes.weight[0] * shapes.weight[1])
_library.define_vmap_over_tokens(DenseGemm)
