"""Layers that multiply every token with every expert in turn, and weigh what nobody chose by zero.

    for e in range(num_experts):
        weight = (topk_weights * (topk_ids == e)).sum(-1, keepdim=True)
        out += experts[e](hidden_states) * weight

vLLM's plain-PyTorch reference is written so. A compiler unrolls it: two products for each expert.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.choices import choice
from inductor_passes.raising.evaluation import Cut, cut, evaluate, is_size
from inductor_passes.raising.gates import is_in_gate
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import Experts, Outcome, Tokens, WeightedSum
from inductor_passes.raising.products import Product
from inductor_passes.raising.rowwise import expect_rowwise
from inductor_passes.raising.stacks import Stack, of_expert
from inductor_passes.raising.tokens import flat
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    is_cast,
    is_view_of_rows,
    only_user,
    operand,
    rank,
    same_shape,
    size,
)


class Multiplied(NamedTuple):
    """A product with what belongs to one expert."""

    product: Node
    stack: Stack
    """The weight [E, B, A]."""
    expert: int
    node: Node
    """The product, with its bias and past views."""
    bias: Node | None

    @property
    def rows(self) -> Node:
        """What is multiplied."""
        return args(self.product)[-2]


class Loop(NamedTuple):
    """The products of one layer, by expert."""

    firsts: tuple[tuple[Multiplied, ...], ...]
    """Of each expert one for gate and up, or one for each."""
    seconds: tuple[Multiplied, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All products."""
        return tuple(each.product for each in (*chain(*self.firsts), *self.seconds))

    def experts(self) -> Experts:
        """The layer as its stages want it. Raises Refusal where an expert does something else than the others."""
        return _experts(self)


def loops(graph: Graph) -> list[Loop]:
    """Every layer in `graph` that is written as a loop over its experts."""
    stacks: dict[Stack, dict[int, Multiplied]] = {}
    for node in graph.nodes:
        if (found := _multiplied(node)) is not None:
            stacks.setdefault(found.stack, {})[found.expert] = found
    whole = [
        tuple(products[expert] for expert in range(len(products)))
        for stack, products in stacks.items()
        if sorted(products) == [*range(len(products))] and stack.holds(len(products)) and len(products) > 1
    ]
    known = {each.node: each for products in stacks.values() for each in products.values()}
    of_first = {products[0].node: products for products in whole}
    layers = []
    for seconds in whole:
        read = [leaf for leaf in _gate(seconds[0], known).leaves if leaf in known or _is_product(leaf)]
        if read and all(leaf in of_first and len(of_first[leaf]) == len(seconds) for leaf in read):
            layers.append(Loop(tuple(zip(*map(of_first.__getitem__, read), strict=True)), seconds))
    return layers


def _is_product(node: Node) -> bool:
    return node.target in (aten.mm.default, aten.addmm.default)


def _multiplied(product: Node) -> Multiplied | None:
    """A product with one matrix of a tensor [E, A, B] of them."""
    if not _is_product(product) or product.kwargs:
        return None
    found = of_expert(args(product)[-1], lambda select: rank(args(select)[0]) == 3)
    if found is None or found[0].value.dim() != 3:
        return None
    bias = args(product)[0] if product.target is aten.addmm.default else None
    node = shown = product
    while (user := only_user(node)) is not None:
        added = operand(user, node) if user.target is aten.add.Tensor and bias is None else None
        if added is not None and rank(added) == 1:
            bias = added
        elif not is_view_of_rows(user) or is_cast(user):
            break
        node = user
        shown = node if same_shape([size(node, -1)], [size(product, -1)]) else shown
    return Multiplied(product, found[0].transposed(), found[1], shown, bias)


def _gate(second: Multiplied, known: Mapping[Node, Multiplied]) -> Cut:
    """What stands in front of a second product, back to the products before it."""
    return cut([_unseen(second.rows)], lambda node: node in known or not is_in_gate(node))


def _unseen(rows: Node) -> Node:
    """What `rows` shows in another shape."""
    return _unseen(args(rows)[0]) if is_view_of_rows(rows) and not is_cast(rows) else rows


def _experts(loop: Loop) -> Experts:
    gate = _gate_of_all(loop)
    terms, columns = zip(*map(_weighed, loop.seconds), strict=True)
    parts = (lambda weights, expert=expert: weights[:, expert] for expert in range(len(columns)))
    indices, topk_weights, score = choice([*zip(columns, parts, strict=True)], len(columns))
    *firsts, last = (_outcome(each, indices) for each in (*zip(*loop.firsts, strict=True), loop.seconds))
    tokens = Tokens(flat(loop.firsts[0][0].rows, indices), None)
    activated = _unseen(loop.seconds[0].rows)
    weighted_sum = WeightedSum(topk_weights, _sum_of(terms), score)
    others = tuple(each.product for each in chain(*loop.firsts[1:]))
    return Experts(indices, tokens, tuple(firsts), gate, {}, activated, last, weighted_sum, others)


def _outcome(products: Sequence[Multiplied], indices: Indices) -> Outcome:
    """What one product of all experts gives, with its bias."""
    biases = {_bias(each, len(products)) for each in products}
    if len(biases) > 1:
        raise Refusal(products[-1].product, "the experts of the loop have biases out of different tensors")
    first = products[0]
    product = Product(first.product, first.rows, first.stack, indices.ids, "looped")
    return Outcome(product, biases.pop(), first.node)


def _bias(each: Multiplied, num_experts: int) -> Stack | None:
    """The biases [E, B] of which one is added to a product."""
    if each.bias is None:
        return None

    def is_choice(select: Node) -> bool:
        return args(select)[2] == each.expert and same_shape([size(args(select)[0], 0)], [num_experts])

    found = of_expert(each.bias, is_choice)
    columns = (num_experts, size(each.product, 1))
    if found is None or not same_shape(found[0].value.shape, columns):
        raise Refusal(
            each.product, f"{describe(each.bias)} is no bias of expert {each.expert} out of one tensor"
        )
    return found[0]


def _gate_of_all(loop: Loop) -> Cut:
    tokens = _tokens(loop.firsts[0][0])
    known = {each.node: each for each in chain(*loop.firsts)}
    gates = []
    for firsts, second in zip(loop.firsts, loop.seconds, strict=True):
        gate = _gate(second, known)
        read = [leaf for leaf in gate.leaves if not is_size(leaf)]
        if read != [each.node for each in firsts] or any(_tokens(each) != tokens for each in firsts):
            raise Refusal(second.product, "an expert of the loop reads something else than the others")
        gates.append(gate)
    if len({_written(gate) for gate in gates}) > 1:
        raise Refusal(loop.seconds[-1].product, "the experts of the loop have different gates")
    first = loop.firsts[0]
    num_tokens = math.prod(first[0].node.meta["val"].shape[:-1])
    expect_rowwise(gates[0], [each.node for each in first], (), num_tokens)
    return gates[0]


def _tokens(first: Multiplied) -> tuple[Node, torch.dtype]:
    """What an expert reads, and the dtype in which: autocast rounds it for each expert anew."""
    rows = _unseen(first.rows)
    return (_unseen(args(rows)[0]) if is_cast(rows) else rows), first.rows.meta["val"].dtype


def _written(gate: Cut) -> str:
    """How a gate is written, whatever it reads."""
    names = {node: f"%{index}" for index, node in enumerate((*gate.leaves, *gate.nodes))}
    return str([(node.target, map_arg((node.args, node.kwargs), names.__getitem__)) for node in gate.nodes])


def _weighed(second: Multiplied) -> tuple[Node, Node]:
    """The product times its weights, and the weights [T, 1]."""
    node, user = second.node, only_user(second.node)
    while user is not None and is_view_of_rows(user):
        node, user = user, only_user(user)
    column = operand(user, node) if user is not None and user.target is aten.mul.Tensor else None
    leading = node.meta["val"].shape[:-1]
    if user is None or column is None or not same_shape(column.meta["val"].shape, (*leading, 1)):
        raise Refusal(second.product, "the expert's output is not weighed by a number for each token")
    return user, column


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
