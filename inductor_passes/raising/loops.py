"""Layers that multiply every token with every expert in turn, and weigh what nobody chose by zero.

    for e in range(num_experts):
        weight = (topk_weights * (topk_ids == e)).sum(-1, keepdim=True)
        out += experts[e](hidden_states) * weight

vLLM's plain-PyTorch reference is written so. A compiler unrolls it: two products for each expert.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import Cut, cut, evaluate
from inductor_passes.raising.gates import is_in_gate
from inductor_passes.raising.indices import Indices, is_chosen, is_integral
from inductor_passes.raising.layer import Experts, Outcome, Tokens, WeightedSum
from inductor_passes.raising.products import Product
from inductor_passes.raising.rowwise import expect_rowwise
from inductor_passes.raising.views_of_rows import args, aten, is_cast, is_one, only_user, operand, rank, size

_CLOSE = 1e-9


class Stack(NamedTuple):
    """A tensor that holds a matrix for each expert."""

    weight: Node
    is_transposed: bool
    """Whether it is [E, A, B]."""


class Loop(NamedTuple):
    """The products of one layer, by expert."""

    firsts: tuple[tuple[Node, ...], ...]
    """Of each expert one for gate and up, or one for each."""
    seconds: tuple[Node, ...]
    stacks: tuple[Stack, ...]
    """What the first products multiply."""
    w2: Stack

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All products."""
        return (*chain(*self.firsts), *self.seconds)


def loops(graph: Graph) -> list[Loop]:
    """Every layer in `graph` that is written as a loop over its experts."""
    stacks: dict[Stack, dict[int, Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        if (found := _matrix(args(node)[1])) is not None:
            stacks.setdefault(found[0], {})[found[1]] = node
    whole = {
        stack: tuple(products[e] for e in range(len(products)))
        for stack, products in stacks.items()
        if sorted(products) == list(range(size(stack.weight, 0))) and len(products) > 1
    }
    firsts = {products[0]: stack for stack, products in whole.items()}
    found = []
    for w2, seconds in whole.items():
        leaves = _gate(seconds[0]).leaves
        if leaves and all(leaf in firsts for leaf in leaves):
            read = tuple(firsts[leaf] for leaf in leaves)
            found.append(Loop(tuple(zip(*map(whole.__getitem__, read), strict=True)), seconds, read, w2))
    return found


def _matrix(factor: Node) -> tuple[Stack, int] | None:
    """The tensor that holds the factor [A, B] of a product, and which expert's it is."""
    is_transposed = True
    while factor.target is aten.permute.default and list(args(factor)[1]) == [1, 0]:
        factor, is_transposed = args(factor)[0], not is_transposed
    if factor.target is not aten.select.int or rank(args(factor)[0]) != 3 or args(factor)[1] != 0:
        return None
    weight, _, expert = args(factor)
    while weight.target is aten.permute.default and list(args(weight)[1]) == [0, 2, 1]:
        weight, is_transposed = args(weight)[0], not is_transposed
    return Stack(weight, is_transposed), expert


def _gate(second: Node) -> Cut:
    """What stands in front of a second product, back to the products before it."""
    return cut([args(second)[0]], lambda node: node.target is aten.mm.default or not is_in_gate(node))


def experts_of(loop: Loop) -> Experts:
    """The layer as its stages want it. Raises Refusal where an expert does something else than the others."""
    hidden_states, second = args(loop.firsts[0][0])[0], loop.seconds[0]
    gate = _gate_of_all(loop, hidden_states)
    terms, columns = zip(*map(_weighed, loop.seconds), strict=True)
    indices, topk_weights = _choice(columns)
    *firsts, last = (
        Outcome(Product(node, args(node)[0], *stack, indices.ids, "looped"), None, node)
        for node, stack in zip((*loop.firsts[0], second), (*loop.stacks, loop.w2), strict=True)
    )
    tokens = Tokens(hidden_states, None)
    weighted_sum = WeightedSum(topk_weights, _sum_of(terms))
    others = tuple(node for each in loop.firsts[1:] for node in each)
    return Experts(indices, tokens, tuple(firsts), gate, {}, args(second)[0], last, weighted_sum, others)


def _gate_of_all(loop: Loop, hidden_states: Node) -> Cut:
    gates = []
    for firsts, second in zip(loop.firsts, loop.seconds, strict=True):
        gate = _gate(second)
        if gate.leaves != firsts or any(args(first)[0] is not hidden_states for first in firsts):
            raise Refusal(second, "an expert of the loop reads something else than the others")
        gates.append(gate)
    if len({_written(gate) for gate in gates}) > 1:
        raise Refusal(loop.seconds[-1], "the experts of the loop have different gates")
    expect_rowwise(gates[0], loop.firsts[0], (), size(hidden_states, 0))
    return gates[0]


def _written(gate: Cut) -> str:
    """How a gate is written, whatever it reads."""
    names = {node: f"%{index}" for index, node in enumerate((*gate.leaves, *gate.nodes))}
    return str([(node.target, map_arg((node.args, node.kwargs), names.__getitem__)) for node in gate.nodes])


def _weighed(product: Node) -> tuple[Node, Node]:
    """The product times its weights, and the weights [T, 1]."""
    node, user = product, only_user(product)
    while user is not None and is_cast(user):
        node, user = user, only_user(user)
    column = operand(user, node) if user is not None and user.target is aten.mul.Tensor else None
    if user is None or column is None or rank(column) != 2 or not is_one(size(column, 1)):
        raise Refusal(product, "the expert's output is not weighed by a number for each token")
    return user, column


def _choice(columns: Sequence[Node]) -> tuple[Indices, Node]:
    """The ids [T, K], and the weights [T, K] of which each expert's column has those of its tokens."""
    indices = Indices(_ids_behind(columns[0]), len(columns), {})
    behind = _read_by(indices.ids)
    found = set()
    for expert, column in enumerate(columns):
        between = cut(
            [column], lambda node: node is indices.ids or (node not in behind and bool(node.all_input_nodes))
        )
        weights = [leaf for leaf in between.leaves if leaf is not indices.ids]
        if len(weights) != 1 or not _is_column(between, column, weights[0], indices, expert):
            raise Refusal(column, f"{describe(column)} is not what the tokens of expert {expert} weigh it by")
        found.add(_uncast(weights[0]))
    if len(found) > 1 or not _has_shape_of(topk_weights := found.pop(), indices.ids):
        raise Refusal(columns[-1], "the experts of the loop are not weighed by one tensor [T, K]")
    return indices, topk_weights


def _ids_behind(column: Node) -> Node:
    def is_ids(node: Node) -> bool:
        return is_integral(node) and node.meta["val"].dtype != torch.bool and rank(node) == 2

    leaves = cut([column], lambda node: is_ids(node) and is_chosen(node)).leaves
    ids = [leaf for leaf in leaves if is_ids(leaf)]
    if len(ids) != 1:
        raise Refusal(column, f"the weights of an expert come from {', '.join(map(describe, leaves))}")
    return ids[0]


def _read_by(node: Node) -> set[Node]:
    """What is computed from `node`, and it."""
    found, pending = {node}, [node]
    while pending:
        fresh = [user for user in pending.pop().users if user not in found]
        found.update(fresh)
        pending.extend(fresh)
    return found


def _uncast(node: Node) -> Node:
    return _uncast(args(node)[0]) if is_cast(node) else node


def _has_shape_of(node: Node, ids: Node) -> bool:
    value: Any = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == ids.meta["val"].shape


def _is_column(between: Cut, column: Node, topk_weights: Node, indices: Indices, expert: int) -> bool:
    generator = torch.Generator().manual_seed(expert)
    for ids in indices.samples:
        weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64)
        try:
            ours = evaluate(between.nodes, {indices.ids: ids, topk_weights: weights})[column]
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        wanted = (weights * (ids == expert)).sum(-1, keepdim=True)
        if ours.shape != wanted.shape or not bool(((ours - wanted).abs() <= _CLOSE).all()):
            return False
    return True


def _sum_of(terms: Sequence[Node]) -> Node:
    """Where all terms have been added up, each once, and nothing else."""
    wanted, node = set(terms), terms[-1]
    while True:
        tree = cut([node], lambda each: each in wanted or not _is_added(each))
        if wanted <= {*tree.leaves}:
            break
        user = only_user(node)
        if user is None:
            raise Refusal(node, f"{describe(node)} is not the sum of all experts")
        node = user
    for leaf in tree.leaves:
        if leaf not in wanted and not _is_zero(leaf):
            raise Refusal(node, f"{describe(leaf)} is added among the experts")
    numbers = {leaf: torch.tensor(1.0 + power) for power, leaf in enumerate(terms)}
    zeros = {leaf: torch.tensor(0.0) for leaf in tree.leaves if leaf not in wanted}
    if evaluate(tree.nodes, {**numbers, **zeros})[node] != sum(range(1, len(terms) + 1)):
        raise Refusal(node, f"{describe(node)} adds up an expert twice")
    return node


def _is_added(node: Node) -> bool:
    return is_cast(node) or (node.target is aten.add.Tensor and not node.kwargs)


def _is_zero(node: Node) -> bool:
    return node.target is aten.full.default and args(node)[1] == 0
