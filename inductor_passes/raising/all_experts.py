"""Layers that multiply every token with every expert at once, and take what was chosen.

    hidden = gate(torch.einsum("th,eih->tei", hidden_states, w13))
    out = (torch.einsum("tei,ehi->teh", hidden, w2) * weights.unsqueeze(-1)).sum(1)

`weights` [T, E] has been scattered into zeros, or what a token chose is gathered out of what all experts give; or they
weigh what goes into a product (`fed.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising import buffer_trials
from inductor_passes.raising.buffers import Buffered, buffered
from inductor_passes.raising.choices import chosen_ids, stray_ids
from inductor_passes.raising.evaluation import concrete
from inductor_passes.raising.fed import Fed, expect_zero_of_zero, fed_into, weighed_rows, weighed_tokens
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import Experts, Parts, Tokens, WeightedSum
from inductor_passes.raising.place_trials import Known
from inductor_passes.raising.places import Placed, placed
from inductor_passes.raising.some_experts import total_of_some
from inductor_passes.raising.spreads import (
    Inside,
    Spread,
    expect_gate,
    expect_own_rows,
    inside_of,
    outcome,
    spreads,
)
from inductor_passes.raising.tokens import flat
from inductor_passes.raising.totals import as_given, ends, unweighed
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    has_layout,
    is_cast,
    is_one,
    is_shown,
    rank,
    same_shape,
    seen_from,
    size,
    unseen,
)


class Everyone(NamedTuple):
    """One layer."""

    inside: Inside
    ids: Node
    """By which tokens choose among what the second product gives."""
    fed: Fed | None
    """What is weighed, where that is not what the second product gives."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All products."""
        return self.inside.products

    def experts(self) -> Experts:
        """The layer as its stages want it. Raises Refusal where it does not compute what they do."""
        return _experts(self)


def everyone(graph: Graph) -> Iterator[Everyone | Placed | Buffered]:
    """Every layer in `graph` that multiplies rows with all experts at once: all tokens, of which it takes some by a
    choice, or those that it places.
    """
    known, tried, buffers = spreads(graph), Known(), buffer_trials.Known()
    for second in known.values():
        inside = inside_of(unseen(second.rows), second, known)
        layer = (placed(inside, tried) or buffered(inside, buffers)) if inside.firsts else None
        layer = layer or _everyone(inside, known)
        if layer is not None:
            yield layer


def _everyone(inside: Inside, known: Mapping[Node, Spread]) -> Everyone | None:
    second = inside.second
    ids = _ids(second)
    if inside.firsts and ids is not None:
        return Everyone(inside, ids, None)
    for fed in fed_into(second.rows, is_input=False):
        inner = inside_of(fed.rows, second, known)
        if inner.firsts:
            return Everyone(inner, fed.ids, fed)
    inputs = chain.from_iterable(fed_into(first.rows, is_input=True) for first in inside.firsts)
    fed = next(inputs, None)
    return fed and Everyone(inside, fed.ids, fed)


def _ids(second: Spread) -> Node | None:
    """By which tokens choose among what experts give; None in a mixture of all."""
    parts = second.given.parts
    try:
        return chosen_ids(ends(second.product.graph, parts), parts)
    except Refusal:
        return None


def _experts(layer: Everyone) -> Experts:
    inside, second = layer.inside, layer.inside.second
    indices = Indices(layer.ids, second.num_experts, {})
    expect_gate(inside)
    if layer.fed is None or layer.fed.is_input:  # else what is weighed says what is where
        expect_own_rows(inside)
    *firsts, last = (outcome(each, indices) for each in (*inside.firsts, second))
    if layer.fed is None:
        tokens = Tokens(_tokens_of_all(layer, indices), None)
        indices, weighted_sum = total_of_some(second.product.graph, second.given, indices)
    else:
        tried = [*indices.samples, *stray_ids(indices)]
        tokens, weights = _weighed_before(layer, layer.fed, indices, tried)
        given = second.given._replace(terms=as_given)
        found = unweighed(second.product.graph, given, indices, tried)
        weighted_sum = weights._replace(root=found.root, into=found.into)
    parts = Parts(tokens, tuple(firsts), inside.gate, {}, inside.activated, last)
    return Experts(indices, parts, weighted_sum)


def _tokens_of_all(layer: Everyone, indices: Indices) -> Node:
    inside = layer.inside
    tokens = [_tokens(each, indices) for each in inside.firsts]
    if len({_before_cast(each, indices) for each in tokens}) > 1:
        raise Refusal(inside.second.product, "the products before the gate have different inputs")
    return tokens[0]


def _before_cast(tokens: Node, indices: Indices) -> tuple[Node, torch.dtype]:
    """What tokens are, and in which dtype: autocast rounds them for each product anew."""
    return flat(args(tokens)[0], indices) if is_cast(tokens) else tokens, tokens.meta["val"].dtype


def _weighed_before(
    layer: Everyone, fed: Fed, indices: Indices, tried: Sequence[Tensor]
) -> tuple[Tokens, WeightedSum]:
    """What is weighed, and by what. Raises Refusal where those that nobody chose would add anything."""
    inside = layer.inside
    biased = (*inside.firsts, inside.second) if fed.is_input else (inside.second,)
    if any(each.bias is not None for each in biased):
        raise Refusal(
            inside.second.product, "what goes into experts with biases is weighed, not what they give"
        )
    if not fed.is_input:
        given = inside.firsts[0].given.parts[inside.firsts[0].node]
        found = weighed_rows(inside.second.rows, {fed.rows: given}, indices, tried)
        return Tokens(_tokens_of_all(layer, indices), None), found
    if any(unseen(each.rows) is not unseen(inside.firsts[0].rows) for each in inside.firsts):
        raise Refusal(inside.second.product, "the products before the gate have different inputs")
    expect_zero_of_zero(inside.gate, [each.node for each in inside.firsts], inside.activated)
    tokens, found = weighed_tokens(inside.firsts[0].rows, fed, indices, tried)
    return Tokens(tokens, found.topk_weights), found


def _tokens(first: Spread, indices: Indices) -> Node:
    """The tokens that each expert reads all of. Raises Refusal where it reads something else."""
    if rank(first.rows) == 2 or is_one(size(first.rows, 0)):
        return flat(first.rows, indices)
    source, found = first.rows, None
    while is_shown(source):
        source = args(source)[0]
        found = _read_by_all(source, first, len(indices.samples[0])) or found
    if found is None:
        raise Refusal(first.product, f"experts read {describe(first.rows)}, not all of them all tokens")
    return flat(found, indices)


def _read_by_all(source: Node, first: Spread, tokens: int) -> Node | None:
    """The rows of which every expert reads all, if these are `source` or what that repeats."""
    shown, columns = seen_from(source, first.rows), concrete(size(first.rows, 2)) or 0
    sizes, strides = (first.num_experts, tokens, columns), (0, columns, 1)
    if source.target is aten.repeat.default and args(source)[1] == [first.num_experts, 1]:
        source, strides = args(source)[0], (tokens * columns, columns, 1)
    is_seen = shown is not None and has_layout(shown, sizes, strides)
    return source if is_seen and same_shape([size(source, -1)], [size(first.rows, 2)]) else None
