"""Layers that place tokens by masks, as GShard, Switch and DeepSpeed do: [T, E, C], or [B, S, E, C] by batch.

    rows = torch.einsum("tec,th->ech", mask, hidden_states)
    out = torch.einsum("tec,ech->th", weights, experts(rows))

Every expert has C places, and who finds none is dropped. What masks hold is tried (`place_trials.py`). The slots of a
token are those of the ids that masks are made of, weighed by what it has at all places of their expert; a slot without
a place has the id -1, which our operators leave out.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe, write_out
from inductor_passes.raising.evaluation import concrete
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import Experts, Parts, Tokens, WeightedSum
from inductor_passes.raising.place_masks import Mask, Masks, Moved, masks_around, num_choices
from inductor_passes.raising.place_trials import Known, order_of_places
from inductor_passes.raising.seen_rows import Sizes, seen_rows
from inductor_passes.raising.spreads import Inside, expect_gate, expect_own_rows, outcome
from inductor_passes.raising.views_of_rows import args, is_shown, only_user, rank


class Placed(NamedTuple):
    """One layer."""

    masks: Masks
    known: Known

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All products with experts."""
        return self.masks.inside.products

    def experts(self) -> Experts:
        """The layer as its stages want it. Raises Refusal where it does not compute what they do."""
        return _experts(self.masks, self.known)


def placed(inside: Inside, known: Known) -> Placed | None:
    """The layer around some products, if it is one, with what is `known` of others."""
    masks = masks_around(inside)
    return masks and Placed(masks, known)


def _experts(layer: Masks, known: Known) -> Experts:
    inside, graph = layer.inside, layer.combine.product.graph
    expect_gate(inside)
    expect_own_rows(inside)
    tokens, root = _tokens(layer), _root(layer)
    masks, is_minor = (layer.combine.mask, layer.dispatch.mask), order_of_places(layer, known)
    sums = tuple(_Sums(mask, layer.num_experts, each) for mask, each in zip(masks, is_minor, strict=True))
    with graph.inserting_before(root):
        weights, ids = write_out(
            graph, _slots(sums[0], sums[1], layer), [*(mask.node for mask in masks), *layer.choices], root
        )
    indices = Indices(ids, layer.num_experts, {})
    *firsts, last = (outcome(each, indices) for each in (*inside.firsts, inside.second))
    parts = Parts(Tokens(tokens, None), tuple(firsts), inside.gate, {}, inside.activated, last)
    return Experts(indices, parts, WeightedSum(weights, root))


class _Sums(NamedTuple):
    """How a mask becomes [T, E]: what a token has at all places of an expert."""

    mask: Mask
    num_experts: int
    is_minor: bool
    """Whether of one place that of each expert comes next, and not the next place of one expert."""

    def __call__(self, value: Tensor) -> Tensor:
        """[T, E] of a mask."""
        shape, dim = ((-1, self.num_experts), 1) if self.is_minor else ((self.num_experts, -1), 2)
        return self.mask.by_token(value).flatten(0, 1).unflatten(1, shape).sum(dim)


def _slots(weigh: _Sums, place: _Sums, layer: Masks) -> Any:
    """What gives weights and ids [T, K]: -1 where a token has no place, or has the expert already."""
    columns = [num_choices(each, layer.num_tokens) or 1 for each in layer.choices]

    def run(weights: Tensor, mask: Tensor, *choices: Tensor) -> tuple[Tensor, Tensor]:
        shown = [
            each if each.shape[1:] == (number,) else each.reshape(-1, number)
            for each, number in zip(choices, columns, strict=True)
        ]
        ids = torch.cat(shown, 1) if shown[1:] else shown[0]
        is_placed = place(mask).gather(1, ids).ne(0)
        if shown[1:]:  # a second choice may be the first one, where all others are -inf
            is_placed = is_placed & ~ids.unsqueeze(2).eq(ids.unsqueeze(1)).tril(-1).any(2)
        return weigh(weights).gather(1, ids), ids.where(is_placed, -1)

    return run


def _sizes(layer: Masks) -> Sizes:
    return Sizes(layer.num_tokens, concrete(layer.num_tokens) or 0)


def _tokens(layer: Masks) -> Node:
    """The innermost [T, H] that is placed, or else the innermost [B, S, H]. Raises Refusal where there is none."""
    moved, sizes = layer.dispatch, _sizes(layer)
    found, node = [moved.rows], moved.rows
    while is_shown(node):
        node = args(node)[0]
        found.append(node)
    in_order = [each for each in found if _is_in_order(each, moved.rows, sizes, (-1, moved.columns))]
    flat = [each for each in in_order if rank(each) == 2]
    _expect_any(in_order, moved)
    return (flat or in_order)[-1]


def _root(layer: Masks) -> Node:
    """The sum, as [T, H] if it is seen so. Raises Refusal where it is not in the order of tokens."""
    moved, sizes, node = layer.combine, _sizes(layer), layer.combine.product
    found = [node]
    while (user := only_user(node)) is not None and is_shown(user):
        node = user
        found.append(node)
    in_order = [each for each in found if _is_in_order(moved.product, each, sizes, (moved.columns, -1))]
    flat = [each for each in in_order if rank(each) == 2]
    _expect_any(in_order, moved)
    return flat[0] if flat else in_order[-1]


def _expect_any(in_order: list[Node], moved: Moved) -> None:
    if not in_order:
        raise Refusal(
            moved.product, f"{describe(moved.product)} has no rows that are seen to be those of tokens"
        )


def _is_in_order(source: Node, shown: Node, sizes: Sizes, columns: tuple[int, int]) -> bool:
    """Whether T rows are shown one by one as they lie."""
    rows = seen_rows(source, shown, sizes, columns) if min(rank(source), rank(shown)) > 1 else None
    return rows is not None and torch.equal(rows.flatten(), torch.arange(sizes.number))
