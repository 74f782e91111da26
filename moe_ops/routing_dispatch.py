"""routing_dispatch: topk_routing, then build_dispatch, in one operator.

The fusion target of the router and the counting sort that follows it; on CUDA it saves launches at decode. Outputs,
gradient and rules are those of the two stages. Static output shapes, no host sync.
"""

from typing import Any

from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import BuildDispatch, Placement, Router, RoutingDispatch
from moe_ops.dispatch import check_placement, fake as dispatch_fake, reference as dispatch_reference
from moe_ops.records import partial
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
    _checks.expect_shape("router_logits", router_logits, ("T", "E_global"))
    num_experts = router_logits.shape[1] if num_experts is None else num_experts
    _checks.expect_int("num_experts", num_experts)
    router = Router(router_logits, correction_bias, routing_spec(routing))
    weights, ids, *plan = _library.call(RoutingDispatch(router, Placement(expert_map), num_experts))
    return weights, ids, DispatchPlan(*plan)


def _check(args: RoutingDispatch) -> None:
    check_router(args.router)
    check_placement(args.placement, args.num_experts)
    check_map(args.placement, args.router)


def check_map(placement: Placement, router: Router) -> None:
    """Checks an expert map against the logits [T, E_global]."""
    if placement.expert_map is not None:
        logits = router.router_logits
        _checks.expect_shape("expert_map", placement.expert_map, (logits.shape[1],))
        _checks.expect_same_device(logits.device, "router_logits", expert_map=placement.expert_map)


def _reference(args: RoutingDispatch) -> tuple[Tensor, ...]:
    weights, ids = routing_reference(args.router)
    return weights, ids, *dispatch_reference(BuildDispatch(ids, args.placement, args.num_experts))


def _cuda(args: RoutingDispatch) -> tuple[Tensor, ...]:
    if args.router.router_logits.shape[0] == 0:
        outputs = _fake(args)
        outputs[-1].zero_()
        return outputs
    return _library.launch(args)


def _fake(args: RoutingDispatch) -> tuple[Tensor, ...]:
    weights, ids = routing_fake(args.router)
    return weights, ids, *dispatch_fake(BuildDispatch(ids, args.placement, args.num_experts))


_library.define(
    RoutingDispatch,
    "(Tensor topk_weights, Tensor topk_ids, Tensor sorted_slots, Tensor inverse, Tensor expert_offsets)",
    check=_check,
    cpu=_reference,
    cuda=_cuda,
    fake=_fake,
)


def _save(args: RoutingDispatch, output: tuple[Tensor, ...]) -> Any:
    return args.router.router_logits, *output[:2], args.router.routing


def _backward(saved: Any, needs: RoutingDispatch, grad_weights: Tensor, *_: Tensor | None) -> RoutingDispatch:
    to_router = partial(Router, router_logits=routing_gradient(grad_weights, *saved))
    return partial(RoutingDispatch, router=to_router)


def _tangent(args: RoutingDispatch, tangents: RoutingDispatch) -> _autograd.Tangents:
    weights, ids, *plan = _library.run(args)
    to_weights = routing_tangent(args.router, tangents.router.router_logits, (weights, ids))
    return to_weights, *(None for _ in (ids, *plan))


_autograd.define_gradient(RoutingDispatch, _save, _backward, _tangent)
_library.define_vmap(RoutingDispatch)
