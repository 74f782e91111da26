"""FuseResidual: what is added to a layer's output joins the sum over its experts, on CUDA.

out = combine(expert_out, topk_weights, inverse, None) [* number] + residual
->
out = combine(expert_out, topk_weights [* number], inverse, residual)

A residual, or the output of a shared expert, that lies in memory before the layer ends: the sum is not written and
read again, and one launch goes. What a pointwise kernel would have to write first (a gated shared expert) stays where
it is, in one kernel with the addition and what follows. On a CPU the sum over experts is part of such a kernel itself.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.base import PassLog, Refusal
from inductor_passes.graph_tools import (
    arguments,
    call,
    describe,
    erase_dead,
    expect_only_user,
    expect_same_value,
    find,
    getitem_source,
    is_op,
    outputs,
    pick,
    rewrite_each,
    write_out,
)
from inductor_passes.raising.views_of_rows import is_cast, is_reshape, is_view, operand
from moe_ops.arguments import Combine, Router, TopkRouting
from moe_ops.types import RoutingConfig

aten = torch.ops.aten


class FuseResidual:
    """combine -> add becomes combine with `shared`, on devices of one type."""

    name = "fuse_residual"
    requires: tuple[str, ...] = ("combine",)
    inference_only = True

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def run(self, graph: Graph, log: PassLog) -> None:
        """Fuses at every combine that is added to something."""
        sums = [node for node in find(graph, "combine") if node.meta["val"].device.type == self.device]
        rewrite_each(graph, sums, _rewrite, log)


def _rewrite(graph: Graph, combine: Node, log: PassLog) -> None:
    shown, scale = _shown(combine)
    add = next((user for user in shown.users if user.target is aten.add.Tensor), None)
    if add is None:
        return
    total: Combine = arguments(combine)
    expect_only_user(shown, add, "the sum over experts")
    residual = _residual(total, shown, add)
    shape = tuple(combine.meta["val"].shape)
    with graph.inserting_before(add):
        flat = _written(graph, lambda value: value.view(shape), residual, add)
        weights = total.topk_weights if scale == 1 else _scaled(graph, total.topk_weights, scale, combine)
        fused = call(graph, total._replace(topk_weights=weights, shared=flat), like=combine)
        result = _written(graph, lambda value: value.view(add.meta["val"].shape), fused, add)
    log.fuse("combine with residual", combine, (combine, add))
    add.replace_all_uses_with(result)
    graph.erase_node(add)
    _erase_back_to(graph, shown, combine)


def _scaled(graph: Graph, weights: Any, scale: float, combine: Node) -> Node:
    """`weights * scale`: by the router, where only this layer reads its weights."""
    source = getitem_source(weights)
    if source is None or not is_op(source[0], "topk_routing") or {*weights.users} != {combine}:
        return _written(graph, lambda value: value * scale, weights, combine)
    router: Router = arguments(source[0]).router
    config = RoutingConfig.from_spec(router.routing)
    spec = replace(config, scale=config.scale * scale).spec
    with graph.inserting_before(source[0]):
        scaled = call(graph, TopkRouting(router._replace(routing=spec)), like=source[0])
    for index, old in outputs(source[0]).items():
        old.replace_all_uses_with(pick(graph, scaled, index))
    erase_dead(graph, [source[0]])
    return pick(graph, scaled, 0)


def _shown(combine: Node) -> tuple[Node, float]:
    """The last view of the sum before it is read, and what it is multiplied with on the way."""
    shown, scale = combine, 1.0
    while len(shown.users) == 1:
        (user,) = shown.users
        if user.target is aten.mul.Tensor and isinstance(user.args[1], int | float):
            scale *= user.args[1]
        elif not is_view(user):
            break
        shown = user
    return shown, scale


def _residual(total: Combine, shown: Node, add: Node) -> Node:
    """What is added to the sum. Raises Refusal where the sum cannot take it."""
    residual = operand(add, shown)
    if residual is None:
        raise Refusal(add, f"{describe(add)} multiplies what it adds, or adds a number")
    if total.shared is not None:
        raise Refusal(add, f"the sum over experts already adds {describe(total.shared)}")
    for term in (shown, residual):
        expect_same_value(term, add)
    if not all(isinstance(size, int) for size in add.meta["val"].shape):
        raise Refusal(add, "with a symbolic number of tokens the router would be a call of its own")
    if not _is_in_memory(residual, add):
        raise Refusal(add, f"{describe(residual)} is computed in one kernel with the addition")
    return residual


def _is_in_memory(node: Node, reader: Node) -> bool:
    """Whether `node` is written for somebody else than `reader`, or by a kernel that takes no additions."""
    while is_reshape(node) and {*node.users} == {reader}:
        node, reader = node.args[0], node  # type: ignore[assignment]
    target = node.target
    is_pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return {*node.users} != {reader} or not (is_pointwise or is_cast(node))


def _written(graph: Graph, function: Any, node: Node, like: Node) -> Node:
    return write_out(graph, function, [node], like)[0]


def _erase_back_to(graph: Graph, node: Node, first: Node) -> None:
    while node is not first:
        (before,) = node.all_input_nodes
        erase_dead(graph, [node])
        node = before
    erase_dead(graph, [first])
