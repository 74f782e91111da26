"""fused_experts: the experts of a whole MoE layer in one call, from expert ids.

    out[t] = sum over k of topk_weights[t, k] * w2[e] @ act(w13[e] @ hidden_states[t])  [+ shared[t]]
    e      = topk_ids[t, k]

Traced by a compiler it emits the stage operators, so that passes can fuse across every border; eager it is one
operator, which picks its kernels on the host from the token count. The operator saves inputs, routing and plan for
its gradient and recomputes the rest.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops._cpu_experts import ExpertWeights, run_experts
from moe_ops.activation import (
    activation_gradient,
    activation_spec,
    gated_activation,
    out_features,
)
from moe_ops.combine import check_shared, combine
from moe_ops.dispatch import build_dispatch, check_ids
from moe_ops.errors import value_error
from moe_ops.grouped_gemm import (
    check_bias,
    check_weight,
    gradients as gemm_gradients,
    input_gradient as gemm_input_gradient,
    product,
    product_flops,
    weight_gradient,
)
from moe_ops.permute import permute, permute_gradient
from moe_ops.types import Activation, is_gated_spec

Emit = Literal["auto", "stages", "fused"]


class _Arguments(NamedTuple):
    """The operator's arguments, in the order of its schema."""

    hidden_states: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_map: Tensor | None
    shared: Tensor | None
    activation: str


def fused_experts(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str | Activation = "silu",
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    shared: Tensor | None = None,
    emit: Emit = "auto",
) -> Tensor:
    """Runs the chosen experts of each token and sums them with their weights.

    Args:
        hidden_states: [T, H], any floating dtype.
        w13: [E, 2I, H] gate and up rows ([E, I, H] for an ungated activation), w2: [E, H, I]; dtype of
            hidden_states, stride 1 in either of the last two dimensions, never copied.
        topk_weights: [T, K], any floating dtype. topk_ids: [T, K] int32 or int64; an id out of range (padding,
            remote expert) contributes exactly zero.
        activation: a name or an `Activation`.
        w13_bias: [E, 2I], w2_bias: [E, H], dtype of hidden_states.
        expert_map: [E_global] int32, global to local ids, -1 for remote ones; see `build_dispatch`.
        apply_router_weight_on_input: weigh the experts' input instead of their output; only for K = 1.
        shared: [T, H] output of shared experts, added after the routed sum in the compute dtype.
        emit: "auto" follows the compiler; "stages" or "fused" fixes what is emitted.

    Returns:
        [T, H], dtype of hidden_states.

    Raises:
        ValueError, TypeError: the message names argument, value and expectation. Under `torch.compile` the same
            text is inside the compiler's error.

    Gradient: to every floating argument; twice differentiable.

    Example:
        >>> out = moe_ops.fused_experts(hidden_states, w13, w2, topk_weights, topk_ids)
    """
    hidden_states, w13, w2, w13_bias, w2_bias, shared = _library.autocast(
        hidden_states, w13, w2, w13_bias, w2_bias, shared
    )
    if apply_router_weight_on_input:
        hidden_states, topk_weights = _weigh_input(hidden_states, topk_weights)
    spec = activation_spec(activation)
    arguments = _Arguments(
        hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias, expert_map, shared, spec
    )
    return _expert_stages(arguments) if emits_stages(emit) else _library.call("fused_experts", *arguments)


def emits_stages(emit: Emit) -> bool:
    """The one switch between stage operators and fused operator."""
    if emit == "auto":
        return torch.compiler.is_compiling()
    if emit not in ("stages", "fused"):
        value_error("emit={!r}: expected 'auto', 'stages' or 'fused'", emit)
    return emit == "stages"


def _weigh_input(hidden_states: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    if topk_weights.dim() != 2 or topk_weights.shape[1] != 1:
        value_error(
            "apply_router_weight_on_input=True with topk_weights of shape {}: expected [T, 1]",
            list(topk_weights.shape),
        )
    return hidden_states * topk_weights.to(hidden_states.dtype), torch.ones_like(topk_weights)


def _expert_stages(arguments: _Arguments) -> Tensor:
    _check_in_callers_names(arguments)
    hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias, expert_map, shared, activation = (
        arguments
    )
    plan = build_dispatch(topk_ids, w13.shape[0], expert_map)
    rows = permute(hidden_states, plan.sorted_slots)
    gate_up = product(rows, w13, plan.expert_offsets, w13_bias)
    activated = gated_activation(gate_up, activation)
    expert_out = product(activated, w2, plan.expert_offsets, w2_bias)
    return combine(expert_out, topk_weights, plan.inverse, shared)


def _check_in_callers_names(arguments: _Arguments) -> None:
    """What the stages' own checks would say of `x` and `weight`. Dynamo traces it, so it stays plain."""
    hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias, _, _, activation = arguments
    _checks.expect_floating("hidden_states", hidden_states)
    _checks.expect_shape("hidden_states", hidden_states, ("T", "H"))
    _checks.expect_shape("w13", w13, ("E", "2I", hidden_states.shape[1]))
    gated = is_gated_spec(activation)
    if gated and isinstance(w13.shape[1], int) and w13.shape[1] % 2:
        value_error(
            "w13 has {} gate and up features: expected an even number for {!r}", w13.shape[1], activation
        )
    features = w13.shape[1] // 2 if gated else w13.shape[1]
    _checks.expect_shape("w2", w2, (w13.shape[0], hidden_states.shape[1], features))
    _checks.expect_shape("topk_ids", topk_ids, (hidden_states.shape[0], "K"))
    _checks.expect_shape("topk_weights", topk_weights, tuple(topk_ids.shape))
    _checks.expect_same_dtype(hidden_states.dtype, "hidden_states", w13=w13, w2=w2)
    _checks.expect_same_device(
        hidden_states.device, "hidden_states", w13=w13, w2=w2, topk_weights=topk_weights, topk_ids=topk_ids
    )
    check_bias("w13_bias", w13_bias, w13)
    check_bias("w2_bias", w2_bias, w2)


def _check(*args: Any) -> None:
    hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias, expert_map, shared, activation = args
    check_expert_weights(hidden_states, w13, w2, w13_bias, w2_bias, activation)
    check_ids(topk_ids, expert_map, w13.shape[0])
    _checks.expect_shape("topk_ids", topk_ids, (hidden_states.shape[0], "K"))
    _checks.expect_floating("topk_weights", topk_weights)
    _checks.expect_shape("topk_weights", topk_weights, tuple(topk_ids.shape))
    check_shared(shared, hidden_states.shape[0], hidden_states.shape[1], "hidden_states", hidden_states)
    _checks.expect_same_device(
        hidden_states.device,
        "hidden_states",
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
    )


def check_expert_weights(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    activation: str,
) -> None:
    """The checks of a layer's input and weights."""
    _checks.expect_floating("hidden_states", hidden_states)
    _checks.expect_shape("hidden_states", hidden_states, ("T", "H"))
    check_weight("w13", w13, hidden_states.shape[1], None)
    if w13.shape[0] < 1:
        value_error("w13 has shape {}: expected at least one expert", list(w13.shape))
    features = out_features(w13.shape[1], Activation.from_spec(activation), "w13")
    _checks.expect_shape("w2", w2, (w13.shape[0], hidden_states.shape[1], features))
    _checks.expect_weight_strides("w2", w2)
    check_bias("w13_bias", w13_bias, w13)
    check_bias("w2_bias", w2_bias, w2)
    tensors = {"w13": w13, "w2": w2, "w13_bias": w13_bias, "w2_bias": w2_bias}
    _checks.expect_same_dtype(hidden_states.dtype, "hidden_states", **tensors)
    _checks.expect_same_device(hidden_states.device, "hidden_states", hidden_states=hidden_states, **tensors)


def reference(*args: Any) -> Tensor:
    """The definition of `fused_experts`, in plain PyTorch; takes the operator's arguments."""
    hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias, expert_map, shared, activation = args
    weights = ExpertWeights(w13, w2, w13_bias, w2_bias, Activation.from_spec(activation))
    out = run_experts(hidden_states, weights, topk_weights, topk_ids, expert_map)
    if shared is not None:
        out += shared
    return out.to(hidden_states.dtype)


def _cuda(hidden_states: Tensor, *args: Any) -> Tensor:
    if hidden_states.shape[0] == 0:
        return hidden_states.new_empty(hidden_states.shape)
    from moe_ops.kernels import fused as kernels

    launch: Any = kernels.fused_experts
    return launch(hidden_states, *args[:-1], Activation.from_spec(args[-1]))


def fake(hidden_states: Tensor, *_: Any) -> Tensor:
    """An output of the right metadata, uninitialised."""
    return hidden_states.new_empty(hidden_states.shape)


_library.define(
    "fused_experts(Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
    "Tensor? w13_bias, Tensor? w2_bias, Tensor? expert_map, Tensor? shared, str activation) -> Tensor",
    check=_check,
    cpu=reference,
    cuda=_cuda,
    fake=fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden_states, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias, expert_map, shared, ctx.activation = (
        inputs
    )
    plan = build_dispatch(topk_ids, w13.shape[0], expert_map)
    ctx.has_shared = shared is not None
    ctx.save_for_backward(hidden_states, w13, w2, topk_weights, w13_bias, w2_bias, *plan)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    to_hidden, to_w13, to_w2, to_weights, _, to_b13, to_b2, *_ = ctx.needs_input_grad
    needs = Needs(to_hidden, to_w13, to_w2, to_weights, to_b13, to_b2)
    to_hidden, to_w13, to_w2, to_weights, to_b13, to_b2 = expert_gradients(
        grad, ctx.saved_tensors, ctx.activation, needs
    )
    to_shared = grad if ctx.has_shared else None
    return to_hidden, to_w13, to_w2, to_weights, None, to_b13, to_b2, None, to_shared, None


class Needs(NamedTuple):
    """Which gradients of a layer are asked for."""

    hidden_states: bool
    w13: bool
    w2: bool
    topk_weights: bool
    w13_bias: bool
    w2_bias: bool

    @property
    def up(self) -> bool:
        """Whether anything before the activation has a gradient."""
        return self.hidden_states or self.w13 or self.w13_bias


def expert_gradients(grad: Tensor, saved: tuple[Any, ...], activation: str, needs: Needs) -> tuple[Any, ...]:
    """The gradients of `Needs`, in its order. Recomputes the first product of the layer, not the second.

    With g = grad of a slot's token, y = w2 @ a + b2 the slot's output and s its weight, the gradient of s is
    <g, y> = <w2.T @ g, a> + <g, b2>, from the product that the gradient of a = s * w2.T @ g needs anyway
    (SonicMoE, arXiv 2512.14080).
    """
    hidden_states, w13, w2, topk_weights, w13_bias, w2_bias, slots, _, offsets = saved
    rows = permute(hidden_states, slots)
    gate_up = product(rows, w13, offsets, w13_bias)
    activated = gated_activation(gate_up, activation)
    grad_rows, scale = permute(grad.contiguous(), slots), topk_weights.flatten()[slots].unsqueeze(1)
    back = gemm_input_gradient(grad_rows, w2, offsets)
    to_weights = to_hidden = to_w13 = to_b13 = None
    if needs.topk_weights:
        dots = (back * activated).sum(1, dtype=topk_weights.dtype)
        if w2_bias is not None:
            dots = dots + product(grad_rows, w2_bias.unsqueeze(1), offsets).squeeze(1).to(dots.dtype)
        to_weights = torch.zeros_like(dots).index_copy(0, slots.long(), dots).view(topk_weights.shape)
    scale = scale.to(grad_rows.dtype)
    to_w2 = weight_gradient(grad_rows, activated * scale, offsets) if needs.w2 else None
    to_b2 = weight_gradient(grad_rows, scale, offsets).squeeze(2) if needs.w2_bias else None
    if needs.up:
        to_gate_up = activation_gradient(back * scale, gate_up, activation)
        wanted = needs.hidden_states, needs.w13, needs.w13_bias
        to_rows, to_w13, to_b13 = gemm_gradients(to_gate_up, rows, w13, offsets, wanted)
        to_hidden = None if to_rows is None else permute_gradient(to_rows, slots, hidden_states.shape[0])
    return to_hidden, to_w13, to_w2, to_weights, to_b13, to_b2


def _stages(*args: Any) -> Tensor:
    return _expert_stages(_Arguments(*args))


_autograd.define_gradient("fused_experts", _setup_context, _backward, _autograd.tangent_of(_stages))


def layer_flops(num_slots: int, w13: Sequence[int], w2: Sequence[int]) -> int:
    """Of both products of a layer."""
    return product_flops(num_slots, w13) + product_flops(num_slots, w2)


_library.define_flops("fused_experts", lambda x, w13, w2, _, ids, *__: layer_flops(ids[0] * ids[1], w13, w2))
_library.define_vmap("fused_experts", token_args=("hidden_states", "topk_weights", "topk_ids", "shared"))
