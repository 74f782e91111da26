"""act_gemm_combine: gated_activation, grouped_gemm with w2 and combine in one operator, for layers that train.

    out[t] = sum over k of topk_weights[t, k] * (w2[e] @ act(gate_up[inverse[t*K + k]]) + bias[e])  [+ joined[t]]

What joins the sum is as in `combine`. The gradient saves gate_up, which `gather_gemm` makes, and neither the activated
rows nor the experts' outputs: it applies the activation again, and multiplies nothing twice. Static shapes, no host
sync.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.activation import (
    activation_spec,
    gated_activation,
    out_features,
    reference as activation_reference,
)
from moe_ops.arguments import (
    ActGemmCombine,
    Combine,
    Epilogue,
    GatedActivation,
    GroupedGemm,
    GroupedLinear,
    PairedLinear,
)
from moe_ops.combine import (
    check_joined,
    check_weights,
    combine,
    joined_saved,
    reference as combine_reference,
    with_joined_gradients,
)
from moe_ops.dispatch import expect_plan
from moe_ops.grouped_gemm import (
    check_linear,
    check_offsets,
    input_gradient,
    product,
    product_flops,
    reference as gemm_reference,
    weight_gradient,
)
from moe_ops.permute import permute
from moe_ops.records import partial
from moe_ops.types import Activation, DispatchPlan
from moe_ops.weighted_activation import weighted_activation_backward


def act_gemm_combine(
    gate_up: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    plan: DispatchPlan,
    activation: str | Activation = "silu",
    bias: Tensor | None = None,
    shared: Tensor | None = None,
    *,
    shared_gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`gated_activation`, `grouped_gemm` and `combine` in one operator: from gate and up projections to tokens.

    Args:
        gate_up: [S, 2I] in expert order ([S, I] for an ungated activation), from `gather_gemm`.
        w2: [E, H, I], dtype of gate_up.
        topk_weights: [T, K], any floating dtype.
        plan: from `build_dispatch`.
        activation: a name or an `Activation`.
        bias: [E, H], dtype of gate_up.
        shared, residual: [T, H], shared_gate: [T, 1], dtype of gate_up; see `combine`.

    Returns:
        [T, H], dtype of gate_up.

    Raises:
        ValueError, TypeError: as the three stages do.

    Gradient: to every floating argument; saves the first three, and shared where it is gated. Twice differentiable.

    Example:
        >>> out = moe_ops.act_gemm_combine(gate_up, w2, topk_weights, plan)
    """
    expect_plan(plan)
    tensors = _library.autocast((gate_up, GroupedLinear(w2, bias), shared, Epilogue(shared_gate, residual)))
    gate_up, linear, shared, epilogue = tensors
    spec, (slots, inverse, offsets) = activation_spec(activation), plan
    return _library.call(
        ActGemmCombine(gate_up, linear, offsets, topk_weights, slots, inverse, shared, spec, epilogue)
    )


def _check(args: ActGemmCombine) -> None:
    gate_up, w2 = args.gate_up, args.w2
    _checks.expect_floating("gate_up", gate_up)
    _checks.expect_shape("gate_up", gate_up, ("S", "2I"))
    features = out_features(gate_up.shape[1], Activation.from_spec(args.activation), "gate_up")
    check_linear("w2", w2, ("E", "H", features), "gate_up", gate_up)
    check_offsets(args.expert_offsets, w2, "gate_up", gate_up)
    check_weights(args.topk_weights, args.inverse)
    vectors = {"sorted_slots": args.sorted_slots, "inverse": args.inverse}
    for name, vector in vectors.items():
        _checks.expect_index(name, vector, (torch.int32,))
        _checks.expect_shape(name, vector, (gate_up.shape[0],))
    _checks.expect_same_device(gate_up.device, "gate_up", topk_weights=args.topk_weights, **vectors)
    check_joined(args, w2.weight.shape[1], "gate_up", gate_up)


def reference(args: ActGemmCombine) -> Tensor:
    """The definition of `act_gemm_combine`: its stages, one after the other."""
    activated = activation_reference(GatedActivation(args.gate_up, args.activation))
    expert_out = gemm_reference(GroupedGemm(activated, PairedLinear(*args.w2), args.expert_offsets))
    return combine_reference(Combine(expert_out, args.topk_weights, args.inverse, args.shared, args.epilogue))


def _cuda(args: ActGemmCombine) -> Tensor:
    return _fake(args) if args.topk_weights.numel() == 0 else _library.launch(args)


def _fake(args: ActGemmCombine) -> Tensor:
    return args.gate_up.new_empty((args.topk_weights.shape[0], args.w2.weight.shape[1]))


_library.define(ActGemmCombine, "Tensor", check=_check, cpu=reference, cuda=_cuda, fake=_fake)


def _save(args: ActGemmCombine, output: Tensor) -> Any:
    return joined_saved(args)


def _backward(args: ActGemmCombine, needs: ActGemmCombine, grad: Tensor) -> ActGemmCombine:
    return with_joined_gradients(gradients(grad, args, needs), grad, args, needs)


def gradients(grad: Tensor, args: ActGemmCombine, needs: ActGemmCombine) -> ActGemmCombine:
    """The gradients that `needs` asks for, but of what joins the sum. No product before or behind is run again.

    With g = grad of a slot's token, y = w2 @ a + b2 the slot's output and s its weight, the gradient of s is
    <g, y> = <w2.T @ g, a> + <g, b2>, from the product that the gradient of a = s * w2.T @ g needs anyway
    (SonicMoE, arXiv 2512.14080).
    """
    (gate_up, w2, offsets, _, slots, *_), to_weights, to_gate_up = args, None, None
    grad_rows, scale = permute(grad.contiguous(), slots), _scale(args)
    if needs.topk_weights or needs.gate_up:
        back = input_gradient(grad_rows, w2, offsets)
        to_gate_up, weighted, dots = weighted_activation_backward(back, gate_up, scale, args.activation)
        to_weights = _weights_gradient(dots, grad_rows, args) if needs.topk_weights else None
    else:
        weighted = gated_activation(gate_up, args.activation) * scale.unsqueeze(1).to(gate_up.dtype)
    to_w2 = _scaled_gradient(grad_rows, weighted, scale, offsets, needs.w2)
    return partial(ActGemmCombine, gate_up=to_gate_up, w2=to_w2, topk_weights=to_weights)


def _scale(args: ActGemmCombine) -> Tensor:
    """[S]: the weight of each row."""
    return args.topk_weights.flatten()[args.sorted_slots]


def _weights_gradient(dots: Tensor, grad_rows: Tensor, args: ActGemmCombine) -> Tensor:
    """<g, y> of every slot as [T, K]; `dots` [S] are those of w2.T @ g and a."""
    topk_weights, bias = args.topk_weights, args.w2.bias
    if bias is not None:
        of_bias = product(grad_rows, GroupedLinear(bias.unsqueeze(1)), args.expert_offsets)
        dots = dots + of_bias.squeeze(1).to(dots.dtype)
    return torch.zeros_like(dots).index_copy(0, args.sorted_slots.long(), dots).view(topk_weights.shape)


def _scaled_gradient(
    grad: Tensor, weighted: Tensor, scale: Tensor, expert_offsets: Tensor, needs: GroupedLinear
) -> GroupedLinear:
    """Gradients to weight and bias of a product whose rows are `weighted`, by scale [S]."""
    to_weight = weight_gradient(grad, weighted, expert_offsets) if needs.weight else None
    column = scale.unsqueeze(1).to(grad.dtype)
    to_bias = weight_gradient(grad, column, expert_offsets).squeeze(2) if needs.bias else None
    return partial(GroupedLinear, weight=to_weight, bias=to_bias)


def stages(args: ActGemmCombine) -> Tensor:
    """`act_gemm_combine` as its stage operators."""
    activated = gated_activation(args.gate_up, args.activation)
    expert_out = product(activated, args.w2, args.expert_offsets)
    return combine(expert_out, args.topk_weights, args.inverse, args.shared, *args.epilogue)


_autograd.define_gradient(ActGemmCombine, _save, _backward, _autograd.tangent_of(stages))
_library.define_flops(ActGemmCombine, lambda shapes: product_flops(shapes.gate_up[0], shapes.w2))
_library.define_vmap(ActGemmCombine)
