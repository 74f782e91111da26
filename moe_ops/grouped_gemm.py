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
from torch.nn import functional as F

from moe_ops import _autograd, _checks, _library


def grouped_gemm(x: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies ragged groups of rows with one weight each, accumulating in float32 (float64 for float64).

    Args:
        x: [S, A] rows in expert order, such as `permute` gives.
        weight: [E, B, A], dtype of x, stride 1 in either of its last two dimensions; never copied.
        expert_offsets: [E+1] int32 exclusive prefix, from `build_dispatch`.
        bias: [E, B], dtype of x.

    Returns:
        [S, B], dtype of x.

    Raises:
        ValueError: ranks, sizes, devices that do not fit, or a weight with no dimension of stride 1.
        TypeError: dtypes that differ.

    Under `torch.autocast` x, weight and bias are cast as `torch.mm` would cast them. Gradient: to x, weight and bias;
    twice differentiable.

    Example:
        >>> gate_up = moe_ops.grouped_gemm(rows, w13, plan.expert_offsets)
    """
    x, weight, bias = _library.autocast(x, weight, bias)
    return product(x, weight, expert_offsets, bias)


def product(x: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """`grouped_gemm` in the dtypes given: a gradient has those of its forward, also where autocast is on by now."""
    return _library.call("grouped_gemm", x, weight, expert_offsets, bias)


def check(
    x: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None, weight_name: str = "weight"
) -> None:
    """The checks of `grouped_gemm`, for a weight that the caller knows as `weight_name`."""
    bias_name = "bias" if weight_name == "weight" else f"{weight_name}_bias"
    _checks.expect_floating("x", x)
    _checks.expect_shape("x", x, ("S", "A"))
    check_weight(weight_name, weight, x.shape[1], expert_offsets)
    check_bias(bias_name, bias, weight)
    named = {weight_name: weight, bias_name: bias}
    _checks.expect_same_dtype(x.dtype, "x", **named)
    _checks.expect_same_device(x.device, "x", x=x, expert_offsets=expert_offsets, **named)


def check_weight(
    name: str, weight: Tensor, in_features: int | torch.SymInt, expert_offsets: Tensor | None
) -> None:
    """Checks an expert weight [E, B, A] against its input features and, if given, the plan's offsets."""
    _checks.expect_shape(name, weight, ("E", "B", in_features))
    _checks.expect_weight_strides(name, weight)
    if expert_offsets is not None:
        _checks.expect_index("expert_offsets", expert_offsets, (torch.int32,))
        _checks.expect_shape("expert_offsets", expert_offsets, (weight.shape[0] + 1,))


def check_bias(name: str, bias: Tensor | None, weight: Tensor) -> None:
    """Checks an expert bias [E, B] against its weight [E, B, A]."""
    if bias is not None:
        _checks.expect_shape(name, bias, (weight.shape[0], weight.shape[1]))


_FEW_ROWS = 4
"""Up to so many rows an expert, our own loop beats torch's on the CPU; see `_expert_product`."""


def _group_sizes(expert_offsets: Tensor, num_rows: int) -> list[int]:
    """Rows of each expert, then the rows no expert has. CPU only: it reads the offsets."""
    ends = [*expert_offsets.tolist(), num_rows]
    return [b - a for a, b in zip(ends[:-1], ends[1:], strict=True)]


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[m, B] = x [m, A] @ weight [B, A].T + bias [B] on the CPU, of any strides, accumulated in float32 or float64.

    A few float32 rows are faster column-major: 53 against 96 us at 2 rows and 512 x 512 on one core, and one row
    is a matrix-vector product. float16 goes through float32, whose kernel is ~50 times faster.
    """
    if x.dtype == torch.float16:
        product = torch.mm(x.float(), weight.t().float()).half()
    elif x.dtype != torch.float32 or x.shape[0] > _FEW_ROWS:
        product = F.linear(x, weight)
    elif x.shape[0] == 1:
        product = torch.mv(weight, x[0]).unsqueeze(0)
    else:
        product = torch.mm(weight, x.t()).t()
    return product if bias is None else product.add_(bias)


def reference(x: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None) -> Tensor:
    """The definition of `grouped_gemm`, in plain PyTorch."""
    if _suits_torch_grouped_mm(x, weight):
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=expert_offsets[1:])
    else:
        out = x.new_empty((x.shape[0], weight.shape[1]))
        sizes = _group_sizes(expert_offsets, x.shape[0])
        for rows, expert, rows_out in zip(x.split(sizes), weight.unbind(0), out.split(sizes), strict=False):
            if rows.shape[0]:
                rows_out.copy_(expert_linear(rows, expert, None))
    if bias is not None:
        row_groups = out.split(_group_sizes(expert_offsets, x.shape[0]))
        for expert_bias, rows_out in zip(bias.unbind(0), row_groups, strict=False):
            rows_out += expert_bias
    out[int(expert_offsets[-1]) :].zero_()
    return out


def _suits_torch_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    # The same loop over experts in C++. It wants strides in multiples of 16 bytes, and float32 only pays past a few
    # rows an expert.
    if x.dtype != torch.bfloat16 and not (
        x.dtype == torch.float32 and x.shape[0] > _FEW_ROWS * weight.shape[0]
    ):
        return False
    lanes = 16 // x.element_size()
    aligned = weight.shape[1] % lanes == 0 and weight.shape[2] % lanes == 0 and weight.numel() > 0
    dense = weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()
    return aligned and dense and x.is_contiguous() and x.shape[0] > 0


def _cuda(x: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None) -> Tensor:
    if x.shape[0] == 0:
        return _fake(x, weight, expert_offsets, bias)
    from moe_ops.kernels import grouped_gemm as kernels

    return kernels.launch(x, weight, expert_offsets, bias)


def _fake(x: Tensor, weight: Tensor, expert_offsets: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _check_weight_backward(grad: Tensor, x: Tensor, expert_offsets: Tensor) -> None:
    _checks.expect_floating("x", x)
    _checks.expect_shape("x", x, ("S", "A"))
    _checks.expect_shape("grad", grad, (x.shape[0], "B"))
    _checks.expect_index("expert_offsets", expert_offsets, (torch.int32,))
    _checks.expect_shape("expert_offsets", expert_offsets, ("E+1",))
    _checks.expect_same_dtype(x.dtype, "x", grad=grad)
    _checks.expect_same_device(x.device, "x", x=x, grad=grad, expert_offsets=expert_offsets)


def _reference_weight_backward(grad: Tensor, x: Tensor, expert_offsets: Tensor) -> Tensor:
    out = _fake_weight_backward(grad, x, expert_offsets).zero_()
    sizes = _group_sizes(expert_offsets, x.shape[0])
    for rows, grad_rows, expert_out in zip(x.split(sizes), grad.split(sizes), out.unbind(0), strict=False):
        if rows.shape[0]:
            _outer(grad_rows, rows, expert_out)
    return out


def _outer(grad: Tensor, x: Tensor, out: Tensor) -> None:
    """out [B, A] = grad [m, B].T @ x [m, A]."""
    if x.dtype == torch.float16:
        out.copy_(torch.mm(grad.t().float(), x.float()))
    else:
        torch.mm(grad.t(), x, out=out)


def _cuda_weight_backward(grad: Tensor, x: Tensor, expert_offsets: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return _fake_weight_backward(grad, x, expert_offsets).zero_()
    from moe_ops.kernels import grouped_gemm as kernels

    return kernels.launch_weight_backward(grad, x, expert_offsets)


def _fake_weight_backward(grad: Tensor, x: Tensor, expert_offsets: Tensor) -> Tensor:
    return x.new_empty((expert_offsets.shape[0] - 1, grad.shape[1], x.shape[1]))


_library.define(
    "grouped_gemm(Tensor x, Tensor weight, Tensor expert_offsets, Tensor? bias) -> Tensor",
    check=check,
    cpu=reference,
    cuda=_cuda,
    fake=_fake,
)
_library.define(
    "grouped_gemm_weight_backward(Tensor grad, Tensor x, Tensor expert_offsets) -> Tensor",
    check=_check_weight_backward,
    cpu=_reference_weight_backward,
    cuda=_cuda_weight_backward,
    fake=_fake_weight_backward,
)


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, expert_offsets: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `grouped_gemm` to x [S, A], weight [E, B, A] and bias [E, B], those that `needs` asks for."""
    grad = grad.contiguous()  # A summed output hands down an expanded gradient; kernels want rows.
    return (
        input_gradient(grad, weight, expert_offsets) if needs[0] else None,
        weight_gradient(grad, x, expert_offsets) if needs[1] else None,
        bias_gradient(grad, expert_offsets) if needs[2] else None,
    )


def input_gradient(grad: Tensor, weight: Tensor, expert_offsets: Tensor) -> Tensor:
    """[S, B] and [E, B, A] to [S, A]: the product with the transposed weight, as a view."""
    return product(grad, weight.transpose(1, 2), expert_offsets)


def weight_gradient(grad: Tensor, x: Tensor, expert_offsets: Tensor) -> Tensor:
    """[S, B] and [S, A] to [E, B, A]."""
    return _library.call("grouped_gemm_weight_backward", grad, x, expert_offsets)


def bias_gradient(grad: Tensor, expert_offsets: Tensor) -> Tensor:
    """[S, B] to [E, B]: the weight gradient of an input of ones."""
    return weight_gradient(grad, grad.new_ones((grad.shape[0], 1)), expert_offsets).squeeze(2)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, expert_offsets, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, expert_offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None]:
    x, weight, expert_offsets = ctx.saved_tensors
    needs = ctx.needs_input_grad
    to_x, to_weight, to_bias = gradients(
        grad, x, weight, expert_offsets, (needs[0], needs[1], ctx.has_bias and needs[3])
    )
    return to_x, to_weight, None, to_bias


def _setup_context_weight_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _double_backward(ctx: Any, grad_weight: Tensor) -> tuple[Tensor, Tensor, None]:
    grad, x, expert_offsets = ctx.saved_tensors
    grad_weight = grad_weight.contiguous()
    to_grad = product(x, grad_weight, expert_offsets)
    return to_grad, input_gradient(grad, grad_weight, expert_offsets), None


def _tangent(inputs: Sequence[Any], tangents: Sequence[Any]) -> _autograd.Tangents:
    x, weight, expert_offsets, _ = inputs
    to_x, to_weight, _, to_bias = tangents
    through_x = product(_autograd.or_zeros(to_x, x), weight, expert_offsets, to_bias)
    if to_weight is None:
        return (through_x,)
    return (through_x + product(x, to_weight, expert_offsets),)


def _tangent_weight_backward(inputs: Sequence[Any], tangents: Sequence[Any]) -> _autograd.Tangents:
    grad, x, expert_offsets = inputs
    to_grad, to_x = map(_autograd.or_zeros, tangents[:2], inputs[:2])
    return (weight_gradient(to_grad, x, expert_offsets) + weight_gradient(grad, to_x, expert_offsets),)


_autograd.define_gradient("grouped_gemm", _setup_context, _backward, _tangent)
_autograd.define_gradient(
    "grouped_gemm_weight_backward", _setup_context_weight_backward, _double_backward, _tangent_weight_backward
)


def product_flops(num_slots: int, weight: Sequence[int]) -> int:
    """Of `num_slots` rows times a weight [E, B, A]."""
    return 2 * num_slots * weight[1] * weight[2]


_library.define_flops("grouped_gemm", lambda x, weight, *_: product_flops(x[0], weight))
_library.define_flops("grouped_gemm_weight_backward", lambda grad, x, _: 2 * x[0] * x[1] * grad[1])
_library.define_vmap("grouped_gemm")
_library.define_vmap("grouped_gemm_weight_backward")
