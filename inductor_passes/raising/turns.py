"""Layers that take the choices of their tokens in turn.

    for k in range(top_k):
        w13_k, w2_k = w13[topk_ids[:, k]], w2[topk_ids[:, k]]
        out += topk_weights[:, k, None] * expert(hidden_states, w13_k, w2_k)

A compiler unrolls it: two products, with weights that are gathered, for each choice.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import cut, is_size
from inductor_passes.raising.gates import is_in_gate, written_as
from inductor_passes.raising.indices import Indices, is_chosen, is_integral
from inductor_passes.raising.layer import Experts, Outcome, Parts
from inductor_passes.raising.parts import parts_of
from inductor_passes.raising.products import Product, products
from inductor_passes.raising.rowwise import expect_rowwise
from inductor_passes.raising.strays import stray_runs
from inductor_passes.raising.totals import Given, Part, of_choices, total
from inductor_passes.raising.views_of_rows import rank, size

Chain = tuple[Product, ...]
"""Products that go through a gate into the last of them."""


class Turns(NamedTuple):
    """The products of one layer, by choice."""

    ids: Node
    chains: tuple[Chain, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All products."""
        return tuple(each.node for each in chain(*self.chains))

    def experts(self) -> Experts:
        """The layer as its stages want it. Raises Refusal where one choice is treated otherwise than another."""
        return _experts(self)


def turns(found_chains: Iterable[Chain]) -> list[Turns]:
    """Every layer that is written as a loop over the choices of its tokens."""
    found: dict[Any, list[Chain]] = {}
    for each in found_chains:
        ids = _ids_of_turn(each[-1])
        if ids is not None and all(product.kind == "gathered" for product in each):
            found.setdefault((ids, *(product.weight for product in each)), []).append(each)
    return [Turns(ids, tuple(group)) for (ids, *_), group in found.items() if size(ids, -1) == len(group)]


def of_all_choices(found_chains: Collection[Chain]) -> list[Chain]:
    """Those that have all choices of a token at once."""
    in_turns = {node for each in turns(found_chains) for node in each.nodes}
    return [each for each in found_chains if each[-1].node not in in_turns]


def chains(graph: Graph) -> list[Chain]:
    """All products that go through a gate into another, which is the last of them.

    A residual leads from what the last one gives into the next layer's first one, which is no gate.
    """
    found = {each.node: each for each in products(graph)}
    layers: list[Chain] = []
    ends: set[Node] = set()
    for second in found.values():
        firsts = _firsts(second, found)
        if firsts and ends.isdisjoint(each.node for each in firsts):
            layers.append((*firsts, second))
            ends.add(second.node)
    return layers


def _firsts(second: Product, found: Mapping[Node, Product]) -> list[Product]:
    """The products that go through a gate into `second`; none when it is one of these itself."""
    between = cut([second.rows], lambda node: node in found or not is_in_gate(node))
    return [found[leaf] for leaf in between.leaves if leaf in found]


def _ids_of_turn(product: Product) -> Node | None:
    """The ids [T, K] of which a product has the experts of one choice; None where it has all, or others."""
    behind = cut([product.experts], lambda node: is_integral(node) and is_chosen(node))
    leaves = [leaf for leaf in behind.leaves if not is_size(leaf)]
    ids = leaves[0] if len(leaves) == 1 and is_integral(leaves[0]) else None
    if ids is None or rank(ids) < 2 or size(ids, -1) == 1:
        return None
    is_part = _compat.statically_known_true(product.num_slots * size(ids, -1) == ids.meta["val"].numel())
    return ids if is_part else None


def _experts(layer: Turns) -> Experts:
    second = layer.chains[0][-1]
    indices = Indices(layer.ids, second.num_experts, {})
    if stray_runs(indices):
        raise Refusal(second.node, "expert ids of a choice may be out of range")
    parts = {_place(each[-1], indices): each for each in layer.chains}
    if len(parts) < len(layer.chains):
        raise Refusal(second.node, "a choice of a token is taken twice")
    found = {
        place: parts_of(each[:-1], each[-1], indices.of_choice(place), indices)
        for place, each in parts.items()
    }
    first = _one_of(found.values(), second.node)
    rows = Given({each.second.node: _part(place) for place, each in found.items()}, len(found), of_choices)
    weighted_sum = total(second.node.graph, rows, indices, indices.samples)
    firsts, last = tuple(map(_looped, first.firsts)), _looped(first.second)
    others = tuple(each.node for chained in layer.chains for each in chained[:-1])
    return Experts(indices, first._replace(firsts=firsts, second=last), weighted_sum, others)


def _place(product: Product, indices: Indices) -> int:
    """Which choice of its token a row of a product is."""
    for place in range(size(indices.ids, -1)):
        if indices.are_experts(product.experts, indices.of_choice(place)):
            return place
    raise Refusal(product.node, f"{describe(product.experts)} is not one choice of each token")


def _one_of(parts: Collection[Parts], second: Node) -> Parts:
    """The first, where all do the same with each row."""
    if len({_written(each) for each in parts}) > 1:
        raise Refusal(second, "the choices of a token are treated differently")
    first = next(iter(parts))
    if first.masks or first.topk_weights is not None:
        raise Refusal(second, "the gate of a choice reads ids or weights")
    nodes = [each.node for each in first.firsts]
    expect_rowwise(first.gate, nodes, (), first.second.product.num_slots)
    return first


def _written(parts: Parts) -> tuple[Any, ...]:
    """What is done with a row, whichever choice it is."""
    biases = [each.bias for each in (*parts.firsts, parts.second)]
    return parts.tokens, written_as(parts.gate), *biases


def _part(place: int) -> Part:
    return lambda rows, _: rows[:, place]


def _looped(outcome: Outcome) -> Outcome:
    return outcome._replace(product=outcome.product._replace(kind="looped"))
