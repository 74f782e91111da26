"""Layers that put tokens into buffers [E * C, H] by index, as Tutel and Megatron's drop-and-pad do.

    rows = torch.zeros(E * C, H).index_add(0, ids * C + place, hidden_states)
    out = experts(rows.view(E, C, H)).view(E * C, H)[ids * C + place] * weights

Every expert has C places, and who finds none is dropped. How tokens come to their places is tried (`buffer_trials.py`),
not how it is written: it may be anything that moves rows by what follows from ids. The slots of a token are those of
these ids; a slot without a place has the id -1. What stands in which place, and what it is weighed by, the same
operators say of rows with few columns (`narrow.py`).
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import Refusal
from inductor_passes.graph_tools import write_out
from inductor_passes.raising.buffer_parts import Buffers
from inductor_passes.raising.buffer_trials import Known, weights_of_slots
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import Experts, Parts, Tokens, WeightedSum
from inductor_passes.raising.moved_rows import num_rows, sources_of
from inductor_passes.raising.narrow import Narrow, write_narrow
from inductor_passes.raising.place_trials import refusal
from inductor_passes.raising.row_trials import place_of_columns
from inductor_passes.raising.spreads import Inside, expect_gate, expect_own_rows, outcome
from inductor_passes.raising.totals import added_to, ends
from inductor_passes.raising.views_of_rows import is_one, rank, size
from inductor_passes.raising.writing import or_as_it_was

_MOST_ROOTS = 4


class Buffered(NamedTuple):
    """One layer."""

    inside: Inside
    sources: tuple[Node, ...]
    """What may be its tokens, what is most likely first."""
    known: Known

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All products with experts."""
        return self.inside.products

    def experts(self) -> Experts:
        """The layer as its stages want it. Raises Refusal where it does not compute what they do."""
        expect_gate(self.inside)
        expect_own_rows(self.inside)
        return _written(*self._found())

    def _found(self) -> tuple[Buffers, Node | None]:
        """What may be tokens and their sum, if it is right, and the weights. Raises Refusal where nothing is.

        Of a top-1 that drops nobody what is not weighed yet is right as well.
        """
        refused, found = [], []
        for layer in self._candidates():
            try:
                found.append((layer, weights_of_slots(layer, self.known)))
            except Refusal as reason:
                refused.append(reason)
            if found and found[-1][1] is not None:
                return found[-1]
        if found:
            return found[0]
        nothing = Refusal(self.nodes[-1], "what experts give is not added up by token")
        raise next(iter(refused), nothing)

    def _candidates(self) -> Iterator[Buffers]:
        for tokens in self.sources:
            for root in islice(_roots(self.inside, tokens), _MOST_ROOTS):
                yield Buffers(self.inside, tokens, root)
                there = added_to(root, [self.inside.second.node])
                if len(there) == 1:  # a residual, or what a shared expert gives
                    yield Buffers(self.inside, tokens, root, there[0])


def buffered(inside: Inside, known: Known) -> Buffered | None:
    """The layer around some products, if rows are moved to them by what was chosen, with what is `known` of others."""
    rows = [each.rows for each in inside.firsts]
    if any(rank(each) != 3 or is_one(size(each, 0)) for each in rows):
        return None  # all experts read the same ones
    sources = sources_of(rows, inside.second.num_experts)
    return Buffered(inside, tuple(sources), known) if sources else None


def _roots(inside: Inside, tokens: Node) -> Iterator[Node]:
    """What is made of all that experts give, and may have a row for each token."""
    second = inside.second.node
    number, columns = num_rows(tokens), size(second, -1)
    for node in ends(second.graph, {second: lambda rows, place: rows}):
        is_last = place_of_columns(node.meta["val"], columns) == -1 and size(node, -1) == columns
        if is_last and _compat.statically_known_true(num_rows(node) == number):
            yield node


def _written(layer: Buffers, weights: Node | None) -> Experts:
    inside, graph = layer.inside, layer.root.graph
    with or_as_it_was(graph), graph.inserting_before(layer.root):
        try:
            ids, own = write_out(graph, layer.slots, [_numbers(graph, layer), *layer.choices], layer.root)
            weights = _weights(graph, layer, own) if weights is None else _with_choices(graph, weights)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise refusal(layer.chosen, f"they are not written for rows of few columns, {error}") from error
        indices = Indices(ids, layer.num_experts, {})
    *firsts, last = (outcome(each, indices) for each in (*inside.firsts, inside.second))
    parts = Parts(Tokens(layer.tokens, None), tuple(firsts), inside.gate, {}, inside.activated, last)
    return Experts(indices, parts, WeightedSum(weights, layer.root, into=layer.into))


def _with_choices(graph: Graph, weights: Node) -> Node:
    """[T, 1] of weights [T]."""
    if rank(weights) > 1:
        return weights
    return write_out(graph, lambda each: each.unsqueeze(1), (weights,), weights)[0]


def _numbers(graph: Graph, layer: Buffers) -> Node:
    """[E, C, 1]: which token stands in each place, counted from 1."""
    tokens, rows = layer.tokens, layer.inside.firsts[0].rows

    def counted(rows: Tensor) -> Tensor:
        shape = rows.shape[:-1]
        return torch.arange(1, math.prod(shape) + 1, device=rows.device).double().view(*shape, 1)

    (numbers,) = write_out(graph, counted, (tokens,), rows)
    narrow = Narrow(size(tokens, -1), 1, torch.float64)
    return write_narrow(graph, layer.put[0], {tokens: numbers}, narrow)[rows]


def _weights(graph: Graph, layer: Buffers, own: Node) -> Node:
    """[T, K]: what is read of the place of each slot, of a one."""
    outs, root = layer.inside.second.node, layer.root
    dtype = torch.promote_types(outs.meta["val"].dtype, torch.float32)
    (ones,) = write_out(graph, lambda own: layer.slots.as_given(own).to(dtype), (own,), root)
    narrow, parts = Narrow(size(outs, -1), layer.top_k, dtype), {outs: ones}
    if layer.into is not None:
        zeros = partial(_zeros, columns=layer.top_k, dtype=dtype)
        (parts[layer.into],) = write_out(graph, zeros, (layer.into,), root)
    weights = write_narrow(graph, layer.read, parts, narrow)[root]
    if rank(root) == 2:
        return weights
    return write_out(graph, lambda each: each.flatten(0, -2), (weights,), root)[0]


def _zeros(rows: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*rows.shape[:-1], columns, dtype=dtype, device=rows.device)
