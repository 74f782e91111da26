"""Which experts the weights of all experts choose: those that are not zero are weights of a top-k, scattered."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import Cut, cut, evaluate, is_size
from inductor_passes.raising.indices import Indices, is_chosen, is_integral
from inductor_passes.raising.layer import Score, as_they_are
from inductor_passes.raising.strays import stray_runs
from inductor_passes.raising.views_of_rows import rank
from inductor_passes.raising.weights import are_weights, chosen

_CLOSE = 1e-9

Part = Callable[[Tensor], Tensor]
"""What a tensor holds of the weights [T, E] of all experts."""


def _softmax(numbers: Tensor) -> Tensor:
    """Logits in a row of minus infinity, whose softmax is zero where nobody was chosen."""
    return numbers.softmax(-1)


SCORES = (as_they_are, _softmax)
"""What may make weights of numbers."""


def choice(column: Node, part: Part, num_experts: int) -> tuple[Indices, Node, Score]:
    """The ids [T, K], and the weights of which `column` has what is its part of all, and zeros.

    Weights are a score of numbers [T, K].

    Raises:
        Refusal: no ids choose what the column has, or it has something else.
    """
    indices = Indices(chosen_ids([column]), num_experts, {})
    ids, tried = indices.ids, [*indices.samples, *stray_ids(indices)]
    behind = _read_by(ids)
    between = cut([column], lambda node: node is ids or (node not in behind and _is_whole(node, indices)))
    weights = [leaf for leaf in between.leaves if leaf is not ids and not is_size(leaf)]
    score = _score(between, (column, part), weights[0], indices, tried) if len(weights) == 1 else None
    if score is None or not are_weights(weights[0], indices):
        raise Refusal(column, f"{describe(column)} is not what the tokens of its experts weigh them by")
    return indices, weights[0], score


def chosen_ids(columns: Iterable[Node], rows: Collection[Node] = ()) -> Node:
    """The ids of the first column that has some, as `ids_of_weights` finds them. Raises Refusal where none has."""
    column, *others = columns
    ids = ids_of_weights(column, rows)
    while isinstance(ids, tuple) and others:
        column, *others = others
        ids = ids_of_weights(column, rows)
    if isinstance(ids, tuple):
        raise Refusal(
            column, f"the weights of an expert come from {', '.join(map(describe, ids)) or 'nowhere'}"
        )
    return ids


def ids_of_weights(column: Node, rows: Collection[Node] = ()) -> Node | tuple[Node, ...]:
    """The ids that weights are computed from, but for `rows`; where it is not one, all that they are."""

    def is_ids(node: Node) -> bool:
        return is_integral(node) and node.meta["val"].dtype != torch.bool and rank(node) > 1

    leaves = cut([column], lambda node: node in rows or (is_ids(node) and is_chosen(node))).leaves
    ids = [leaf for leaf in leaves if is_ids(leaf)]
    return ids[0] if len(ids) == 1 else tuple(leaf for leaf in leaves if leaf not in rows)


def _is_whole(node: Node, indices: Indices) -> bool:
    """Whether `node` is a tensor that is made of others, and no other shape of one that has a number for each slot."""
    is_made = rank(node) >= 0 and not all(map(is_size, node.all_input_nodes))
    return is_made and chosen(node, indices) in (None, node)


def _read_by(node: Node) -> set[Node]:
    """What is computed from `node`, and it."""
    found, pending = {node}, [node]
    while pending:
        fresh = [user for user in pending.pop().users if user not in found]
        found.update(fresh)
        pending.extend(fresh)
    return found


def stray_ids(indices: Indices) -> Iterator[Tensor]:
    """Ids [T, K] that are out of range, if there may be any."""
    return (run.ids.flatten(0, -2) for run in stray_runs(indices))


def _score(
    between: Cut, column: tuple[Node, Part], numbers: Node, indices: Indices, tried: Sequence[Tensor]
) -> Score | None:
    """What makes of `numbers` the weights of which a column has its part; None where it has anything else."""
    return next((each for each in SCORES if _has_part(between, column, numbers, each, indices, tried)), None)


def _has_part(
    between: Cut,
    column: tuple[Node, Part],
    numbers: Node,
    score: Score,
    indices: Indices,
    tried: Sequence[Tensor],
) -> bool:
    """Whether a column has its part of the weights, and zeros: of numbers large, small and negative, for ids [T, K].

    An id that is out of range weighs nothing, or is none that PyTorch takes.
    """
    generator = torch.Generator().manual_seed(0)
    for ids in tried:
        weights, power = torch.randn(2, *ids.shape, generator=generator, dtype=torch.float64)
        weights = weights * 10 ** (2 * power)
        in_range = (ids >= 0) & (ids < indices.num_experts)
        sizes: dict[Node, Any] = {
            leaf: indices.size(leaf, len(ids)) for leaf in filter(is_size, between.leaves)
        }
        given = {indices.ids: indices.in_shape(ids), numbers: indices.in_shape(weights)}
        try:
            ours = evaluate(between.nodes, {**sizes, **given})[column[0]].flatten()
        except (RuntimeError, ValueError, TypeError, IndexError):
            if bool(in_range.all()):
                return False
            continue
        kept = score(weights).where(in_range, 0.0)
        all_weights = weights.new_zeros(len(ids), indices.num_experts).scatter_add(
            1, ids.where(in_range, 0), kept
        )
        wanted = column[1](all_weights).flatten()
        if ours.shape != wanted.shape or not bool(((ours - wanted).abs() <= _CLOSE * wanted.abs()).all()):
            return False
    return True
