"""gemm_combine: grouped_gemm with w2 and combine in one operator: the down half of the experts.

    out[t] = sum over k of topk_weights[t, k] * (w2[e] @ x[inverse[t*K + k]] + bias[e])  + shared[t]

Summed in float32 (float64 for float64) in slot order, so repeated runs agree bit for bit. The gradient saves the
inputs and recomputes the product.
"""

from typing import Any

from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.combine import (
    check_shared,
    check_weights as check_topk_weights,
    combine,
    combine_gradient,
    reference as combine_reference,
)
from moe_ops.dispatch import expect_plan
from moe_ops.grouped_gemm import (
    check as check_gemm,
    gradients as gemm_gradients,
    product,
    product_flops,
    reference as gemm_reference,
)
from moe_ops.types import DispatchPlan


def gemm_combine(
    x: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    plan: DispatchPlan,
    bias: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """`grouped_gemm` and `combine` in one operator: the down half of the experts.

    Args:
        x: [S, I] in expert order.
        w2: [E, H, I], dtype of x.
        topk_weights: [T, K], any floating dtype.
        plan: from `build_dispatch`.
        bias: [E, H], dtype of x.
        shared: [T, H], dtype of x, added to the routed sum.

    Returns:
        [T, H], dtype of x.

    Raises:
        ValueError, TypeError: as the two stages do.

    Example:
        >>> out = moe_ops.gemm_combine(up, w2, topk_weights, plan)
    """
    expect_plan(plan)
    x, w2, bias, shared = _library.autocast(x, w2, bias, shared)
    return _library.call("gemm_combine", x, w2, plan.expert_offsets, bias, topk_weights, plan.inverse, shared)


def _check(
    x: Tensor,
    w2: Tensor,
    expert_offsets: Tensor,
    w2_bias: Tensor | None,
    topk_weights: Tensor,
    inverse: Tensor,
    shared: Tensor | None,
) -> None:
    check_gemm(x, w2, expert_offsets, w2_bias, "w2")
    check_topk_weights(topk_weights, inverse)
    _checks.expect_shape("inverse", inverse, (x.shape[0],))
    _checks.expect_same_device(x.device, "x", topk_weights=topk_weights, inverse=inverse)
    check_shared(shared, topk_weights.shape[0], w2.shape[1], "x", x)


def reference(
    x: Tensor,
    w2: Tensor,
    expert_offsets: Tensor,
    w2_bias: Tensor | None,
    topk_weights: Tensor,
    inverse: Tensor,
    shared: Tensor | None,
) -> Tensor:
    """The definition of `gemm_combine`: its stages, one after the other."""
    expert_out = gemm_reference(x, w2, expert_offsets, w2_bias)
    return combine_reference(expert_out, topk_weights, inverse, shared)


def _cuda(
    x: Tensor,
    w2: Tensor,
    expert_offsets: Tensor,
    w2_bias: Tensor | None,
    topk_weights: Tensor,
    inverse: Tensor,
    shared: Tensor | None,
) -> Tensor:
    if topk_weights.numel() == 0:
        return _fake(x, w2, expert_offsets, w2_bias, topk_weights, inverse, shared)
    from moe_ops.kernels import fused as kernels

    return kernels.gemm_combine(x, w2, expert_offsets, w2_bias, topk_weights, inverse, shared)


def _fake(
    x: Tensor,
    w2: Tensor,
    expert_offsets: Tensor,
    w2_bias: Tensor | None,
    topk_weights: Tensor,
    inverse: Tensor,
    shared: Tensor | None,
) -> Tensor:
    return x.new_empty((topk_weights.shape[0], w2.shape[1]))


_library.define(
    "gemm_combine(Tensor x, Tensor w2, Tensor expert_offsets, Tensor? w2_bias, Tensor topk_weights, "
    "Tensor inverse, Tensor? shared) -> Tensor",
    check=_check,
    cpu=reference,
    cuda=_cuda,
    fake=_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, shared = inputs
    ctx.has_shared = shared is not None
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w2, expert_offsets, bias, topk_weights, inverse = ctx.saved_tensors
    expert_out = product(x, w2, expert_offsets, bias)
    grad_out, to_weights = combine_gradient(grad, expert_out, topk_weights, inverse)
    needs = ctx.needs_input_grad
    to_x, to_w2, to_bias = gemm_gradients(
        grad_out, x, w2, expert_offsets, (needs[0], needs[1], bias is not None and needs[3])
    )
    return to_x, to_w2, None, to_bias, to_weights, None, grad if ctx.has_shared else None


def _stages(
    x: Tensor,
    w2: Tensor,
    expert_offsets: Tensor,
    w2_bias: Tensor | None,
    topk_weights: Tensor,
    inverse: Tensor,
    shared: Tensor | None,
) -> Tensor:
    return combine(product(x, w2, expert_offsets, w2_bias), topk_weights, inverse, shared)


_autograd.define_gradient("gemm_combine", _setup_context, _backward, _autograd.tangent_of(_stages))
_library.define_flops("gemm_combine", lambda x, w2, *_: product_flops(x[0], w2))
_library.define_vmap("gemm_combine")
