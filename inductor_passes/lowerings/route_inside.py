"""RouteInside: on CUDA, for a few tokens, what stands around experts becomes part of their launches.

A router, that is, and the expert that every token visits. `fused_moe` routes by itself, but a layer to whose sum
something is joined, a shared expert or a residual, is `topk_routing` and `fused_experts`, and its router would be a
launch of its own: two to three microseconds a token. A shared expert would be three or four.
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
from inductor_passes.lowerings.shared_inside import shared_expert
from inductor_passes.raising.writing import erase_unread
from moe_ops import records
from moe_ops.values import SharedExpert

_EXPERTS = ("fused_experts", "fused_experts_formula")
_CHOICE = ("topk_weights", "topk_ids")
_PARTS = (("routing", "routes"), ("shared expert", "joins"))


class RouteInside:
    """topk_routing -> fused_experts, and a shared expert that joins it, for few tokens become launches together."""

    name = "route_inside"
    requires: tuple[str, ...] = _EXPERTS
    inference_only = False

    def run(self, graph: Graph, log: PassLog) -> None:
        """Writes out the launches of every such layer with static sizes."""
        experts = [node for node in find(graph, *_EXPERTS) if on_cuda(node)]
        rewrite_each(graph, experts, _rewrite, log, log.keep)


def _rewrite(graph: Graph, fused: Node, log: PassLog) -> None:
    router, shared = _router_of(fused), shared_expert(fused)
    together = _together(fused, router, shared)
    if together is None:
        return
    named, joined, left = records.named(arguments(fused)), arguments(fused).shared, [fused]
    if together.routes and router is not None:
        named = {name: value for name, value in named.items() if name not in _CHOICE}
        named |= records.named(arguments(router))
        left += [*outputs(router).values(), router]
    if together.joins and shared is not None:
        named = named | shared._asdict() | {"shared": None}
    given = {name: node for name, node in named.items() if isinstance(node, Node)}
    (result,) = write_launches(graph, fused, together.program, given, {})
    inside = " and ".join(each for each, is_there in _PARTS if getattr(together, is_there))
    log.lower(f"{len(together.program.launches)} launches, {inside} inside", fused)
    fused.replace_all_uses_with(result)
    erase_dead(graph, left)
    if together.joins:
        erase_unread(graph, joined)


def _router_of(fused: Node) -> Node | None:
    """The router whose choices are these experts' alone."""
    args: Any = arguments(fused)
    router, first = getitem_source(args.topk_weights) or (None, 0)
    if first != 0 or getitem_source(args.topk_ids) != (router, 1) or not is_op(router, "topk_routing"):
        return None
    readers = {user for out in outputs(router).values() for user in out.users}  # type: ignore[arg-type]
    return router if readers == {fused} else None


def _together(fused: Node, router: Node | None, shared: SharedExpert | None) -> Any:
    """The launches of these together; None for more tokens, or sizes that are not known."""
    if router is None and shared is None:
        return None
    try:
        for node in (fused,) if router is None else (fused, router):
            expect_static(node)
    except Refusal:
        return None  # as LaunchPrograms will say
    try:
        from moe_ops.kernels import plans

        routing = None if router is None else arguments(router).router
        given = arguments(fused), routing, shared
        return plans.decode_together(*(records.transform(metadata, each) for each in given))
    except Exception as error:
        raise Refusal(fused, f"the kernels make no launch plan with what stands around: {error!r}") from error
