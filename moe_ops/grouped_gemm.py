"""grouped_gemm: each expert's rows times that expert's weight.

    out[r] = x[r] @ weight[e].T + bias[e]      for expert_offsets[e] <= r < expert_offsets[e + 1]
    out[r] = 0                                 for r >= expert_offsets[E] (rows of dropped slots)

S rows, E experts, A input and B output features. Consumed by `gated_activation` (w13) and `combine` (w2). The
input gradient is a grouped_gemm with the weight transposed as a view; the weight gradient is an operator of its
own, in which rows of dropped slots take no part. Static shapes, no host sync on CUDA.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library, records
from moe_ops._cpu_products import grouped_outer_product, grouped_products
from moe_ops.arguments import GroupedGemm, GroupedGemmWeightBackward, GroupedLinear, PairedLinear
from moe_ops.paired import Weight, expect_pair, linear_of
from moe_ops.records import partial

Sizes = Sequence[int | torch.SymInt | str]


def grouped_gemm(x: Tensor, weight: Weight, expert_offsets: Tensor, bias: Weight | None = None) -> Tensor:
    """Multiplies ragged groups of rows with one weight each, accumulating in float32 (float64 for float64).

    Args:
        x: [S, A] rows in expert order, such as `permute` gives.
        weight: [E, B, A], dtype of x, stride 1 in either of its last two dimensions; never copied. Two of them with the
            same strides, (gate, up), are as their concatenation [E, 2B, A].
        expert_offsets: [E+1] int32 exclusive prefix, from `build_dispatch`.
        bias: [E, B], dtype of x; of two weights two.

    Returns:
        [S, B], dtype of x; of two weights [S, 2B].

    Raises:
        ValueError: ranks, sizes, devices that do not fit, or a weight with no dimension of stride 1.
        TypeError: dtypes that differ.

    Under `torch.autocast` x, weight and bias are cast as `torch.mm` would cast them. Gradient: to x, weight and bias;
    twice differentiable.

    Example:
        >>> gate_up = moe_ops.grouped_gemm(rows, w13, plan.expert_offsets)
    """
    x, linear = _library.autocast((x, linear_of("weight", weight, bias)))
    return product(x, linear, expert_offsets)


def product(x: Tensor, linear: GroupedLinear | PairedLinear, expert_offsets: Tensor) -> Tensor:
    """`grouped_gemm` in the dtypes given: a gradient has those of its forward, also where autocast is on by now."""
    return _library.call(GroupedGemm(x, PairedLinear(*linear), expert_offsets))  # type: ignore[arg-type]  # by position


def check(args: GroupedGemm, name: str = "weight") -> None:
    """The checks of `grouped_gemm`, for a weight that the caller knows as `name`."""
    _checks.expect_floating("x", args.x)
    _checks.expect_shape("x", args.x, ("S", "A"))
    check_linear(name, args.weight, ("E", "B", args.x.shape[1]), "x", args.x)
    check_offsets(args.expert_offsets, args.weight, "x", args.x)


def check_linear(
    name: str, linear: GroupedLinear | PairedLinear, shape: Sizes, input_name: str, x: Tensor
) -> None:
    """Checks weight and bias of the argument `name` against what they multiply, the argument `input_name`."""
    expect_linear(name, linear, shape, input_name, x)
    _checks.expect_weight_strides(name, linear.weight)


def expect_linear(
    name: str, linear: GroupedLinear | PairedLinear, shape: Sizes, input_name: str, x: Tensor
) -> None:
    """Shape [E, B, A], dtype and device, without strides."""
    named = {name: linear.weight}
    _checks.expect_shape(name, linear.weight, shape)
    if linear.bias is not None:
        bias_name = records.leaf_name(name, "weight", "bias")
        _checks.expect_shape(bias_name, linear.bias, linear.weight.shape[:2])
        named[bias_name] = linear.bias
    _checks.expect_same_dtype(x.dtype, input_name, **named)
    _checks.expect_same_device(x.device, input_name, **named)
    if isinstance(linear, PairedLinear):
        expect_pair(name, linear, input_name, x)


def check_offsets(expert_offsets: Tensor, linear: GroupedLinear | PairedLinear, like: str, x: Tensor) -> None:
    """Checks the offsets of a plan against the experts that there are, and the device of the input, named `like`."""
    _checks.expect_index("expert_offsets", expert_offsets, (torch.int32,))
    _checks.expect_shape("expert_offsets", expert_offsets, (linear.weight.shape[0] + 1,))
    _checks.expect_same_device(x.device, like, expert_offsets=expert_offsets)


def reference(args: GroupedGemm) -> Tensor:
    """The definition of `grouped_gemm`, in plain PyTorch."""
    return grouped_products(args.x, args.weight, args.expert_offsets)


def _cuda(args: GroupedGemm) -> Tensor:
    return _fake(args) if args.x.shape[0] == 0 else _library.launch(args)


def _fake(args: GroupedGemm) -> Tensor:
    return args.x.new_empty((args.x.shape[0], args.weight.columns))


def _check_weight_backward(args: GroupedGemmWeightBackward) -> None:
    grad, x, expert_offsets = args
    _checks.expect_floating("x", x)
    _checks.expect_shape("x", x, ("S", "A"))
    _checks.expect_shape("grad", grad, (x.shape[0], "B"))
    _checks.expect_index("expert_offsets", expert_offsets, (torch.int32,))
    _checks.expect_shape("expert_offsets", expert_offsets, ("E+1",))
    _checks.expect_same_dtype(x.dtype, "x", grad=grad)
    _checks.expect_same_device(x.device, "x", grad=grad, expert_offsets=expert_offsets)


def _reference_weight_backward(args: GroupedGemmWeightBackward) -> Tensor:
    return grouped_outer_product(*args)


def _cuda_weight_backward(args: GroupedGemmWeightBackward) -> Tensor:
    return _fake_weight_backward(args).zero_() if args.x.shape[0] == 0 else _library.launch(args)


def _fake_weight_backward(args: GroupedGemmWeightBackward) -> Tensor:
    return args.x.new_empty((args.expert_offsets.shape[0] - 1, args.grad.shape[1], args.x.shape[1]))


_library.define(GroupedGemm, "Tensor", check=check, cpu=reference, cuda=_cuda, fake=_fake)
_library.define_compiled(GroupedGemm, cpu=reference, fake=_fake)
_library.define(
    GroupedGemmWeightBackward,
    "Tensor",
    check=_check_weight_backward,
    cpu=_reference_weight_backward,
    cuda=_cuda_weight_backward,
    fake=_fake_weight_backward,
)
_library.define_compiled(GroupedGemmWeightBackward, _reference_weight_backward, _fake_weight_backward)


def gradients(grad: Tensor, args: GroupedGemm, needs: GroupedGemm) -> GroupedGemm:
    """Gradients of `grouped_gemm` to x [S, A], weight [E, B, A] and bias [E, B], those that `needs` asks for."""
    grad = grad.contiguous()  # A summed output hands down an expanded gradient; kernels want rows.
    x, linear, expert_offsets = args
    grads = (grad,) if linear.up is None else grad.chunk(2, dim=1)
    to_x = _input_gradients(grads, linear, expert_offsets) if needs.x else None
    halves = zip(grads, needs.weight.halves, strict=False)
    to_halves = [linear_gradient(half, x, expert_offsets, needed) for half, needed in halves]
    to_weight = PairedLinear(*(leaf for half in to_halves for leaf in half))  # type: ignore[arg-type]  # gradients
    return partial(GroupedGemm, x=to_x, weight=to_weight)


def _input_gradients(grads: Sequence[Tensor], linear: PairedLinear, expert_offsets: Tensor) -> Tensor:
    """[S, A], of both halves of a pair the sum."""
    products = [
        input_gradient(grad, part, expert_offsets) for grad, part in zip(grads, linear.parts, strict=True)
    ]
    return products[0] if len(products) == 1 else products[0] + products[1]


def linear_gradient(grad: Tensor, x: Tensor, expert_offsets: Tensor, needs: GroupedLinear) -> GroupedLinear:
    """Gradients to weight and bias; that of a bias is the weight gradient of an input of ones."""
    to_weight = weight_gradient(grad, x, expert_offsets) if needs.weight else None
    ones = grad.new_ones((grad.shape[0], 1)) if needs.bias else None
    to_bias = None if ones is None else weight_gradient(grad, ones, expert_offsets).squeeze(2)
    return partial(GroupedLinear, weight=to_weight, bias=to_bias)


def input_gradient(grad: Tensor, linear: GroupedLinear, expert_offsets: Tensor) -> Tensor:
    """[S, B] and [E, B, A] to [S, A]: the product with the transposed weight, as a view."""
    return product(grad, GroupedLinear(linear.weight.transpose(1, 2)), expert_offsets)


def weight_gradient(grad: Tensor, x: Tensor, expert_offsets: Tensor) -> Tensor:
    """[S, B] and [S, A] to [E, B, A]."""
    return _library.call(GroupedGemmWeightBackward(grad, x, expert_offsets))


def _save(args: GroupedGemm, output: Tensor) -> Any:
    return args


def _backward(args: GroupedGemm, needs: GroupedGemm, grad: Tensor) -> GroupedGemm:
    return gradients(grad, args, needs)


def _save_weight_backward(args: GroupedGemmWeightBackward, output: Tensor) -> Any:
    return args


def _double_backward(
    args: GroupedGemmWeightBackward, needs: GroupedGemmWeightBackward, grad_weight: Tensor
) -> GroupedGemmWeightBackward:
    grad, x, expert_offsets = args
    linear = GroupedLinear(grad_weight.contiguous())
    to_grad = product(x, linear, expert_offsets)
    to_x = input_gradient(grad, linear, expert_offsets)
    return partial(GroupedGemmWeightBackward, grad=to_grad, x=to_x)


def _tangent(args: GroupedGemm, tangents: GroupedGemm) -> _autograd.Tangents:
    to_x = _autograd.or_zeros(tangents.x, args.x)
    parts = zip(args.weight.parts, tangents.weight.halves, strict=False)
    results = [_tangent_of_part(args, to_x, part.weight, to_part) for part, to_part in parts]
    return (results[0] if len(results) == 1 else torch.cat(results, 1),)


def _tangent_of_part(args: GroupedGemm, to_x: Tensor, weight: Tensor, to_part: GroupedLinear) -> Tensor:
    through_x = product(to_x, GroupedLinear(weight, to_part.bias), args.expert_offsets)
    if to_part.weight is None:
        return through_x
    return through_x + product(args.x, GroupedLinear(to_part.weight), args.expert_offsets)


def _tangent_weight_backward(
    args: GroupedGemmWeightBackward, tangents: GroupedGemmWeightBackward
) -> _autograd.Tangents:
    grad, x, expert_offsets = args
    to_grad, to_x = map(_autograd.or_zeros, tangents[:2], args[:2])
    return (weight_gradient(to_grad, x, expert_offsets) + weight_gradient(grad, to_x, expert_offsets),)


_autograd.define_gradient(GroupedGemm, _save, _backward, _tangent)
_autograd.define_gradient(
    GroupedGemmWeightBackward, _save_weight_backward, _double_backward, _tangent_weight_backward
)


def product_flops(num_slots: int, linear: Any) -> int:
    """Of `num_slots` rows times a weight, or a pair; `linear` holds shapes."""
    halves = 1 if getattr(linear, "up", None) is None else 2
    return 2 * num_slots * halves * linear.weight[1] * linear.weight[2]


_library.define_flops(GroupedGemm, lambda shapes: product_flops(shapes.x[0], shapes.weight))
_library.define_flops(
    GroupedGemmWeightBackward, lambda shapes: 2 * shapes.x[0] * shapes.x[1] * shapes.grad[1]
)
_library.define_vmap(GroupedGemm)
_library.define_vmap(GroupedGemmWeightBackward)
