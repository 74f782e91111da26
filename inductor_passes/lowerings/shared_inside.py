"""The expert that every token visits, found in a graph: what it computes may be part of the routed experts' launches.

activated = activation(mm(hidden_states, gate.T), mm(hidden_states, up.T))
fused_experts(hidden_states, ..., shared=mm(activated, down.T))

Both first products may be one, of gate and up rows. By then they are `dense_gemm` where that is faster.
"""

from itertools import permutations
from typing import NamedTuple

from torch.fx import Node

from inductor_passes import _compat
from inductor_passes.graph_tools import arguments, is_op
from inductor_passes.raising.evaluation import Cut, cut
from inductor_passes.raising.gates import is_in_gate, recognised
from inductor_passes.raising.views_of_rows import args, aten, readers, rows_shown, shown_by
from moe_ops.values import SharedExpert


class _Product(NamedTuple):
    """rows [T, A] times a weight [B, A], both nodes."""

    rows: Node
    weight: Node


def shared_expert(fused: Node) -> SharedExpert | None:
    """The shared expert, as nodes, whose output joins this sum and is read by nobody else."""
    experts = arguments(fused)
    if experts.shared is None or not _is_for_few(experts.hidden_states):
        return None
    down = _product(rows_shown(experts.shared))
    if down is None:
        return None
    activated = rows_shown(down.rows)
    gate = cut((activated,), lambda node: _product(rows_shown(node)) is not None or not is_in_gate(node))
    first = {leaf: product for leaf in gate.leaves if (product := _product(rows_shown(leaf))) is not None}
    tokens = rows_shown(experts.hidden_states)
    if len(first) < len(gate.leaves) or any(rows_shown(each.rows) is not tokens for each in first.values()):
        return None
    if not _are_theirs((experts.shared, down.rows, *first), gate, fused):
        return None
    return _expert(gate, first, activated, down)


def _is_for_few(tokens: Node) -> bool:
    """Whether launches of so many tokens may take it along: else there is nothing to try."""
    from moe_ops.kernels.decode_plan import MOST_TOKENS_BESIDE

    count = tokens.meta["val"].shape[0]
    return isinstance(count, int) and count <= MOST_TOKENS_BESIDE


def _expert(gate: Cut, first: dict[Node, _Product], activated: Node, down: _Product) -> SharedExpert | None:
    for order in permutations(first) if len(first) <= 2 else ():
        with _compat.real_tensors():
            found = recognised(gate, order, activated, {})
        if found is not None:
            weight, *up = (first[leaf].weight for leaf in order)
            return SharedExpert(weight, down.weight, None, found.spec, *up)  # type: ignore[arg-type]  # nodes
    return None


def _product(node: Node) -> _Product | None:
    """A product without a bias, in the dtype of its rows, by a weight that lies in rows."""
    if is_op(node, "dense_gemm"):
        rows, weight, bias, dtype = arguments(node)
        if bias is not None or dtype != rows.meta["val"].dtype:
            return None
    elif node.target is aten.mm.default and not node.kwargs and _is_transposed(args(node)[1]):
        rows, weight = args(node)[0], args(args(node)[1])[0]
    else:
        return None
    while _is_transposed(weight) and _is_transposed(args(weight)[0]):
        weight = args(args(weight)[0])[0]
    return _Product(rows, weight)


def _is_transposed(node: Node) -> bool:
    return node.target is aten.t.default or (
        node.target is aten.permute.default and list(args(node)[1]) == [1, 0]
    )


def _are_theirs(outputs: tuple[Node, ...], gate: Cut, fused: Node) -> bool:
    """Whether nobody but these experts reads what the shared one computes, shown in whatever shape."""
    inside = {*gate.nodes, *outputs, *(source for node in outputs for source in shown_by(node))}
    return all({*readers(node)} <= inside | {fused} for node in inside)
