"""FuseResidual: what is added to a layer's output joins the sum over its experts, on CUDA.

out = combine(expert_out, topk_weights, inverse, None) [* number] + sigmoid(gate) * shared + residual
->
out = combine(expert_out, topk_weights [* number], inverse, shared, gate, residual)

A residual and the output of a shared expert, gated or not, that lie in memory before the layer ends: the sum is not
written and read again, and one launch goes. What a pointwise kernel would have to write first stays where it is, in one
kernel with the addition and what follows. On a CPU the sum over experts is part of such a kernel itself.

In a training graph too: what the addition alone reads, no backward does.
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
from inductor_passes.raising.views_of_rows import changes_dtype, is_reshape, is_view, operand
from inductor_passes.raising.writing import erase_unread
from inductor_passes.sizes import same_shape
from moe_ops.arguments import Router, TopkRouting
from moe_ops.types import RoutingConfig
from moe_ops.values import Epilogue

aten = torch.ops.aten
_Addend = tuple[Node, Node | None]
"""What is added, and the logit of the gate it is multiplied by."""


class FuseResidual:
    """combine -> add becomes combine with `shared`, `shared_gate` and `residual`, on devices of one type.

    A quantised layer is one operator, of which the sum is a part.
    """

    name = "fuse_residual"
    requires: tuple[str, ...] = ("combine", "act_gemm_combine", "scaled_fused_experts")
    inference_only = False

    def __init__(self, device: str = "cuda") -> None:
        self.device = device

    def run(self, graph: Graph, log: PassLog) -> None:
        """Fuses at every sum over experts that takes in something gated, or is added to something."""
        sums = [node for node in find(graph, *self.requires) if node.meta["val"].device.type == self.device]
        rewrite_each(graph, sums, _rewrite, log)


def _rewrite(graph: Graph, total: Node, log: PassLog) -> None:
    joined: Node | None = _with_gate(graph, total, log)
    while joined is not None:
        joined = _with_addend(graph, joined, log)


def _with_gate(graph: Graph, total: Node, log: PassLog) -> Node:
    """The sum, which multiplies what it takes in by a gate itself, if a kernel before it did."""
    args = arguments(total)
    addend = None if args.epilogue.shared_gate is not None else _gated(args.shared, total)
    if addend is None:
        return total
    with graph.inserting_before(total):
        fused = _joined(graph, args._replace(shared=None), addend, total)
    log.fuse("combine with gated output", total, (args.shared, total))
    total.replace_all_uses_with(fused)
    erase_unread(graph, total)
    return fused


def _with_addend(graph: Graph, total: Node, log: PassLog) -> Node | None:
    """The sum with what is added to it; None if nothing is."""
    shown, scale = _shown(total)
    add = next((user for user in shown.users if user.target is aten.add.Tensor), None)
    is_end = arguments(total).shared is not None and len(shown.users) > 1  # the next layers read it too
    if add is None or is_end:
        return None
    expect_only_user(shown, add, "the sum over experts")
    addend = _addend(total, shown, add)
    with graph.inserting_before(add):
        weights = arguments(total).topk_weights
        if scale != 1:
            weights = _scaled(graph, weights, scale, total)
        args = arguments(total)._replace(topk_weights=weights)  # its ids may be another router's now
        fused = _joined(graph, args, addend, total)
        result = _shown_alike(graph, shown, total, fused)
    log.fuse(
        "combine with residual" if addend[1] is None else "combine with gated output", total, (total, add)
    )
    add.replace_all_uses_with(result)
    erase_unread(graph, add)
    return fused


def _joined(graph: Graph, args: Any, addend: _Addend, like: Node) -> Node:
    """A call of the operator with these arguments and one more addend."""
    hidden_size, gate = like.meta["val"].shape[1], addend[1]
    value = _rows(graph, addend[0], hidden_size, like)
    gate = None if gate is None else _rows(graph, gate, 1, like)
    shared, (held, residual) = args.shared, args.epilogue
    if shared is None:
        joined = value, Epilogue(gate, residual)  # type: ignore[arg-type]  # nodes
    elif gate is None:
        joined = shared, Epilogue(held, value)  # type: ignore[arg-type]
    else:
        joined = value, Epilogue(gate, shared)  # type: ignore[arg-type]
    return call(graph, args._replace(shared=joined[0], epilogue=joined[1]), like=like)


def _rows(graph: Graph, node: Node, columns: int, like: Node) -> Node:
    """`node` as [T, columns]."""
    shape = node.meta["val"].shape
    if len(shape) == 2 and shape[1] == columns:
        return node
    return write_out(graph, lambda value: value.reshape(-1, columns), [node], like)[0]


def _scaled(graph: Graph, weights: Node, scale: float, total: Node) -> Node:
    """`weights * scale`: by the router, where only this layer reads its weights."""
    source = getitem_source(weights)
    if source is None or not is_op(source[0], "topk_routing") or {*weights.users} != {total}:
        return write_out(graph, lambda value: value * scale, [weights], total)[0]
    router: Router = arguments(source[0]).router
    config = RoutingConfig.from_spec(router.routing)
    spec = replace(config, scale=config.scale * scale).spec
    with graph.inserting_before(source[0]):
        scaled = call(graph, TopkRouting(router._replace(routing=spec)), like=source[0])
    for index, old in outputs(source[0]).items():
        old.replace_all_uses_with(pick(graph, scaled, index))
    erase_dead(graph, [source[0]])
    return pick(graph, scaled, 0)


def _shown(total: Node) -> tuple[Node, float]:
    """The last view of the sum before it is read, and what it is multiplied with on the way."""
    shown, scale = total, 1.0
    while len(shown.users) == 1:
        (user,) = shown.users
        if user.target is aten.mul.Tensor and isinstance(user.args[1], int | float):
            scale *= user.args[1]
        elif not is_view(user):
            break
        shown = user
    return shown, scale


def _shown_alike(graph: Graph, shown: Node, total: Node, fused: Node) -> Node:
    """`fused` through the views that lead from `total` to `shown`."""
    if shown is total:
        return fused
    source: Any = shown.args[0]
    seen = _shown_alike(graph, source, total, fused)
    if shown.target is aten.mul.Tensor:
        return seen
    return graph.node_copy(shown, lambda node: seen if node is source else node)


def _addend(total: Node, shown: Node, add: Node) -> _Addend:
    """What is added to the sum. Raises Refusal where the sum cannot take it."""
    residual, args = operand(add, shown), arguments(total)
    if residual is None:
        raise Refusal(add, f"{describe(add)} multiplies what it adds, or adds a number")
    gated = _gated(residual, add)
    addend = (residual, None) if gated is None else gated
    _expect_room(args, addend, _shown(total)[1], add)
    for term in (shown, residual):
        expect_same_value(term, add)
    is_static = all(isinstance(size, int) for size in add.meta["val"].shape)
    if is_op(total, "combine") and args.shared is None and not is_static:
        raise Refusal(add, "with a symbolic number of tokens the router would be a call of its own")
    if gated is None and not _is_in_memory(residual, add):
        raise Refusal(add, f"{describe(residual)} is computed in one kernel with the addition")
    return addend


def _expect_room(args: Any, addend: _Addend, scale: float, add: Node) -> None:
    """Refuses where the sum has no place for what is added, or what it has would need the scale as well."""
    held = [each for each in (args.shared, args.epilogue.residual) if each is not None]
    gates = [each for each in (args.epilogue.shared_gate, addend[1]) if each is not None]
    if len(held) > 1 or len(gates) > 1 or (held and scale != 1):
        raise Refusal(add, f"the sum over experts already adds {' and '.join(map(describe, held))}")


def _gated(product: Any, reader: Node) -> _Addend | None:
    """`sigmoid(gate) * value` that `reader` alone reads as value and gate, where both lie in memory."""
    if product is None:
        return None
    while is_view(product) and {*product.users} == {reader}:
        product, reader = product.args[0], product
    if product.target is not aten.mul.Tensor or {*product.users} != {reader}:
        return None
    for value, factor in (product.args, product.args[::-1]):
        if isinstance(value, Node) and isinstance(factor, Node) and _is_column_of(factor, value):
            gate = _logit(factor)
            return (value, gate) if gate is not None and _is_in_memory(value, product) else None
    return None


def _is_column_of(factor: Node, value: Node) -> bool:
    """Whether `factor` is one number for each row of `value`."""
    column, rows = factor.meta["val"], value.meta["val"]
    return column.dtype == rows.dtype and same_shape(column.shape, (*rows.shape[:-1], 1))


def _logit(factor: Any) -> Node | None:
    """What lies in memory and `factor` is the sigmoid of."""
    while is_view(factor):
        factor = factor.args[0]
    if factor.target is not aten.sigmoid.default or not _is_in_memory(factor.args[0], factor):
        return None
    return factor.args[0]


def _is_in_memory(node: Node, reader: Node) -> bool:
    """Whether `node` is written for somebody else than `reader`, or by a kernel that takes no additions."""
    while is_reshape(node) and {*node.users} == {reader}:
        node, reader = node.args[0], node  # type: ignore[assignment]
    target = node.target
    is_pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return {*node.users} != {reader} or not (is_pointwise or changes_dtype(node))
