"""routing_dispatch: topk_routing, then build_dispatch, in one operator.

The fusion target of the router and the counting sort that follows it; on CUDA it saves launches at decode. Outputs,
gradient and rules are those of the two stages. Static output shapes, no host sync.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.dispatch import check_map, fake as dispatch_fake, reference as dispatch_reference
from moe_ops.routing import (
    check_router,
    fake as routing_fake,
    reference as routing_reference,
    routing_gradient,
    routing_spec,
    routing_tangent,
)
from moe_ops.types import DispatchPlan, RoutingConfig


def routing_dispatch(
    router_logits: Tensor,
    routing: RoutingConfig,
    num_experts: int | None = None,
    correction_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, DispatchPlan]:
    """`topk_routing` and `build_dispatch` in one operator.

    Args:
        router_logits: [T, E_global], any floating dtype.
        routing: the formula, see `RoutingConfig`.
        num_experts: E, the experts held here; default: all E_global.
        correction_bias: [E_global], selection only.
        expert_map: [E_global] int32, global to local ids, see `build_dispatch`.

    Returns:
        topk_weights [T, K] float32 (float64), topk_ids [T, K] int32 (global ids), and the DispatchPlan.

    Raises:
        ValueError, TypeError: as `topk_routing` and `build_dispatch` do.

    Example:
        >>> weights, ids, plan = moe_ops.routing_dispatch(logits, moe_ops.RoutingConfig(top_k=2))
    """
    num_experts = router_logits.shape[-1] if num_experts is None else num_experts
    weights, ids, *plan = _library.call(
        "routing_dispatch", router_logits, correction_bias, expert_map, num_experts, routing_spec(routing)
    )
    return weights, ids, DispatchPlan(*plan)


def _check(
    router_logits: Tensor,
    correction_bias: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    routing: str,
) -> None:
    check_router(router_logits, correction_bias, routing)
    check_map(expert_map, num_experts)
    if expert_map is not None:
        _checks.expect_shape("expert_map", expert_map, (router_logits.shape[1],))
        _checks.expect_same_device(router_logits.device, "router_logits", expert_map=expert_map)


def _reference(
    router_logits: Tensor,
    correction_bias: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    routing: str,
) -> tuple[Tensor, ...]:
    weights, ids = routing_reference(router_logits, correction_bias, routing)
    return weights, ids, *dispatch_reference(ids, expert_map, num_experts)


def _cuda(
    router_logits: Tensor,
    correction_bias: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    routing: str,
) -> tuple[Tensor, ...]:
    if router_logits.shape[0] == 0:
        outputs = _fake(router_logits, correction_bias, expert_map, num_experts, routing)
        outputs[-1].zero_()
        return outputs
    from moe_ops.kernels import fused as kernels

    config = RoutingConfig.from_spec(routing)
    return kernels.routing_dispatch(router_logits, correction_bias, expert_map, num_experts, config)


def _fake(
    router_logits: Tensor,
    correction_bias: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    routing: str,
) -> tuple[Tensor, ...]:
    weights, ids = routing_fake(router_logits, correction_bias, routing)
    return weights, ids, *dispatch_fake(ids, expert_map, num_experts)


_library.define(
    "routing_dispatch(Tensor router_logits, Tensor? correction_bias, Tensor? expert_map, int num_experts, "
    "str routing) -> (Tensor topk_weights, Tensor topk_ids, Tensor sorted_slots, Tensor inverse, "
    "Tensor expert_offsets)",
    check=_check,
    cpu=_reference,
    cuda=_cuda,
    fake=_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.routing = inputs[-1]
    ctx.save_for_backward(inputs[0], *output[:2])


def _backward(ctx: Any, grad_weights: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, topk_weights, topk_ids = ctx.saved_tensors
    to_logits = routing_gradient(grad_weights, logits, topk_weights, topk_ids, ctx.routing)
    return to_logits, None, None, None, None


def _tangent(inputs: Sequence[Any], tangents: Sequence[Any]) -> _autograd.Tangents:
    weights, ids, *plan = _library.operator("routing_dispatch")(*inputs)
    to_weights = routing_tangent(inputs[0], tangents[0], (weights, ids), inputs[-1])
    return to_weights, *(None for _ in (ids, *plan))


_autograd.define_gradient("routing_dispatch", _setup_context, _backward, _tangent)
_library.define_vmap("routing_dispatch")
