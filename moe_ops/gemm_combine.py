"""gemm_combine: grouped_gemm with w2 and combine in one operator: the down half of the experts.

    out[t] = sum over k of topk_weights[t, k] * (w2[e] @ x[inverse[t*K + k]] + bias[e])  [+ joined[t]]

What joins the sum is as in `combine`: shared output, its gate, a residual. Summed in float32 (float64 for float64) in
slot order, so repeated runs agree bit for bit. The gradient saves the inputs and recomputes the product.
"""

from typing import Any

from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import Combine, Epilogue, GemmCombine, GroupedGemm, GroupedLinear, PairedLinear
from moe_ops.combine import (
    check_joined,
    check_weights as check_topk_weights,
    combine,
    combine_gradient,
    joined_saved,
    reference as combine_reference,
    with_joined_gradients,
)
from moe_ops.dispatch import expect_plan
from moe_ops.grouped_gemm import (
    check as check_gemm,
    gradients as gemm_gradients,
    product,
    product_flops,
    reference as gemm_reference,
)
from moe_ops.records import partial
from moe_ops.types import DispatchPlan


def gemm_combine(
    x: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    plan: DispatchPlan,
    bias: Tensor | None = None,
    shared: Tensor | None = None,
    *,
    shared_gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`grouped_gemm` and `combine` in one operator: the down half of the experts.

    Args:
        x: [S, I] in expert order.
        w2: [E, H, I], dtype of x.
        topk_weights: [T, K], any floating dtype.
        plan: from `build_dispatch`.
        bias: [E, H], dtype of x.
        shared, residual: [T, H], shared_gate: [T, 1], dtype of x; see `combine`.

    Returns:
        [T, H], dtype of x.

    Raises:
        ValueError, TypeError: as the two stages do.

    Example:
        >>> out = moe_ops.gemm_combine(up, w2, topk_weights, plan)
    """
    expect_plan(plan)
    tensors = _library.autocast((x, GroupedLinear(w2, bias), shared, Epilogue(shared_gate, residual)))
    x, linear, shared, epilogue = tensors
    return _library.call(
        GemmCombine(x, linear, plan.expert_offsets, topk_weights, plan.inverse, shared, epilogue)
    )


def _check(args: GemmCombine) -> None:
    check_gemm(_product_args(args), "w2")
    check_topk_weights(args.topk_weights, args.inverse)
    _checks.expect_shape("inverse", args.inverse, (args.x.shape[0],))
    _checks.expect_same_device(args.x.device, "x", topk_weights=args.topk_weights, inverse=args.inverse)
    check_joined(args, args.w2.weight.shape[1], "x", args.x)


def _product_args(args: GemmCombine) -> GroupedGemm:
    return GroupedGemm(args.x, PairedLinear(*args.w2), args.expert_offsets)


def reference(args: GemmCombine) -> Tensor:
    """The definition of `gemm_combine`: its stages, one after the other."""
    expert_out = gemm_reference(_product_args(args))
    return combine_reference(Combine(expert_out, args.topk_weights, args.inverse, args.shared, args.epilogue))


def _cuda(args: GemmCombine) -> Tensor:
    return _fake(args) if args.topk_weights.numel() == 0 else _library.launch(args)


def _fake(args: GemmCombine) -> Tensor:
    return args.x.new_empty((args.topk_weights.shape[0], args.w2.weight.shape[1]))


_library.define(GemmCombine, "Tensor", check=_check, cpu=reference, cuda=_cuda, fake=_fake)


def _save(args: GemmCombine, output: Tensor) -> Any:
    return joined_saved(args)


def _backward(args: GemmCombine, needs: GemmCombine, grad: Tensor) -> GemmCombine:
    product_args = _product_args(args)
    grad_out, to_weights = combine_gradient(grad, product(*product_args), args.topk_weights, args.inverse)
    wanted = partial(GroupedGemm, x=needs.x, weight=PairedLinear(*needs.w2))
    to_x, to_w2, _ = gemm_gradients(grad_out, product_args, wanted)
    to_sum = partial(GemmCombine, x=to_x, w2=to_w2.halves[0], topk_weights=to_weights)
    return with_joined_gradients(to_sum, grad, args, needs)


def _stages(args: GemmCombine) -> Tensor:
    return combine(
        product(*_product_args(args)), args.topk_weights, args.inverse, args.shared, *args.epilogue
    )


_autograd.define_gradient(GemmCombine, _save, _backward, _autograd.tangent_of(_stages))
_library.define_flops(GemmCombine, lambda shapes: product_flops(shapes.x[0], shapes.w2))
_library.define_vmap(GemmCombine)
