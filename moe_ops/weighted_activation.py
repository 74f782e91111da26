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
    return _library.call(
        WeightedActivationBackward(GatedActivationBackward(grad, gate_up, activation), scale)
    )


def _check(args: WeightedActivationBackward) -> None:
    (_, gate_up, _), scale = args
    check_activation_backward(args.rows)
    _checks.expect_floating("scale", scale)
    _checks.expect_shape("scale", scale, (gate_up.shape[0],))
    _checks.expect_same_device(gate_up.device, "gate_up", scale=scale)


def reference(args: WeightedActivationBackward) -> Outputs:
    """The definition of `weighted_activation_backward`, in plain PyTorch."""
    dtype, activation = args.rows.gate_up.dtype, Activation.from_spec(args.rows.activation)
    computed = _checks.compute_dtype(dtype)
    grad, gate_up, scale = (each.to(computed) for each in (*args.rows[:2], args.scale.unsqueeze(1)))
    activated = apply_activation(gate_up, activation)
    to_gate_up = apply_activation_backward(grad * scale, gate_up, activation)
    dots = (grad * activated).sum(1).to(args.scale.dtype)
    return to_gate_up.to(dtype), (activated * scale).to(dtype), dots


def _cpu(args: WeightedActivationBackward) -> Outputs:
    """The same from the stages, which have quicker forms of some activations."""
    (grad, gate_up, activation), scale = args
    rows_scale = scale.unsqueeze(1).to(gate_up.dtype)
    activated = activation_reference(GatedActivation(gate_up, activation))
    to_gate_up = activation_backward_reference(args.rows._replace(grad=grad * rows_scale))
    return to_gate_up, activated * rows_scale, (grad * activated).sum(1, dtype=scale.dtype)


def _cuda(args: WeightedActivationBackward) -> Outputs:
    return _fake(args) if args.rows.gate_up.shape[0] == 0 else _library.launch(args)


def _fake(args: WeightedActivationBackward) -> Outputs:
    (grad, gate_up, _), scale = args
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
