"""fused_moe: a whole MoE layer in one call, from router logits: topk_routing, then fused_experts.

Traced by a compiler it emits the stage operators; eager it is one operator. See `fused_experts`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops._expansion import define_expansions
from moe_ops.arguments import (
    ExpertWeights,
    FusedExperts,
    FusedMoe,
    GroupedLinear,
    Placement,
    Router,
    RoutingDispatch,
    TopkRouting,
)
from moe_ops.dispatch import check_placement
from moe_ops.fused_experts import (
    Emit,
    check_experts,
    emits_stages,
    expert_gradients,
    fake,
    gate_given,
    layer_flops,
    reference as experts_reference,
    run as run_experts,
    run_custom,
    run_halves,
    run_stages,
)
from moe_ops.gate import Custom, GateFunction
from moe_ops.invariant_arguments import BatchInvariantRouting
from moe_ops.paired import Weight, linear_of
from moe_ops.records import partial
from moe_ops.routing import (
    check_router,
    reference as routing_reference,
    routing_gradient,
    routing_spec,
)
from moe_ops.types import Activation, DispatchPlan, RoutingConfig


def fused_moe(
    hidden_states: Tensor,
    router_logits: Tensor,
    w13: Weight,
    w2: Tensor,
    routing: RoutingConfig,
    activation: str | Activation | GateFunction = "silu",
    *,
    w13_bias: Weight | None = None,
    w2_bias: Tensor | None = None,
    correction_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    shared: Tensor | None = None,
    per_expert: Sequence[Tensor] = (),
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
    router = Router(router_logits, correction_bias, routing_spec(routing))
    experts = ExpertWeights(linear_of("w13", w13, w13_bias), GroupedLinear(w2, w2_bias))
    spec, gate = gate_given(activation, per_expert, experts)
    args = FusedMoe(hidden_states, router, experts, Placement(expert_map), spec)
    return run(args, shared, emit) if gate is None else _run_custom(args, shared, gate, emit)


def _run_custom(args: FusedMoe, shared: Tensor | None, gate: Custom, emit: Emit) -> Tensor:
    return run_custom(_routed(args)._replace(shared=shared), gate, emit)


def run(args: FusedMoe, shared: Tensor | None, emit: Emit) -> Tensor:
    """`fused_moe` of its arguments as one value, and what is added after the routed sum."""
    is_invariant = emit == "batch_invariant"
    if is_invariant or shared is not None:
        check_logits(args)
        routed = _library.call((BatchInvariantRouting if is_invariant else TopkRouting)(args.router))
        return run_experts(args.routed(*routed)._replace(shared=shared), emit)
    if _library.autocasts(args.hidden_states):
        hidden_states, experts = _library.autocast((args.hidden_states, args.experts))
        args = args._replace(hidden_states=hidden_states, experts=experts)
    return _in_parts(args, emit) if emits_stages(emit) else _library.call(args)


def check_logits(args: Any) -> None:
    """Checks router logits against tokens and experts."""
    x, expert_map = args.hidden_states, args.placement.expert_map
    _checks.expect_shape("hidden_states", x, ("T", "H"))
    if expert_map is None:
        expert_of_logit = args.experts.w13.weight
        _checks.expect_shape("w13", expert_of_logit, ("E", "2I", "H"))
    else:
        expert_of_logit = expert_map
        _checks.expect_shape("expert_map", expert_map, ("E_global",))
    _checks.expect_shape("router_logits", args.router.router_logits, (x.shape[0], expert_of_logit.shape[0]))


def _check(args: FusedMoe) -> None:
    check_experts(args.hidden_states, args.experts, Activation.from_spec(args.activation))
    check_placed_router(args)


def check_placed_router(args: Any) -> None:
    """The checks of a layer's router and of where its experts are."""
    x, placement = args.hidden_states, args.placement
    check_router(args.router)
    check_placement(placement, args.experts.w13.weight.shape[0])
    check_logits(args)
    tensors = {"router_logits": args.router.router_logits, **placement._asdict()}
    _checks.expect_same_device(x.device, "hidden_states", **tensors)


def _reference(args: FusedMoe) -> Tensor:
    return experts_reference(args.routed(*routing_reference(args.router)))


def _cuda(args: FusedMoe) -> Tensor:
    return fake(args) if args.hidden_states.shape[0] == 0 else _library.launch(args)


_library.define(FusedMoe, "Tensor", check=_check, cpu=_reference, cuda=_cuda, fake=fake)


def _save(args: FusedMoe, output: Tensor) -> Any:
    num_experts = args.experts.w13.weight.shape[0]
    weights, ids, *plan = _library.run(RoutingDispatch(args.router, args.placement, num_experts))
    experts_args = args.routed(weights, ids)._replace(placement=Placement())
    return args.router, experts_args, DispatchPlan(*plan)


def _backward(saved: Any, needs: FusedMoe, grad: Tensor) -> FusedMoe:
    router, args, plan = saved
    if torch.is_grad_enabled():  # For second derivatives the weights must depend on the logits again.
        args = args._replace(topk_weights=_library.call(TopkRouting(router))[0])
    wanted = partial(
        FusedExperts,
        hidden_states=needs.hidden_states,
        experts=needs.experts,
        topk_weights=needs.router.router_logits,
    )
    grads = expert_gradients(grad, args, plan, wanted)
    to_router = partial(Router)
    if grads.topk_weights is not None:
        weights = grads.topk_weights, router.router_logits, args.topk_weights, args.topk_ids
        to_router = partial(Router, router_logits=routing_gradient(*weights, router.routing))
    return partial(FusedMoe, hidden_states=grads.hidden_states, router=to_router, experts=grads.experts)


def _stages(args: FusedMoe) -> Tensor:
    return run_stages(_routed(args))


def _halves(args: FusedMoe) -> Tensor:
    return run_halves(_routed(args))


def _routed(args: FusedMoe) -> FusedExperts:
    check_logits(args)
    return args.routed(*_library.call(TopkRouting(args.router)))


_autograd.define_gradient(FusedMoe, _save, _backward, _autograd.tangent_of(_stages))
_in_parts = define_expansions(FusedMoe, stages=_stages, halves=_halves)


def _flops(shapes: Any) -> int:
    top_k = RoutingConfig.from_spec(shapes.router.routing).top_k
    return layer_flops(shapes.hidden_states[0] * top_k, shapes.experts)


_library.define_flops(FusedMoe, _flops)
_library.define_vmap_over_tokens(FusedMoe)
