"""fused_moe: a whole MoE layer in one call, from router logits: topk_routing, then fused_experts.

Traced by a compiler it emits the stage operators; eager it is one operator. See `fused_experts`.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.activation import activation_spec
from moe_ops.dispatch import check_map
from moe_ops.fused_experts import (
    Emit,
    Needs,
    check_expert_weights,
    emits_stages,
    expert_gradients,
    fake,
    fused_experts,
    layer_flops,
    reference as experts_reference,
)
from moe_ops.routing import (
    check_router,
    reference as routing_reference,
    routing_gradient,
    routing_spec,
    topk_routing,
)
from moe_ops.types import Activation, RoutingConfig


def fused_moe(
    hidden_states: Tensor,
    router_logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    routing: RoutingConfig,
    activation: str | Activation = "silu",
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    shared: Tensor | None = None,
    emit: Emit = "auto",
) -> Tensor:
    """Routes each token, runs its experts and sums them: `topk_routing`, then `fused_experts`.

    Args:
        hidden_states: [T, H]. router_logits: [T, E], any floating dtype (E_global with an expert_map).
        routing: see `RoutingConfig`. correction_bias: [E], see `topk_routing`.
        The others as in `fused_experts`.

    Returns:
        [T, H], dtype of hidden_states.

    Raises:
        ValueError, TypeError: as `topk_routing` and `fused_experts` do.

    Example:
        >>> out = moe_ops.fused_moe(hidden_states, logits, w13, w2, moe_ops.RoutingConfig(top_k=2))
    """
    if emits_stages(emit) or shared is not None:
        _check_logits(hidden_states, router_logits, w13, expert_map)
        topk_weights, topk_ids = topk_routing(router_logits, routing, correction_bias)
        return fused_experts(
            hidden_states, w13, w2, topk_weights, topk_ids, activation,
            w13_bias=w13_bias, w2_bias=w2_bias, expert_map=expert_map, shared=shared, emit=emit,
        )  # fmt: skip
    hidden_states, w13, w2, w13_bias, w2_bias = _library.autocast(hidden_states, w13, w2, w13_bias, w2_bias)
    specs = routing_spec(routing), activation_spec(activation)
    return _library.call(
        "fused_moe",
        hidden_states,
        router_logits,
        w13,
        w2,
        w13_bias,
        w2_bias,
        correction_bias,
        expert_map,
        *specs,
    )


def _check_logits(
    hidden_states: Tensor, router_logits: Tensor, w13: Tensor, expert_map: Tensor | None
) -> None:
    _checks.expect_shape("hidden_states", hidden_states, ("T", "H"))
    num_experts = w13.shape[0] if expert_map is None else expert_map.shape[0]
    _checks.expect_shape("router_logits", router_logits, (hidden_states.shape[0], num_experts))


def _check(*args: Any) -> None:
    hidden_states, logits, w13, w2, w13_bias, w2_bias, correction_bias, expert_map, routing, activation = args
    check_expert_weights(hidden_states, w13, w2, w13_bias, w2_bias, activation)
    check_router(logits, correction_bias, routing)
    check_map(expert_map, w13.shape[0])
    _check_logits(hidden_states, logits, w13, expert_map)
    _checks.expect_same_device(
        hidden_states.device, "hidden_states", router_logits=logits, expert_map=expert_map
    )


def _reference(*args: Any) -> Tensor:
    hidden_states, logits, w13, w2, w13_bias, w2_bias, correction_bias, expert_map, routing, activation = args
    weights, ids = routing_reference(logits, correction_bias, routing)
    return experts_reference(
        hidden_states, w13, w2, weights, ids, w13_bias, w2_bias, expert_map, None, activation
    )


def _cuda(hidden_states: Tensor, *args: Any) -> Tensor:
    if hidden_states.shape[0] == 0:
        return hidden_states.new_empty(hidden_states.shape)
    from moe_ops.kernels import fused as kernels

    launch: Any = kernels.fused_moe
    *tensors, routing, activation = args
    return launch(hidden_states, *tensors, RoutingConfig.from_spec(routing), Activation.from_spec(activation))


_library.define(
    "fused_moe(Tensor hidden_states, Tensor router_logits, Tensor w13, Tensor w2, Tensor? w13_bias, "
    "Tensor? w2_bias, Tensor? correction_bias, Tensor? expert_map, str routing, str activation) -> Tensor",
    check=_check,
    cpu=_reference,
    cuda=_cuda,
    fake=fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    (
        hidden_states,
        logits,
        w13,
        w2,
        w13_bias,
        w2_bias,
        correction_bias,
        expert_map,
        ctx.routing,
        ctx.activation,
    ) = inputs
    weights, ids, *plan = _library.operator("routing_dispatch")(
        logits, correction_bias, expert_map, w13.shape[0], ctx.routing
    )
    ctx.save_for_backward(
        logits, correction_bias, ids, hidden_states, w13, w2, weights, w13_bias, w2_bias, *plan
    )


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    logits, correction_bias, ids, *saved = ctx.saved_tensors
    if torch.is_grad_enabled():  # For second derivatives the weights must depend on the logits again.
        saved[3], _ = _library.call("topk_routing", logits, correction_bias, ctx.routing)
    to_hidden, to_logits, to_w13, to_w2, to_b13, to_b2, *_ = ctx.needs_input_grad
    needs = Needs(to_hidden, to_w13, to_w2, to_logits, to_b13, to_b2)
    to_hidden, to_w13, to_w2, to_weights, to_b13, to_b2 = expert_gradients(
        grad, tuple(saved), ctx.activation, needs
    )
    to_logits = (
        routing_gradient(to_weights, logits, saved[3], ids, ctx.routing) if needs.topk_weights else None
    )
    return to_hidden, to_logits, to_w13, to_w2, to_b13, to_b2, None, None, None, None


def _stages(*args: Any) -> Tensor:
    hidden_states, logits, w13, w2, w13_bias, w2_bias, correction_bias, expert_map, routing, activation = args
    topk_weights, topk_ids = topk_routing(logits, RoutingConfig.from_spec(routing), correction_bias)
    return fused_experts(
        hidden_states, w13, w2, topk_weights, topk_ids, activation,
        w13_bias=w13_bias, w2_bias=w2_bias, expert_map=expert_map, emit="stages",
    )  # fmt: skip


_autograd.define_gradient("fused_moe", _setup_context, _backward, _autograd.tangent_of(_stages))


def _flops(hidden_states: Any, logits: Any, w13: Any, w2: Any, *args: Any) -> int:
    return layer_flops(logits[0] * RoutingConfig.from_spec(args[-2]).top_k, w13, w2)


_library.define_flops("fused_moe", _flops)
_library.define_vmap("fused_moe", token_args=("hidden_states", "router_logits"))
