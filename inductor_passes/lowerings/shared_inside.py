"""The expert that every token visits, found in a graph: what it computes may be part of the routed experts' launches.

activated = activation(mm(hidden_states, gate.T), mm(hidden_states, up.T))
fused_experts(hidden_states, ..., shared=mm(activated, down.T))

Both first products may be one, of gate and up rows. By then they are `dense_gemm` where that is faster.
"""

from collections.abc import Iterator
from itertools import permutations
from typing import Any, NamedTuple

from torch.fx import Node

from inductor_passes import _compat
from inductor_passes.graph_tools import arguments, is_op
from inductor_passes.raising.evaluation import Cut, cut
from inductor_passes.raising.gates import is_in_gate, recognised
from inductor_passes.raising.views_of_rows import aten, is_view, readers
from moe_ops.values import SharedExpert


class _Product(NamedTuple):
    """rows [T, A] times a weight [B, A], all of them nodes."""

    node: Node
    rows: Node
    weight: Node


def shared_expert(fused: Node) -> SharedExpert | None:
    """The shared expert, as nodes, whose output joins this sum and is read by nobody else."""
    args: Any = arguments(fused)
    if args.shared is None:
        return None
    down = _product(_shown(args.shared))
    if down is None:
        return None
    activated = _shown(down.rows)
    gate = cut((activated,), lambda node: _product(node) is not None or not is_in_gate(node))
    first = [_product(leaf) for leaf in gate.leaves]
    tokens = _shown(args.hidden_states)
    products = [each for each in first if each is not None and _shown(each.rows) is tokens]
    if len(products) != len(first) or not _are_theirs(args.shared, down, activated, gate, fused):
        return None
    return _expert(gate, products, activated, down)


def _expert(gate: Cut, products: list[_Product], activated: Node, down: _Product) -> SharedExpert | None:
    for order in permutations(products) if len(products) <= 2 else ():
        with _compat.real_tensors():
            found = recognised(gate, [each.node for each in order], activated, {})
        if found is not None:
            weight, *up = (each.weight for each in order)
            return SharedExpert(weight, down.weight, None, found.spec, *up)  # type: ignore[arg-type]  # nodes
    return None


def _shown(node: Node) -> Node:
    """What `node` shows in another shape."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def _product(node: Node) -> _Product | None:
    """A product without a bias, in the dtype of its rows, by a weight that lies in rows."""
    if is_op(node, "dense_gemm"):
        rows, weight, bias, dtype = arguments(node)
        if bias is not None or dtype != rows.meta["val"].dtype:
            return None
    elif node.target is aten.mm.default and not node.kwargs:
        rows, weight = node.args
        weight = weight if _is_transposed(weight) else None
        weight = None if weight is None else weight.args[0]
    else:
        return None
    while weight is not None and _is_transposed(weight) and _is_transposed(weight.args[0]):
        weight = weight.args[0].args[0]
    return None if weight is None else _Product(node, rows, weight)


def _is_transposed(node: Node) -> bool:
    return node.target is aten.t.default or (
        node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[call-overload]
    )


def _are_theirs(shared: Node, down: _Product, activated: Node, gate: Cut, fused: Node) -> bool:
    """Whether nobody but these experts reads what the shared one computes."""
    inside = {down.node, *gate.nodes, *gate.leaves, *_views(shared), *_views(down.rows), activated}
    return all({*readers(node)} <= inside | {fused} for node in inside)


def _views(node: Node) -> Iterator[Node]:
    while node.op == "call_function" and is_view(node):
        yield node
        node = node.all_input_nodes[0]
