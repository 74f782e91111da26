"""weighted_activation_backward: what the gradient of a weighted product needs of its rows, in one pass over them.

    a = activation(gate_up)
    grad_gate_up = gradient of `gated_activation` for scale * grad
    weighted = scale * a
    dots = <grad, a>

With grad = w2.T @ g these are the gradient of gate_up, the input of w2's gradient, and the gradient of the weight of a
row of `act_gemm_combine` (SonicMoE, arXiv 2512.14080). Taken apart they read each row three times.
"""

from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.activation import (
    apply_activation,
    apply_activation_backward,
    check_activation_backward,
    reference as activation_reference,
    reference_backward as activation_backward_reference,
)
from moe_ops.arguments import GatedActivation, GatedActivationBackward, WeightedActivationBackward
from moe_ops.types import Activation

Outputs = tuple[Tensor, Tensor, Tensor]


def weighted_activation_backward(grad: Tensor, gate_up: Tensor, scale: Tensor, activation: str) -> Outputs:
    """(grad_gate_up [S, 2I], weighted [S, I], dots [S]) for grad [S, I], gate_up [S, 2I], scale [S], see above.

    `activation` is a spec. The first two have the dtype of gate_up, dots that of scale. Twice differentiable.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not belong together.
    """
    return _library.call(WeightedActivationBackward(grad, gate_up, scale, activation))


def _check(args: WeightedActivationBackward) -> None:
    check_activation_backward(GatedActivationBackward(args.grad, args.gate_up, args.activation))
    _checks.expect_floating("scale", args.scale)
    _checks.expect_shape("scale", args.scale, (args.gate_up.shape[0],))
    _checks.expect_same_device(args.gate_up.device, "gate_up", scale=args.scale)


def reference(args: WeightedActivationBackward) -> Outputs:
    """The definition of `weighted_activation_backward`, in plain PyTorch."""
    activation, dtype = Activation.from_spec(args.activation), args.gate_up.dtype
    computed = _checks.compute_dtype(dtype)
    grad, gate_up, scale = (each.to(computed) for each in args[:3])
    activated = apply_activation(gate_up, activation)
    to_gate_up = apply_activation_backward(grad * scale[:, None], gate_up, activation)
    dots = (grad * activated).sum(1).to(args.scale.dtype)
    return to_gate_up.to(dtype), (activated * scale[:, None]).to(dtype), dots


def _cpu(args: WeightedActivationBackward) -> Outputs:
    """The same from the stages, which have quicker forms of some activations."""
    grad, gate_up, scale, activation = args
    rows_scale = scale.unsqueeze(1).to(gate_up.dtype)
    activated = activation_reference(GatedActivation(gate_up, activation))
    to_gate_up = activation_backward_reference(
        GatedActivationBackward(grad * rows_scale, gate_up, activation)
    )
    return to_gate_up, activated * rows_scale, (grad * activated).sum(1, dtype=scale.dtype)


def _cuda(args: WeightedActivationBackward) -> Outputs:
    return _fake(args) if args.gate_up.shape[0] == 0 else _library.launch(args)


def _fake(args: WeightedActivationBackward) -> Outputs:
    grad, gate_up, scale, _ = args
    return gate_up.new_empty(gate_up.shape), grad.new_empty(grad.shape), scale.new_empty(scale.shape)


_library.define(
    WeightedActivationBackward,
    "(Tensor grad_gate_up, Tensor weighted, Tensor dots)",
    check=_check,
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)
_autograd.define_gradient_of_formula(WeightedActivationBackward, reference)
_library.define_vmap_over_tokens(WeightedActivationBackward)
