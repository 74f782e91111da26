"""gated_activation: the nonlinearity between an expert's two products.

    silu        g * sigmoid(g) * u          (with limit L: g = min(g, L), u = clamp(u, -L, L))
    gelu        0.5 g (1 + erf(g / sqrt 2)) * u
    gelu_tanh   0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) * u
    swiglu_oai  g * sigmoid(alpha g) * (u + beta),  g = min(g, L), u = clamp(u, -L, L)        (gpt-oss)
    swiglustep  min(g * sigmoid(g), L) * clamp(u, -L, L)                                      (Step-3.5)
    situ        b tanh(g / b) * sigmoid(g) * u,  u = c tanh(u / c) where linear_beta c is given    (Kimi K3)
    relu2       max(x, 0)^2, no gate                                                          (Nemotron-H)
    silu_no_mul, gelu_no_mul, gelu_tanh_no_mul       the first three without a gate: f(x), no u

g and u are the gate and up columns of gate_up [S, 2I]: halves, or alternating when interleaved. Computed in
float32 (float64 for float64), rounded once. A row of zeros stays zero. Pointwise; consumed by the w2 product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ops import _autograd, _checks, _library
from moe_ops._compat import CLAMP_PASSES_ITS_LIMIT
from moe_ops.arguments import GatedActivation, GatedActivationBackward
from moe_ops.errors import describe, type_error, value_error
from moe_ops.formula import Formula
from moe_ops.records import partial
from moe_ops.types import Activation

_UNCLAMPED = ("silu", "gelu", "gelu_tanh")  # gated, and torch has their derivatives


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
    return _library.call(GatedActivation(gate_up, activation_spec(activation)))


def activation_spec(activation: str | Activation) -> str:
    """The canonical string of `activation`. Raises TypeError when it is neither a string nor an Activation.

    A string passes unread: the operator parses it, where a compiler need not trace the parser.
    """
    if isinstance(activation, str):
        return activation
    if not isinstance(activation, Activation):
        type_error("activation={}: expected a string or an Activation", describe(activation))
    return activation.spec


def out_features(columns: int, activation: Activation | Formula, name: str = "gate_up") -> int:
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
        return _gate(gate_up, activation)
    return gate_times_up(*split_gate_up(gate_up, activation), activation)


def gate_times_up(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The formula of a gated activation, of any shape."""
    return _gate(gate, activation) * _up(up, activation)


def split_gate_up(gate_up: Tensor, activation: Activation | Formula) -> tuple[Tensor, Tensor]:
    """Gate and up columns as views: [S, 2I] to [S, I], or the rows of weights [E, 2I, H] that make them."""
    if activation.interleaved:
        return gate_up[:, ::2], gate_up[:, 1::2]
    gate, up = gate_up.chunk(2, dim=1)
    return gate, up


def _gate(gate: Tensor, activation: Activation) -> Tensor:
    if activation.function == "relu2":
        return gate.relu().square()
    if activation.function in ("gelu", "gelu_tanh"):
        return F.gelu(gate, approximate=_approximation(activation))
    if activation.function == "situ":
        return _bounded(gate, activation.beta) * torch.sigmoid(gate)
    if activation.function == "swiglustep":
        return _at_most(F.silu(gate), activation.limit)
    gate = _at_most(gate, activation.limit)
    return F.silu(gate) if activation.alpha is None else gate * torch.sigmoid(gate * activation.alpha)


def _up(up: Tensor, activation: Activation) -> Tensor:
    if activation.limit is not None:
        up = up.clamp(-activation.limit, activation.limit)
    up = _bounded(up, activation.linear_beta)
    return up + (activation.beta or 0.0) if activation.function == "swiglu_oai" else up


def _at_most(value: Tensor, limit: float | None) -> Tensor:
    return value if limit is None else value.clamp(max=limit)


def _bounded(value: Tensor, bound: float | None) -> Tensor:
    """value near 0, smoothly limited to [-bound, bound]."""
    return value if bound is None else bound * torch.tanh(value / bound)


def _bounded_slope(value: Tensor, bound: float | None) -> Tensor:
    return torch.ones_like(value) if bound is None else 1 - torch.tanh(value / bound).square()


def _approximation(activation: Activation) -> str:
    return "tanh" if activation.function == "gelu_tanh" else "none"


def _check(args: GatedActivation) -> None:
    _checks.expect_floating("gate_up", args.gate_up)
    _checks.expect_shape("gate_up", args.gate_up, ("S", "2I"))
    out_features(args.gate_up.shape[1], Activation.from_spec(args.activation))


def reference(args: GatedActivation) -> Tensor:
    """The definition of `gated_activation`, in plain PyTorch."""
    gate_up = args.gate_up.to(_checks.compute_dtype(args.gate_up.dtype))
    return apply_activation(gate_up, Activation.from_spec(args.activation)).to(args.gate_up.dtype)


def activate_halves(halves: Sequence[Tensor], activation: str) -> Tensor:
    """`reference` of gate_up [S, 2I], or of gate and up [S, I] as tensors of their own."""
    if len(halves) == 1:
        return reference(GatedActivation(halves[0], activation))
    dtype = halves[0].dtype
    gate, up = (half.to(_checks.compute_dtype(dtype)) for half in halves)
    return gate_times_up(gate, up, Activation.from_spec(activation)).to(dtype)


def _cuda(args: GatedActivation) -> Tensor:
    return _fake(args) if args.gate_up.shape[0] == 0 else _library.launch(args)


def _fake(args: GatedActivation) -> Tensor:
    features = out_features(args.gate_up.shape[1], Activation.from_spec(args.activation))
    return args.gate_up.new_empty((args.gate_up.shape[0], features))


def check_activation_backward(args: GatedActivationBackward) -> None:
    """Checks a gradient [S, I] against the rows [S, 2I] it belongs to."""
    gate_up = args.gate_up
    _check(GatedActivation(gate_up, args.activation))
    features = out_features(gate_up.shape[1], Activation.from_spec(args.activation))
    _checks.expect_shape("grad", args.grad, (gate_up.shape[0], features))
    _checks.expect_same_dtype(gate_up.dtype, "gate_up", grad=args.grad)
    _checks.expect_same_device(gate_up.device, "gate_up", grad=args.grad)


def reference_backward(args: GatedActivationBackward) -> Tensor:
    """The definition of `gated_activation_backward`, in plain PyTorch."""
    config = Activation.from_spec(args.activation)
    if config.name in _UNCLAMPED and config.limit is None:
        return _unclamped_backward(args.grad, args.gate_up, config)
    return _formula_backward(args)


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


def _formula_backward(args: GatedActivationBackward) -> Tensor:
    dtype = _checks.compute_dtype(args.gate_up.dtype)
    config = Activation.from_spec(args.activation)
    computed = apply_activation_backward(args.grad.to(dtype), args.gate_up.to(dtype), config)
    return computed.to(args.gate_up.dtype)


def apply_activation_backward(grad: Tensor, gate_up: Tensor, activation: Activation) -> Tensor:
    """The derivative formula, in gate_up's own dtype; at a limit a clamp passes what torch's own does."""
    if not activation.is_gated:
        return grad * _gate_slope(gate_up, activation)
    gate, up = split_gate_up(gate_up, activation)
    grad_gate = grad * _up(up, activation) * _gate_slope(gate, activation)
    grad_up = grad * _gate(gate, activation) * _up_slope(up, activation)
    pair = torch.stack((grad_gate, grad_up), dim=2 if activation.interleaved else 1)
    return pair.flatten(1)


def _gate_slope(gate: Tensor, activation: Activation) -> Tensor:
    if activation.function == "relu2":
        return 2 * gate.relu()
    if activation.function in ("gelu", "gelu_tanh"):
        ones = torch.ones_like(gate)
        return torch.ops.aten.gelu_backward(ones, gate, approximate=_approximation(activation))
    if activation.function == "situ":
        sigmoid, bounded = torch.sigmoid(gate), _bounded(gate, activation.beta)
        return sigmoid * (_bounded_slope(gate, activation.beta) + bounded * (1 - sigmoid))
    return _sigmoid_gate_slope(gate, activation)


def _sigmoid_gate_slope(gate: Tensor, activation: Activation) -> Tensor:
    alpha = 1.0 if activation.alpha is None else activation.alpha
    clamped = gate if activation.function == "swiglustep" else _at_most(gate, activation.limit)
    sigmoid = torch.sigmoid(clamped * alpha)
    slope = sigmoid * (1 + alpha * clamped * (1 - sigmoid))
    if activation.limit is None:
        return slope
    return slope * _passes(gate * sigmoid if activation.function == "swiglustep" else gate, activation.limit)


def _up_slope(up: Tensor, activation: Activation) -> Tensor:
    slope = _bounded_slope(up, activation.linear_beta)
    return slope if activation.limit is None else slope * _passes(up.abs(), activation.limit)


def _passes(value: Tensor, limit: float) -> Tensor:
    """Where a clamp to at most `limit` has a slope of 1."""
    return value <= limit if CLAMP_PASSES_ITS_LIMIT else value < limit


def _cuda_backward(args: GatedActivationBackward) -> Tensor:
    return _fake_backward(args) if args.gate_up.shape[0] == 0 else _library.launch(args)


def _fake_backward(args: GatedActivationBackward) -> Tensor:
    return args.gate_up.new_empty(args.gate_up.shape)


_library.define(GatedActivation, "Tensor", check=_check, cpu=reference, cuda=_cuda, fake=_fake)
_library.define(
    GatedActivationBackward,
    "Tensor",
    check=check_activation_backward,
    cpu=reference_backward,
    cuda=_cuda_backward,
    fake=_fake_backward,
)


def activation_gradient(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """Gradient of `gated_activation` to gate_up."""
    return _library.call(GatedActivationBackward(grad, gate_up, activation))


def _save(args: GatedActivation, output: Tensor) -> Any:
    return args


def _backward(args: GatedActivation, needs: GatedActivation, grad: Tensor) -> GatedActivation:
    return partial(GatedActivation, gate_up=activation_gradient(grad, *args))


_autograd.define_gradient(GatedActivation, _save, _backward, _autograd.tangent_of(reference))
_autograd.define_gradient_of_formula(GatedActivationBackward, _formula_backward)
_library.define_vmap_over_tokens(GatedActivation)
_library.define_vmap_over_tokens(GatedActivationBackward)
