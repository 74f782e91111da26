"""batched_gemm: each expert's rows times that expert's weight, with as many rows set aside for every expert.

    out[e, m] = x[e, m] @ weight[e].T + bias[e]      for m < counts[e]
    out[e, m] = 0                                    for the rest, whose x is not looked at

E experts, M = max_tokens rows of each, A input and B output features. This is the format in which an exchange with
static shapes hands tokens to experts. `gated_activation` keeps zeros zero, and `combine` takes the rows of slots by
number, so both serve it as they are. The kernels are those of `grouped_gemm`. Static shapes, no host sync.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops._cpu_products import expert_linear
from moe_ops.arguments import BatchedGemm, GroupedLinear
from moe_ops.grouped_gemm import check_linear, linear_gradient, product_flops
from moe_ops.records import partial


def batched_gemm(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies the first rows of every expert with its weight, accumulating in float32 (float64 for float64).

    Args:
        x: [E, M, A], any floating dtype. Rows past the count may hold anything, NaN too.
        weight: [E, B, A], dtype of x, stride 1 in either of its last two dimensions; never copied.
        counts: [E] int32, how many rows of each expert hold tokens; less than 0 is 0, more than M is M.
        bias: [E, B], dtype of x.

    Returns:
        [E, M, B], dtype of x, zero past the count.

    Raises:
        ValueError: ranks, sizes, devices that do not fit, or a weight with no dimension of stride 1.
        TypeError: dtypes that differ.

    Under `torch.autocast` x, weight and bias are cast as `torch.mm` would cast them. Gradient: to x, weight and bias;
    twice differentiable.

    Example:
        >>> gate_up = moe_ops.batched_gemm(x, w13, counts)
    """
    x, linear = _library.autocast((x, GroupedLinear(weight, bias)))
    return _product(x, linear, counts)


def _product(x: Tensor, linear: GroupedLinear, counts: Tensor) -> Tensor:
    return _library.call(BatchedGemm(x, linear, counts))


def _check(args: BatchedGemm) -> None:
    x, linear, counts = args
    _checks.expect_floating("x", x)
    _checks.expect_shape("x", x, ("E", "M", "A"))
    check_linear("weight", linear, (x.shape[0], "B", x.shape[2]), "x", x)
    _checks.expect_index("counts", counts, (torch.int32,))
    _checks.expect_shape("counts", counts, (x.shape[0],))
    _checks.expect_same_device(x.device, "x", counts=counts)


def _reference(args: BatchedGemm) -> Tensor:
    x, (weight, bias), counts = args
    out = _fake(args).zero_()
    for expert, count in enumerate(counts.clamp(0, x.shape[1]).tolist()):
        if count:
            expert_bias = None if bias is None else bias[expert]
            out[expert, :count] = expert_linear(x[expert, :count], weight[expert], expert_bias)
    return out


def _cuda(args: BatchedGemm) -> Tensor:
    num_experts, max_tokens, _ = args.x.shape
    if num_experts * max_tokens == 0:
        return _fake(args)
    rows = args.x.flatten(0, 1)  # a copy where the experts do not follow each other
    return _library.launch(args._replace(x=rows.unflatten(0, (num_experts, max_tokens))))


def _fake(args: BatchedGemm) -> Tensor:
    return args.x.new_empty((*args.x.shape[:2], args.weight.weight.shape[1]))


_library.define(BatchedGemm, "Tensor", check=_check, cpu=_reference, cuda=_cuda, fake=_fake)


def _save(args: BatchedGemm, output: Tensor) -> Any:
    return args


def _backward(args: BatchedGemm, needs: BatchedGemm, grad: Tensor) -> BatchedGemm:
    (x, linear, counts), grad = args, grad.contiguous()
    to_x = _product(grad, GroupedLinear(linear.weight.transpose(1, 2)), counts) if needs.x else None
    return partial(BatchedGemm, x=to_x, weight=_linear_gradient(grad, x, counts, needs.weight))


def _linear_gradient(grad: Tensor, x: Tensor, counts: Tensor, needs: GroupedLinear) -> GroupedLinear:
    """That of `grouped_gemm`, whose groups are then all as long, with zeros past the count."""
    num_experts, max_tokens, _ = x.shape
    past = torch.arange(max_tokens, device=x.device) >= counts.unsqueeze(1)  # [E, M]
    grad_rows, rows = (each.masked_fill(past.unsqueeze(2), 0).flatten(0, 1) for each in (grad, x))
    expert_offsets = torch.arange(num_experts + 1, dtype=torch.int32, device=x.device) * max_tokens
    return linear_gradient(grad_rows, rows, expert_offsets, needs)


def _tangent(args: BatchedGemm, tangents: BatchedGemm) -> _autograd.Tangents:
    x, (weight, _), counts = args
    to_x, (to_weight, to_bias), _ = tangents
    through_x = _product(_autograd.or_zeros(to_x, x), GroupedLinear(weight, to_bias), counts)
    if to_weight is None:
        return (through_x,)
    return (through_x + _product(x, GroupedLinear(to_weight), counts),)


_autograd.define_gradient(BatchedGemm, _save, _backward, _tangent)
_library.define_flops(BatchedGemm, lambda shapes: product_flops(shapes.x[0] * shapes.x[1], shapes.weight))
_library.define_vmap(BatchedGemm)
