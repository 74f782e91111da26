"""FuseRoutingDispatch: the router and the counting sort behind it become one operator.

topk_weights, topk_ids = topk_routing(router_logits, correction_bias, routing)
slots, inverse, offsets = build_dispatch(topk_ids, expert_map, num_experts)
->
topk_weights, topk_ids, slots, inverse, offsets = routing_dispatch(router_logits, correction_bias, ...)
"""

from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import PassLog, Refusal
from inductor_passes.graph_tools import (
    arguments,
    call,
    describe,
    erase_dead,
    find,
    getitem_source,
    is_op,
    outputs,
    pick,
    rewrite_each,
)
from moe_ops.arguments import BuildDispatch, RoutingDispatch


class FuseRoutingDispatch:
    """topk_routing -> build_dispatch becomes routing_dispatch."""

    name = "fuse_routing_dispatch"
    requires: tuple[str, ...] = ("build_dispatch",)
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Fuses every dispatch with the router that feeds it."""
        rewrite_each(graph, find(graph, "build_dispatch"), _rewrite, log)
        _compat.stable_topological_sort(graph)


def _rewrite(graph: Graph, dispatch: Node, log: PassLog) -> None:
    plan: BuildDispatch = arguments(dispatch)
    router = _router_of(plan.topk_ids, dispatch)
    _expect_independent(plan.placement.expert_map, router, dispatch)
    routed = RoutingDispatch(arguments(router).router, plan.placement, plan.num_experts)
    # The weights may be read before the plan is built: the caller sorts the graph once all are done.
    with graph.inserting_before(dispatch):
        fused = call(graph, routed, like=dispatch)
    log.fuse("routing_dispatch", dispatch, (router, dispatch))
    _move_outputs(graph, router, fused, first=0)
    _move_outputs(graph, dispatch, fused, first=2)
    erase_dead(graph, (dispatch, router))


def _router_of(topk_ids: object, dispatch: Node) -> Node:
    source = getitem_source(topk_ids)
    if source is not None and is_op(source[0], "topk_routing") and source[1] == 1:
        return source[0]
    if source is not None and is_op(source[0], "routing_dispatch"):
        raise Refusal(dispatch, "topk_ids come from a router that is already fused with another dispatch")
    raise Refusal(dispatch, f"topk_ids come from {describe(topk_ids)}, not from topk_routing")


def _expect_independent(expert_map: object, router: Node, dispatch: Node) -> None:
    """An expert map computed from the router's own output cannot go into the fused operator."""
    seen, pending = set(), [expert_map] if isinstance(expert_map, Node) else []
    while pending:
        node = pending.pop()
        if node is router:
            raise Refusal(dispatch, "expert_map is computed from the router's output")
        if node not in seen:
            seen.add(node)
            pending.extend(node.all_input_nodes)


def _move_outputs(graph: Graph, old: Node, new: Node, first: int) -> None:
    for index, getitem in outputs(old).items():
        getitem.replace_all_uses_with(pick(graph, new, first + index))
