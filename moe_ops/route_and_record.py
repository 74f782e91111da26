"""route_and_record: topk_routing, then map_and_record, in one operator.

What a layer runs whose router is followed by replicas: on CUDA a router's kernel maps its choices and counts them while
it has them in registers, in place of a launch of its own. Outputs, gradient and rules are those of the two. Static
output shapes, no host sync; `load` is changed in place.
"""

from typing import Any

from torch import Tensor

from moe_ops import _autograd, _library
from moe_ops.arguments import (
    LoadRecord,
    MapAndRecord,
    MapReplicas,
    Replicas,
    RouteAndRecord,
    Router,
    TopkRouting,
)
from moe_ops.placement import check_record, check_replicas, note_change, reference_recorded
from moe_ops.records import partial
from moe_ops.routing import (
    check_router,
    fake as routing_fake,
    reference as routing_reference,
    routing_gradient,
    routing_tangent,
)


def route_and_record(
    router: Router, replicas: Replicas, record: LoadRecord, seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`topk_routing` and `map_replicas` with a load, in one operator.

    Args:
        router: logits [T, E'], correction bias and routing of `topk_routing`.
        replicas: of E experts, as in `map_replicas`; an id of E or more, such as a zero expert's, has none.
        record, seed: as in `map_replicas`.

    Returns:
        topk_weights [T, K] float32 (float64), topk_ids [T, K] int32, logical experts, and [T, K] int32, physical ones.

    Raises:
        ValueError, TypeError: as `topk_routing` and `map_replicas` do.

    Gradient: to the logits; twice differentiable.
    """
    return _library.call(RouteAndRecord(router, replicas, record, seed))


def _check(args: RouteAndRecord) -> None:
    check_router(args.router)
    device = args.router.router_logits.device
    check_replicas(args.replicas, args.seed, device, "router_logits")
    check_record(args.record, device, "router_logits")


def _reference(args: RouteAndRecord) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = routing_reference(args.router)
    choice = MapReplicas(ids, args.replicas, args.seed)
    return weights, ids, reference_recorded(MapAndRecord(choice, args.record))


def _cuda(args: RouteAndRecord) -> tuple[Tensor, Tensor, Tensor]:
    if args.router.router_logits.shape[0] == 0:
        return _fake(args)
    note_change(args.record.load)
    return _library.launch(args)


def _fake(args: RouteAndRecord) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = routing_fake(args.router)
    return weights, ids, ids.new_empty(ids.shape)


_library.define(
    RouteAndRecord,
    "(Tensor topk_weights, Tensor topk_ids, Tensor physical_ids)",
    check=_check,
    cpu=_reference,
    cuda=_cuda,
    fake=_fake,
)


def _save(args: RouteAndRecord, output: tuple[Tensor, ...]) -> Any:
    return args.router.router_logits, *output[:2], args.router.routing


def _backward(saved: Any, needs: RouteAndRecord, grad_weights: Tensor, *_: Tensor | None) -> RouteAndRecord:
    to_router = partial(Router, router_logits=routing_gradient(grad_weights, *saved))
    return partial(RouteAndRecord, router=to_router)


def _tangent(args: RouteAndRecord, tangents: RouteAndRecord) -> _autograd.Tangents:
    outputs = _library.run(TopkRouting(args.router))  # not this operator: it would count once more
    return routing_tangent(args.router, tangents.router.router_logits, outputs), None, None


_autograd.define_gradient(RouteAndRecord, _save, _backward, _tangent)
_library.define_vmap(RouteAndRecord)
