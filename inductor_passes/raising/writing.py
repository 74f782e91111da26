"""Writes a layer that was found as stages."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes import _compat
from inductor_passes.base import Refusal
from inductor_passes.graph_tools import call, describe, pick, write_out
from inductor_passes.raising.evaluation import Cut, cut, is_size
from inductor_passes.raising.gates import (
    are_columns,
    fill,
    in_dimensions,
    num_rows,
    recognised,
    shapes_of_rows,
    shows_rows,
)
from inductor_passes.raising.layer import Experts, Outcome, as_they_are, scaled
from inductor_passes.raising.rowwise import expect_rowwise
from inductor_passes.raising.stacks import Stack
from inductor_passes.raising.views_of_rows import aten, is_one, is_read, is_view, rank, readers, same_shape
from moe_ops import arguments

record: Any = arguments
"""Operators' arguments: of nodes here, which their types do not name."""


def write(graph: Graph, layer: Experts) -> None:
    """Puts the stages in the place of `layer`. Raises Refusal, and leaves the graph alone, where they do not fit."""
    root = layer.sum.root
    try:
        with or_as_it_was(graph), graph.inserting_before(root):
            _expect_private(layer)
            result = _stages(graph, layer)
    except Refusal:
        for node in (layer.indices.ids, layer.sum.topk_weights):
            erase_unread(graph, node)  # where they were written for the layer
        raise
    root.replace_all_uses_with(result)
    erase_unread(graph, root)


@contextmanager
def or_as_it_was(graph: Graph) -> Iterator[None]:
    """Where a Refusal is raised inside, what was written is erased."""
    before = set(graph.nodes)
    try:
        yield
    except Refusal:
        for node in reversed([node for node in graph.nodes if node not in before]):
            graph.erase_node(node)
        raise


def _expect_private(layer: Experts) -> None:
    """Refuses where anything but the sum reads a product: it would have to be computed twice."""
    inside = {layer.sum.root}
    firsts = {outcome.product.node for outcome in layer.parts.firsts} | {*layer.others}
    outside = (layer.parts.tokens.hidden_states, layer.sum.into)
    for node in cut([layer.sum.root], lambda node: node in outside).nodes:
        if node in firsts or inside & {*node.all_input_nodes} - {layer.sum.root}:
            inside.add(node)
    for node in inside - {layer.sum.root}:
        for user in readers(node):
            if user not in inside:
                raise Refusal(node, f"{describe(node)} of the experts is also read by {describe(user)}")


def _stages(graph: Graph, layer: Experts) -> Node:
    like = layer.parts.second.product.node
    ids = _own(graph, _flat(graph, layer.indices.ids, like), layer.indices.start)
    plan = call(graph, record.BuildDispatch(ids, record.Placement(), layer.indices.num_experts), like)
    sorted_slots, inverse, offsets = (pick(graph, plan, index) for index in range(3))
    weights = _flat(graph, layer.sum.topk_weights, like)
    if layer.sum.score is not as_they_are:
        weights = written(graph, layer.sum.score, (weights, ids), like)
    if layer.sum.scales is not None:
        weights = written(graph, scaled, (weights, ids, layer.sum.scales), like)
    rows = _rows(graph, layer, weights, sorted_slots, like)
    activated = _activated(graph, layer, rows, offsets)
    dtype = layer.parts.second.product.rows.meta["val"].dtype
    if activated.meta["val"].dtype != dtype:  # where a model rounds what it has weighed
        activated = written(graph, lambda rows: rows.to(dtype), (activated,), like)
    expert_out = _product(graph, activated, offsets, (layer.parts.second,), like)
    if layer.parts.tokens.topk_weights is not None:  # rows are weighed before their products, not after
        weights = written(graph, torch.ones_like, (weights,), like)
    combined = _as(graph, call(graph, record.Combine(expert_out, weights, inverse, None), like), layer)
    if layer.sum.into is None:
        return combined
    return written(graph, torch.add, (layer.sum.into, combined), layer.sum.root)


def _own(graph: Graph, ids: Node, start: int) -> Node:
    """Ids that count from the first expert of the layer: those below are below zero."""
    return written(graph, lambda ids: ids - start, (ids,), ids) if start else ids


def _flat(graph: Graph, node: Node, like: Node) -> Node:
    """[T, F], also where a model has [B, S, F]."""
    is_flat = node.meta["val"].dim() == 2
    return node if is_flat else written(graph, lambda rows: rows.flatten(0, -2), (node,), like)


def _rows(graph: Graph, layer: Experts, weights: Node, sorted_slots: Node, like: Node) -> Node:
    hidden_states, weighed = layer.parts.tokens
    tokens, dtype = _flat(graph, hidden_states, like), layer.parts.firsts[0].product.rows.meta["val"].dtype
    if weighed is not None and layer.indices.top_k == 1:  # then they are gathered as other tokens are
        tokens = written(graph, torch.mul, (tokens, weights), like)
    elif weighed is not None:
        rows = call(graph, record.Permute(tokens, sorted_slots), like)
        return written(graph, _weigh(dtype), (rows, weights, sorted_slots), like)
    if tokens.meta["val"].dtype != dtype:
        tokens = written(graph, lambda tokens: tokens.to(dtype), (tokens,), like)
    return call(graph, record.Permute(tokens, sorted_slots), like)


def _weigh(dtype: torch.dtype) -> Callable[..., Tensor]:
    """What weighs rows, and rounds them as a model does for its product."""

    def run(rows: Tensor, topk_weights: Tensor, sorted_slots: Tensor) -> Tensor:
        scale = torch.ops.aten.index.Tensor(topk_weights.reshape(-1), [sorted_slots])
        return (rows * scale.unsqueeze(1)).to(dtype)

    return run


def _product(graph: Graph, rows: Node, offsets: Node, outcomes: Sequence[Outcome], like: Node) -> Node:
    """One product, of one weight or of a pair."""
    stacks = (stack for outcome in outcomes for stack in (outcome.product.weight, outcome.bias))
    leaves = [stack and _shown(graph, stack, like) for stack in stacks]
    return call(graph, record.GroupedGemm(rows, record.PairedLinear(*leaves), offsets), like)


def _shown(graph: Graph, stack: Stack, like: Node) -> Node:
    def shown(stored: Tensor) -> Tensor:
        return stack.shown(stored)

    return written(graph, shown, (stack.source,), like) if stack.steps else stack.source


def _activated(graph: Graph, layer: Experts, rows: Node, offsets: Node) -> Node:
    """The first products, in one where they can be, and the gate: a stage where it is an activation of ours."""
    like, firsts = layer.parts.second.product.node, _biased_alike(layer.parts.firsts)
    if not _are_one(firsts):
        apart = [_product(graph, rows, offsets, (each,), like) for each in layer.parts.firsts]
        return _gate(graph, layer, apart)
    for order in dict.fromkeys((firsts, firsts[::-1])):
        nodes = [outcome.node for outcome in order]
        activation = recognised(layer.parts.gate, nodes, layer.parts.activated, layer.parts.masks)
        if activation is not None:
            gate_up = _product(graph, rows, offsets, order, like)
            return call(graph, record.GatedActivation(gate_up, activation.spec), like)
    gate_up = _product(graph, rows, offsets, firsts, like)
    parts = write_out(graph, lambda both: both.chunk(2, dim=1), (gate_up,), like) if firsts[1:] else [gate_up]
    return _gate(graph, layer, parts)


def _biased_alike(firsts: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Gate and up with a bias each, zeros perhaps, where one has some."""
    biases = [each.bias for each in firsts if each.bias is not None]
    if len(firsts) != 2 or len(biases) != 1:
        return firsts
    (bias,) = biases
    zeros = Stack(bias.source, (*bias.steps, (torch.zeros_like, ())))
    return tuple(each._replace(bias=each.bias or zeros) for each in firsts)


def _are_one(firsts: Sequence[Outcome]) -> bool:
    """Whether one product can be made of them: there is one, or gate and up whose weights lie alike."""
    if len(firsts) != 2:
        return len(firsts) == 1
    gate, up = firsts
    if gate.bias is None or up.bias is None:
        return _lie_alike(gate.product.weight, up.product.weight)  # neither has one
    return _lie_alike(gate.product.weight, up.product.weight) and _lie_alike(gate.bias, up.bias)


def _lie_alike(one: Stack, other: Stack) -> bool:
    ours, theirs = one.value, other.value
    if (one.is_turned, ours.dtype, ours.device) != (other.is_turned, theirs.dtype, theirs.device):
        return False
    sizes = zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()), strict=True)
    return all(_compat.statically_known_true(a == b) for a, b in sizes)


def _gate(graph: Graph, layer: Experts, products: Sequence[Node]) -> Node:
    """The model's own nodes on the new rows."""
    like = layer.parts.second.product.node
    outcomes = [outcome.node for outcome in layer.parts.firsts]
    shaping = next(filter(_names_a_shape, layer.parts.gate.nodes), None)
    sees_all = layer.parts.firsts[0].product.kind == "looped"
    if sees_all and shaping is not None:
        raise Refusal(shaping, f"the gate of an expert names its shape: {describe(shaping)}")
    if sees_all or (layer.indices.ids.meta["val"].dim() > 2 and not shaping and not layer.parts.masks):
        return _of_any_rows(graph, layer, products)
    expect_rowwise(layer.parts.gate, outcomes, layer.parts.masks, layer.parts.firsts[0].product.num_slots)
    shown = map(partial(_as_given, graph, layer.indices.ids), products, outcomes)
    copies = dict(zip(outcomes, shown, strict=True))
    for node in layer.parts.gate.nodes:
        copies[node] = _copied(graph, node, copies, layer.parts.masks, like)
    activated = copies[layer.parts.activated]
    if are_columns(activated.meta["val"]):
        return written(graph, lambda columns: columns.squeeze(-1), (activated,), like)
    return _flat(graph, activated, like)


def _of_any_rows(graph: Graph, layer: Experts, products: Sequence[Node]) -> Node:
    """The gate on the new rows, of the same operators: derivatives of what those are made of overflow."""
    outcomes = [outcome.node for outcome in layer.parts.firsts]
    gate = of_any_rows(layer.parts.gate, outcomes, layer.parts.activated)
    operators = {node.target for node in layer.parts.gate.nodes}
    return write_out(graph, gate, products, layer.parts.second.product.node, kept=operators)[0]


def _as_given(graph: Graph, ids: Node, rows: Node, outcome: Node) -> Node:
    """`rows` [N, F] as a gate has what a product gives."""
    value = outcome.meta["val"]
    if are_columns(value):
        return written(graph, lambda rows: rows.unsqueeze(-1), (rows,), rows)
    return in_shape(graph, rows, value.shape[:-1], ids)


def _names_a_shape(node: Node) -> bool:
    """Whether a node of a gate is right for so many rows only: `of_any_rows` fills and shows any number."""
    is_of_any = node.target is aten.full.default or shows_rows(node)
    return not is_of_any and (is_view(node) or any(map(is_size, node.all_input_nodes)))


def of_any_rows(gate: Cut, products: Sequence[Node], activated: Node) -> Callable[..., Tensor]:
    """A gate of T rows, each by itself, as a function of any number of rows."""
    shapes = shapes_of_rows(gate, num_rows(products[0].meta["val"]))

    def run(*rows: Tensor) -> Tensor:
        known: dict[Node, Any] = {
            node: in_dimensions(row, node.meta["val"]) for node, row in zip(products, rows, strict=True)
        }
        for node in gate.nodes:
            if node.target is aten.full.default:
                known[node] = fill(node, node.meta["val"].dtype, rows[0].device)
                continue
            if node in shapes:
                known[node] = known[node.all_input_nodes[0]].reshape(rows[0].shape[0], *shapes[node])
                continue
            given = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*given[0], **given[1])  # type: ignore[operator]
        return known[activated].reshape(rows[0].shape[0], -1)

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


def in_shape(graph: Graph, rows: Node, leading: Sequence[Any], alike: Node) -> Node:
    """`rows` [N, F] as the model had them, [*leading, F]; of `alike`, the ids perhaps, are sizes not known."""
    if len(leading) == 1:
        return rows
    if all(isinstance(size, int) for size in leading[1:]):
        return written(graph, lambda rows: rows.unflatten(0, (-1, *leading[1:])), (rows,), rows)
    shape = alike.meta["val"].shape
    shared = next(count for count in range(len(shape), -1, -1) if same_shape(shape[:count], leading[:count]))
    rest = leading[shared:]
    if not all(isinstance(size, int) for size in rest):
        raise Refusal(alike, f"rows are seen as {list(leading)}, the expert ids as {list(shape)}")
    return written(
        graph, lambda rows, alike: rows.view(*alike.shape[:shared], *rest, rows.shape[1]), (rows, alike), rows
    )


def _as(graph: Graph, result: Node, layer: Experts) -> Node:
    """`result` [T, H] in the dtype and the shape of the model's sum: [T, H], [B, S, H], or with a size of 1."""
    old = layer.sum.root
    value = old.meta["val"]
    if value.dtype != result.meta["val"].dtype:
        result = written(graph, lambda out: out.to(value.dtype), (result,), old)
    if value.dim() == 3 and is_one(value.shape[2]) and not is_one(result.meta["val"].shape[1]):
        return written(graph, lambda out: out.unsqueeze(2), (result,), old)
    return in_shape(graph, result, value.shape[:-1], in_shape_of(graph, old, layer.indices.ids))


def in_shape_of(graph: Graph, root: Node, ids: Node) -> Node:
    """A tensor before the sum that has its [*leading]; ids, which may have some of them, where there is none."""
    leading = root.meta["val"].shape[:-1]
    before = takewhile(lambda node: node is not root, graph.nodes)
    tensors = (node for node in before if rank(node) > len(leading))
    return next(
        (each for each in tensors if same_shape(each.meta["val"].shape[: len(leading)], leading)), ids
    )


def written(graph: Graph, function: Callable[..., Tensor], args: Sequence[Node], like: Node) -> Node:
    """The result of `function(*args)`, written out."""
    return write_out(graph, function, args, like)[0]


_HELD: dict[Node, Node] = {}


@contextmanager
def held(found: Iterable[tuple[Node, Node]]) -> Iterator[None]:
    """Keeps nodes that nobody reads while others are there: a layer that shares what they read goes alone."""
    own = {node: other for node, other in found if node not in _HELD}
    _HELD.update(own)
    try:
        yield
    finally:
        for node in own:
            del _HELD[node]


def erase_unread(graph: Graph, node: Node) -> None:
    """Erases `node` and what only it read, unless somebody reads it for somebody, or it is `held`."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node.op != "call_function" or node._erased or node.is_impure() or is_read(node):
            continue
        behind = _from_the_last(node)
        if any(each in _HELD and not _HELD[each]._erased for each in behind):
            continue
        for each in behind:
            pending.extend(each.all_input_nodes)
            graph.erase_node(each)


def _from_the_last(node: Node) -> list[Node]:
    """`node` and everything that is computed from it, what nobody reads first."""
    found = dict.fromkeys(each for user in node.users for each in _from_the_last(user))
    return [*found, node]
