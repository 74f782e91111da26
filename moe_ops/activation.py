"""gated_activation: the nonlinearity between an expert's two products.

    silu        g * sigmoid(g) * u          (with limit L: g = min(g, L), u = clamp(u, -L, L))
    gelu        0.5 g (1 + erf(g / sqrt 2)) * u
    gelu_tanh   0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) * u
    swiglu_oai  g * sigmoid(alpha g) * (u + 1),  g = min(g, L), u = clamp(u, -L, L)     (gpt-oss)
    relu2       max(x, 0)^2, no gate                                                    (Nemotron-H)

g and u are the gate and up columns of gate_up [S, 2I]: halves, or alternating when interleaved. Computed in
float32 (float64 for float64), rounded once. A row of zeros stays zero. Pointwise; consumed by the w2 product.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ops import _autograd, _checks, _library
from moe_ops.errors import describe, type_error, value_error
from moe_ops.types import Activation


def gated_activation(gate_up: Tensor, activation: str | Activation = "silu") -> Tensor:
    """Applies an expert's gate.

    Args:
        gate_up: [S, 2I] ([S, I] for an ungated activation), any floating dtype.
        activation: a name or an `Activation`.

    Returns:
        [S, I], dtype of gate_up.

    Raises:
        ValueError: wrong rank, an odd number of columns, an unknown activation.
        TypeError: gate_up not floating.

    Gradient: to gate_up; twice differentiable.

    Example:
        >>> hidden = moe_ops.gated_activation(gate_up, "silu")
    """
    return _library.call("gated_activation", gate_up, activation_spec(activation))


def activation_spec(activation: str | Activation) -> str:
    """The canonical string of `activation`. Raises TypeError when it is neither a string nor an Activation.

    A string passes unread: the operator parses it, where a compiler need not trace the parser.
    """
    if isinstance(activation, str):
        return activation
    if not isinstance(activation, Activation):
        type_error("activation={}: expected a string or an Activation", describe(activation))
    return activation.spec


def out_features(columns: int, activation: Activation, name: str = "gate_up") -> int:
    """I for the 2I (or I) columns an activation takes. Raises ValueError, naming `name`, for an odd number."""
    if not activation.is_gated:
        return columns
    if isinstance(columns, int) and columns % 2:
        value_error(
            "{} has {} gate and up features: expected an even number for {!r}", name, columns, activation.name
        )
    return columns // 2


def apply_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """The formula, in gate_up's own dtype, out of place."""
    if not activation.is_gated:
        return gate_up.relu().square()
    gate, up = split_gate_up(gate_up, activation)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.name == "swiglu_oai":
        return gate * torch.sigmoid(gate * _alpha(activation)) * (up + 1)
    return _gate(gate, activation) * up


def _alpha(activation: Activation) -> float:
    return 1.0 if activation.alpha is None else activation.alpha


def split_gate_up(gate_up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Gate and up columns as views [S, I]."""
    if activation.interleaved:
        return gate_up[:, ::2], gate_up[:, 1::2]
    gate, up = gate_up.chunk(2, dim=1)
    return gate, up


def _gate(gate: Tensor, activation: Activation) -> Tensor:
    if activation.name == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate=_approximation(activation))


def _approximation(activation: Activation) -> str:
    return "tanh" if activation.name == "gelu_tanh" else "none"


def _check(gate_up: Tensor, activation: str) -> None:
    _checks.expect_floating("gate_up", gate_up)
    _checks.expect_shape("gate_up", gate_up, ("S", "2I"))
    _checks.expect_same_device(gate_up.device, "gate_up", gate_up=gate_up)
    out_features(gate_up.shape[1], Activation.from_spec(activation))


def reference(gate_up: Tensor, activation: str) -> Tensor:
    """The definition of `gated_activation`, in plain PyTorch."""
    computed = apply_activation(
        gate_up.to(_checks.compute_dtype(gate_up.dtype)), Activation.from_spec(activation)
    )
    return computed.to(gate_up.dtype)


def _cuda(gate_up: Tensor, activation: str) -> Tensor:
    if gate_up.shape[0] == 0:
        return _fake(gate_up, activation)
    from moe_ops.kernels import activation as kernels

    return kernels.launch(gate_up, Activation.from_spec(activation))


def _fake(gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(
        (gate_up.shape[0], out_features(gate_up.shape[1], Activation.from_spec(activation)))
    )


def _check_backward(grad: Tensor, gate_up: Tensor, activation: str) -> None:
    _check(gate_up, activation)
    features = out_features(gate_up.shape[1], Activation.from_spec(activation))
    _checks.expect_shape("grad", grad, (gate_up.shape[0], features))
    _checks.expect_same_dtype(gate_up.dtype, "gate_up", grad=grad)
    _checks.expect_same_device(gate_up.device, "gate_up", grad=grad)


def _reference_backward(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    config = Activation.from_spec(activation)
    if config.is_gated and config.limit is None:
        return _unclamped_backward(grad, gate_up, config)
    return _formula_backward(grad, gate_up, activation)


def _unclamped_backward(grad: Tensor, gate_up: Tensor, activation: Activation) -> Tensor:
    """In the storage dtype: torch's own derivatives compute in float32 inside, a quarter of the time of a formula."""
    out = gate_up.new_empty(gate_up.shape)
    (gate, up), (to_gate, to_up) = split_gate_up(gate_up, activation), split_gate_up(out, activation)
    if activation.name == "silu":
        to_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    else:
        to_gate.copy_(torch.ops.aten.gelu_backward(grad * up, gate, approximate=_approximation(activation)))
    torch.mul(grad, _gate(gate, activation), out=to_up)
    return out


def _formula_backward(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    dtype = _checks.compute_dtype(gate_up.dtype)
    computed = apply_activation_backward(grad.to(dtype), gate_up.to(dtype), Activation.from_spec(activation))
    return computed.to(gate_up.dtype)


def apply_activation_backward(grad: Tensor, gate_up: Tensor, activation: Activation) -> Tensor:
    """The derivative formula, in gate_up's own dtype; clamped values pass gradient at the limit, as torch does."""
    if not activation.is_gated:
        return grad * 2 * gate_up.relu()
    gate, up = split_gate_up(gate_up, activation)
    limit = float("inf") if activation.limit is None else activation.limit
    clamped_gate, clamped_up = gate.clamp(max=limit), up.clamp(-limit, limit)
    value, slope = _gate_and_slope(clamped_gate, activation)
    factor = clamped_up + 1 if activation.name == "swiglu_oai" else clamped_up
    grad_gate = grad * factor * slope * (gate <= limit)
    grad_up = grad * value * (up.abs() <= limit)
    pair = torch.stack((grad_gate, grad_up), dim=2 if activation.interleaved else 1)
    return pair.flatten(1)


def _gate_and_slope(gate: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    if activation.name in ("silu", "swiglu_oai"):
        alpha = _alpha(activation)
        sigmoid = torch.sigmoid(gate * alpha)
        return gate * sigmoid, sigmoid * (1 + alpha * gate * (1 - sigmoid))
    approximate = _approximation(activation)
    slope = torch.ops.aten.gelu_backward(torch.ones_like(gate), gate, approximate=approximate)
    return _gate(gate, activation), slope


def _cuda_backward(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    if gate_up.shape[0] == 0:
        return _fake_backward(grad, gate_up, activation)
    from moe_ops.kernels import activation as kernels

    return kernels.launch_backward(grad, gate_up, Activation.from_spec(activation))


def _fake_backward(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


_library.define(
    "gated_activation(Tensor gate_up, str activation) -> Tensor",
    check=_check,
    cpu=reference,
    cuda=_cuda,
    fake=_fake,
)
_library.define(
    "gated_activation_backward(Tensor grad, Tensor gate_up, str activation) -> Tensor",
    check=_check_backward,
    cpu=_reference_backward,
    cuda=_cuda_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, ctx.activation = inputs
    ctx.save_for_backward(gate_up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (gate_up,) = ctx.saved_tensors
    return activation_gradient(grad, gate_up, ctx.activation), None


def activation_gradient(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """Gradient of `gated_activation` to gate_up."""
    return _library.call("gated_activation_backward", grad, gate_up, activation)


_autograd.define_gradient("gated_activation", _setup_context, _backward, _autograd.tangent_of(reference))
_autograd.define_gradient_of_formula("gated_activation_backward", _formula_backward, ("grad", "gate_up"))
_library.define_vmap("gated_activation", token_args=("gate_up",))
_library.define_vmap("gated_activation_backward", token_args=("grad", "gate_up"))
