"""Layers that multiply every token with every expert in turn, and weigh what nobody chose by zero.

    for e in range(num_experts):
        weight = (topk_weights * (topk_ids == e)).sum(-1, keepdim=True)
        out += experts[e](hidden_states) * weight

vLLM's plain-PyTorch reference is written so. A compiler unrolls it: two products for each expert.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.added import added_to
from inductor_passes.raising.choices import chosen_ids
from inductor_passes.raising.evaluation import Cut, concrete, cut, is_size
from inductor_passes.raising.fed import fed_into
from inductor_passes.raising.gates import is_in_gate, written_as
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import Experts, Outcome, Parts, Tokens
from inductor_passes.raising.products import Product
from inductor_passes.raising.rowwise import expect_rowwise
from inductor_passes.raising.some_experts import total_of_some
from inductor_passes.raising.stacks import Stack, of_expert
from inductor_passes.raising.tokens import flat
from inductor_passes.raising.totals import Given, Part, ends, of_experts
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    has_layout,
    is_cast,
    is_one,
    is_view_of_rows,
    only_user,
    operand,
    rank,
    same_shape,
    seen_from,
    size,
    unseen,
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
    """The products of one layer: for each turn those of one expert, which may have several."""

    firsts: tuple[tuple[Multiplied, ...], ...]
    """Of each turn one for gate and up, or one for each."""
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
    stacks: dict[Stack, list[Multiplied]] = {}
    for node in graph.nodes:
        if (found := _multiplied(node)) is not None:
            stacks.setdefault(found.stack, []).append(found)
    whole = [products for stack, products in stacks.items() if _are_all(stack, products)]
    known = {each.node: each for products in stacks.values() for each in products}
    firsts = {each.node for products in whole for each in products}
    layers = []
    for seconds in chain(*(_apart(products, known) for products in whole)):
        read = [_read(each, known) for each in seconds]
        if read[0] and all(leaf in firsts for leaf in read[0]):
            of_turns = (tuple(known[leaf] for leaf in leaves if leaf in known) for leaves in read)
            layers.append(Loop(tuple(of_turns), tuple(seconds)))
    return _not_of_two(layers, graph)


def _not_of_two(layers: Iterable[Loop], graph: Graph) -> list[Loop]:
    """Without those whose first products are the second ones of the layer before: a residual leads there."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    kept: list[Loop] = []
    ends: set[Node] = set()
    for layer in sorted(layers, key=lambda each: place[each.nodes[-1]]):
        if ends.isdisjoint(each.node for each in chain(*layer.firsts)):
            kept.append(layer)
            ends.update(each.node for each in layer.seconds)
    return kept


def _apart(seconds: list[Multiplied], known: Mapping[Node, Multiplied]) -> list[list[Multiplied]]:
    """Second products by layer, where several layers share their weights: of each all read the same tokens."""
    layers: dict[object, list[Multiplied]] = {}
    for each in seconds:
        tokens = [_tokens(known[leaf]) for leaf in _read(each, known) if leaf in known]
        layers.setdefault(tokens[0] if tokens else None, []).append(each)
    is_whole = all(_are_all(seconds[0].stack, each) for each in layers.values())
    return [*layers.values()] if is_whole else [seconds]


def _are_all(stack: Stack, products: Sequence[Multiplied]) -> bool:
    """Whether every expert of a stack is multiplied with."""
    experts = {each.expert for each in products}
    return experts == {*range(len(experts))} and stack.holds(len(experts)) and len(experts) > 1


def _read(second: Multiplied, known: Mapping[Node, Multiplied]) -> list[Node]:
    """The products in front of a second one."""
    return [leaf for leaf in _gate(second, known).leaves if leaf in known or _is_product(leaf)]


def _is_product(node: Node) -> bool:
    """Whether `node` is a product of matrices: an einsum makes it one of a batch of one."""
    is_one_of_batch = node.target is aten.bmm.default and is_one(size(node, 0))
    return is_one_of_batch or node.target in (aten.mm.default, aten.addmm.default)


def _multiplied(product: Node) -> Multiplied | None:
    """A product with one matrix of a tensor [E, A, B] of them."""
    if not _is_product(product) or product.kwargs:
        return None
    factor, is_turned = _matrix(args(product)[-1])
    found = of_expert(factor, lambda stack, _: rank(stack) == 3)
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
    stack = found[0] if is_turned else found[0].transposed()
    return Multiplied(product, stack, found[1], shown, bias)


def _matrix(factor: Node) -> tuple[Node, bool]:
    """The matrix that `factor` shows, as a batch of one perhaps, and whether it does so transposed; else itself."""
    matrix = unseen(factor)
    shown = seen_from(matrix, factor) if rank(matrix) == 2 else None
    if shown is not None:
        rows, columns = (int(concrete(each) or 0) for each in matrix.meta["val"].shape)
        shown = shown.view(shown.shape[-2:]) if is_one(shown.shape[0]) and shown.dim() == 3 else shown
        if has_layout(shown, (rows, columns), (columns, 1)):
            return matrix, False
        if has_layout(shown, (columns, rows), (1, columns)):
            return matrix, True
    return factor, False


def _gate(second: Multiplied, known: Mapping[Node, Multiplied]) -> Cut:
    """What stands in front of a second product, back to the products before it."""
    return cut([_activated(second, known)], lambda node: node in known or not is_in_gate(node))


def _activated(second: Multiplied, known: Collection[Node]) -> Node:
    """What a second product multiplies, before it is shown in another shape; a first one as that is found."""
    rows = second.rows
    while rows not in known and is_view_of_rows(rows) and not is_cast(rows):
        rows = args(rows)[0]
    return rows


def _unseen(rows: Node, ends: Collection[object] = ()) -> Node:
    """What `rows` shows in another shape, by none of the operators at which it `ends`."""
    is_shown = is_view_of_rows(rows) and not is_cast(rows) and rows.target not in ends
    return _unseen(args(rows)[0], ends) if is_shown else rows


def _experts(loop: Loop) -> Experts:
    gate, number = _gate_of_all(loop), loop.seconds[0].stack.value.shape[0]
    rows = Given({each.node: _part(each.expert) for each in loop.seconds}, number, of_experts)
    graph = loop.seconds[0].node.graph
    roots = list(ends(graph, rows.parts))
    ids = chosen_ids(roots, {*rows.parts, *chain(*(added_to(root, rows.parts) for root in roots))})
    indices, weighted_sum = total_of_some(graph, rows, Indices(ids, number, {}))
    *firsts, last = (_outcome(each, indices) for each in (*zip(*loop.firsts, strict=True), loop.seconds))
    tokens = Tokens(flat(loop.firsts[0][0].rows, indices), None)
    activated = _activated(loop.seconds[0], {each.node for each in chain(*loop.firsts)})
    others = tuple(each.product for each in chain(*loop.firsts[1:]))
    return Experts(indices, Parts(tokens, tuple(firsts), gate, {}, activated, last), weighted_sum, others)


def _part(expert: int) -> Part:
    return lambda rows, place: rows[:, expert]


def _outcome(products: Sequence[Multiplied], indices: Indices) -> Outcome:
    """What one product of all experts gives, with its bias."""
    biases = {_bias(each, indices.num_experts) for each in products}
    if len(biases) > 1:
        raise Refusal(products[-1].product, "the experts of the loop have biases out of different tensors")
    first = products[0]
    product = Product(first.product, first.rows, first.stack, indices.ids, "looped")
    return Outcome(product, biases.pop(), first.node)


def _bias(each: Multiplied, num_experts: int) -> Stack | None:
    """The biases [E, B] of which one is added to a product."""
    if each.bias is None:
        return None

    def is_choice(stack: Node, expert: int) -> bool:
        return expert == each.expert and same_shape([size(stack, 0)], [num_experts])

    found = of_expert(each.bias, is_choice)
    columns = (num_experts, size(each.product, -1))
    if found is None or not same_shape(found[0].value.shape, columns):
        raise Refusal(
            each.product, f"{describe(each.bias)} is no bias of expert {each.expert} out of one tensor"
        )
    return found[0]


_OTHERS = "an expert of the loop reads something else than the others"
_FED = (
    "what goes into an expert of the loop is weighed, not what it gives: raised is that where all experts are "
    "multiplied at once"
)


def _is_fed(loop: Loop) -> bool:
    """Whether each expert reads rows of its own, weighed by a choice."""
    firsts = [first for first, *_ in filter(None, loop.firsts)]  # an expert may read none at all
    shared = len({unseen(each.rows) for each in firsts}) < len(firsts)
    own = loop.seconds if shared else [*loop.seconds, *firsts]
    return any([*fed_into(each.rows, is_input=True)] for each in own)


def _gate_of_all(loop: Loop) -> Cut:
    tokens, stacks = _tokens(loop.firsts[0][0]), [each.stack for each in loop.firsts[0]]
    known = {each.node: each for each in chain(*loop.firsts)}
    gates = []
    for firsts, second in zip(loop.firsts, loop.seconds, strict=True):
        gate = _gate(second, known)
        read = [leaf for leaf in gate.leaves if not is_size(leaf)]
        is_alike = read == [each.node for each in firsts] and stacks == [each.stack for each in firsts]
        is_own = all(each.expert == second.expert and _tokens(each) == tokens for each in firsts)
        if not is_alike or not is_own:
            raise Refusal(second.product, _FED if _is_fed(loop) else _OTHERS)
        gates.append(gate)
    if len({written_as(gate) for gate in gates}) > 1:
        raise Refusal(loop.seconds[-1].product, "the experts of the loop have different gates")
    first = loop.firsts[0]
    num_tokens = math.prod(first[0].node.meta["val"].shape[:-1])
    expect_rowwise(gates[0], [each.node for each in first], (), num_tokens)
    return gates[0]


def _tokens(first: Multiplied) -> tuple[Node, torch.dtype]:
    """What an expert reads, and the dtype in which: autocast rounds it for each expert anew.

    An alias may be where gradients stop, for one expert and not for the others.
    """
    ends = (aten.alias.default,)
    rows = _unseen(first.rows, ends)
    return (_unseen(args(rows)[0], ends) if is_cast(rows) else rows), first.rows.meta["val"].dtype
