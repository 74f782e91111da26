"""RouteInside: on CUDA, for a few tokens, a router and the experts that it chooses become launches of which one routes.

`fused_moe` does that by itself. But a layer to whose sum something is joined, a shared expert or a residual, is
`topk_routing` and `fused_experts`, and its router would be a launch of its own: two to three microseconds a token.
"""

from typing import Any

from torch.fx import Graph, Node

from inductor_passes.base import PassLog, Refusal
from inductor_passes.graph_tools import (
    arguments,
    erase_dead,
    find,
    getitem_source,
    is_op,
    outputs,
    rewrite_each,
)
from inductor_passes.lowerings.programs import expect_static, metadata, on_cuda, write_launches
from moe_ops import records

_CHOICE = ("topk_weights", "topk_ids")


class RouteInside:
    """topk_routing -> fused_experts for few tokens becomes the launches of both together."""

    name = "route_inside"
    requires: tuple[str, ...] = ("topk_routing",)
    inference_only = False

    def run(self, graph: Graph, log: PassLog) -> None:
        """Writes out the launches of every such pair with static sizes."""
        experts = [node for node in find(graph, "fused_experts", "fused_experts_formula") if on_cuda(node)]
        rewrite_each(graph, experts, _rewrite, log, log.keep)


def _rewrite(graph: Graph, fused: Node, log: PassLog) -> None:
    router = _router_of(fused)
    program = None if router is None else _program(fused, router)
    if router is None or program is None:
        return
    named = {**records.named(arguments(fused)), **records.named(arguments(router))}
    given = {name: node for name, node in named.items() if isinstance(node, Node) and name not in _CHOICE}
    (result,) = write_launches(graph, fused, program, given, {})
    log.lower(f"{len(program.launches)} launches, routing inside", fused)
    fused.replace_all_uses_with(result)
    erase_dead(graph, (fused, *outputs(router).values(), router))


def _router_of(fused: Node) -> Node | None:
    """The router whose choices are these experts' alone."""
    args: Any = arguments(fused)
    router, first = getitem_source(args.topk_weights) or (None, 0)
    if first != 0 or getitem_source(args.topk_ids) != (router, 1) or not is_op(router, "topk_routing"):
        return None
    readers = {user for out in outputs(router).values() for user in out.users}  # type: ignore[arg-type]
    return router if readers == {fused} else None


def _program(fused: Node, router: Node) -> Any:
    """The launches of both together; None for more tokens, or sizes that are not known."""
    try:
        for node in (fused, router):
            expect_static(node)
    except Refusal:
        return None  # as LaunchPrograms will say
    try:
        from moe_ops.kernels import plans

        experts, routing = (records.transform(metadata, arguments(node)) for node in (fused, router))
        return plans.decode_program(experts, routing.router)
    except Exception as error:
        raise Refusal(fused, f"the kernels make no launch plan with the router: {error!r}") from error
