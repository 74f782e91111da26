"""Writes a layer that was found as stages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import call, describe, pick, write_out
from inductor_passes.raising.evaluation import Cut, cut
from inductor_passes.raising.gates import recognised
from inductor_passes.raising.layer import Experts, Outcome
from inductor_passes.raising.rowwise import expect_rowwise
from inductor_passes.raising.views_of_rows import readers
from moe_ops import arguments

record: Any = arguments
"""Operators' arguments: of nodes here, which their types do not name."""


def write(graph: Graph, layer: Experts) -> None:
    """Puts the stages in the place of `layer`. Raises Refusal, and leaves the graph alone, where they do not fit."""
    _expect_private(layer)
    root, before = layer.sum.root, set(graph.nodes)
    try:
        with graph.inserting_before(root):
            result = _stages(graph, layer)
    except Refusal:
        for node in reversed([node for node in graph.nodes if node not in before]):
            graph.erase_node(node)
        raise
    root.replace_all_uses_with(result)
    erase_unread(graph, root)


def _expect_private(layer: Experts) -> None:
    """Refuses where anything but the sum reads a product: it would have to be computed twice."""
    inside = {layer.sum.root}
    firsts = {outcome.product.node for outcome in layer.firsts} | {*layer.others}
    for node in cut([layer.sum.root], lambda node: node is layer.tokens.hidden_states).nodes:
        if node in firsts or inside & {*node.all_input_nodes} - {layer.sum.root}:
            inside.add(node)
    for node in inside - {layer.sum.root}:
        for user in readers(node):
            if user not in inside:
                raise Refusal(node, f"{describe(node)} of the experts is also read by {describe(user)}")


def _stages(graph: Graph, layer: Experts) -> Node:
    like = layer.second.product.node
    plan = call(
        graph, record.BuildDispatch(layer.indices.ids, record.Placement(), layer.indices.num_experts), like
    )
    sorted_slots, inverse, offsets = (pick(graph, plan, index) for index in range(3))
    rows = _rows(graph, layer, sorted_slots, like)
    firsts = [_product(graph, rows, offsets, outcome, like) for outcome in layer.firsts]
    activated = _gate(graph, layer, firsts)
    expert_out = _product(graph, activated, offsets, layer.second, like)
    weights = layer.sum.topk_weights
    if layer.tokens.topk_weights is not None:  # rows are weighed before their products, not after
        weights = written(graph, torch.ones_like, (weights,), like)
    combined = call(graph, record.Combine(expert_out, weights, inverse, None), like)
    return _as(graph, combined, layer.sum.root)


def _rows(graph: Graph, layer: Experts, sorted_slots: Node, like: Node) -> Node:
    hidden_states, weights = layer.tokens
    rows = call(graph, record.Permute(hidden_states, sorted_slots), like)
    if weights is None:
        return rows
    return written(graph, _weigh, (rows, weights, sorted_slots), like)


def _weigh(rows: Tensor, topk_weights: Tensor, sorted_slots: Tensor) -> Tensor:
    return (rows * topk_weights.reshape(-1)[sorted_slots].unsqueeze(1)).to(rows.dtype)


def _product(graph: Graph, rows: Node, offsets: Node, outcome: Outcome, like: Node) -> Node:
    weight = outcome.product.weight
    if outcome.product.is_transposed:
        weight = written(graph, lambda stored: stored.transpose(1, 2), (weight,), like)
    return call(graph, record.GroupedGemm(rows, record.GroupedLinear(weight, outcome.bias), offsets), like)


def _gate(graph: Graph, layer: Experts, firsts: Sequence[Node]) -> Node:
    """A stage where the gate is an activation of ours, else the model's own nodes on the new rows."""
    like = layer.second.product.node
    if len(firsts) == 1:
        activation = recognised(layer.gate, layer.firsts[0].node, layer.activated, layer.masks)
        if activation is not None:
            return call(graph, record.GatedActivation(firsts[0], activation.spec), like)
    outcomes = [outcome.node for outcome in layer.firsts]
    if layer.others:
        return written(graph, _of_any_rows(layer.gate, outcomes, layer.activated), firsts, like)
    expect_rowwise(layer.gate, outcomes, layer.masks, layer.firsts[0].product.num_slots)
    shown = [_in_shape_of(graph, new, old) for new, old in zip(firsts, outcomes, strict=True)]
    copies = dict(zip(outcomes, shown, strict=True))
    for node in layer.gate.nodes:
        copies[node] = _copied(graph, node, copies, layer.masks, like)
    activated = copies[layer.activated]
    flat = activated.meta["val"].dim() == 2
    return activated if flat else written(graph, lambda rows: rows.flatten(0, -2), (activated,), like)


def _of_any_rows(gate: Cut, products: Sequence[Node], activated: Node) -> Callable[..., Tensor]:
    """A gate of T rows, each by itself, as a function of any number of rows."""

    def run(*rows: Tensor) -> Tensor:
        known: dict[Node, Any] = dict(zip(products, rows, strict=True))
        for node in gate.nodes:
            given = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*given[0], **given[1])  # type: ignore[operator]
        return known[activated]

    return run


def _copied(
    graph: Graph, node: Node, copies: Mapping[Node, Node], masks: Mapping[Node, bool], like: Node
) -> Node:
    """A node of the gate on the new rows; of a mask whose value is known what it takes."""
    if node.target is torch.ops.aten.where.self and node.args[0] in masks:
        taken: Any = node.args[1 if masks[node.args[0]] else 2]  # type: ignore[index]
        if taken.meta["val"].shape == node.meta["val"].shape:
            return copies.get(taken, taken)
    for mask in masks.keys() & set(node.all_input_nodes):
        raise Refusal(like, f"the gate is none of ours and also reads {describe(mask)}")
    return graph.node_copy(node, lambda each: copies.get(each, each))


def _in_shape_of(graph: Graph, rows: Node, old: Node) -> Node:
    """Rows [S, B] as the model had them: that, or [T, K, B], or [T, K, 1, B]."""
    _, *inner, _ = old.meta["val"].shape
    if not inner:
        return rows
    return written(graph, lambda rows: rows.unflatten(0, (-1, *inner)), (rows,), rows)


def _as(graph: Graph, result: Node, old: Node) -> Node:
    """`result` [T, H] in the dtype of `old`, and with its dimension of size 1, if any."""
    value = old.meta["val"]
    extra = next((dim for dim in (1, 2) if value.dim() == 3 and value.shape[dim] == 1), None)

    def shown(out: Tensor) -> Tensor:
        out = out.to(value.dtype)
        return out if extra is None else out.unsqueeze(extra)

    same = extra is None and result.meta["val"].dtype == value.dtype
    return result if same else written(graph, shown, (result,), old)


def written(graph: Graph, function: Callable[..., Tensor], args: Sequence[Node], like: Node) -> Node:
    """The result of `function(*args)`, written out."""
    return write_out(graph, function, args, like)[0]


def erase_unread(graph: Graph, node: Node) -> None:
    """Erases `node` and what only it read, unless somebody reads it for somebody."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node.op != "call_function" or node._erased or node.is_impure() or readers(node):
            continue
        for each in (*node.users, node):
            pending.extend(each.all_input_nodes)
            graph.erase_node(each)
