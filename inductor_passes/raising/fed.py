"""Weights [T, E] on what goes into products of all tokens with all experts.

    rows = hidden_states.repeat(num_experts, 1) * weights.T.reshape(-1, 1)  # Llama 4
    hidden = gate(...) * weights.unsqueeze(-1)

Where they are zero, rows are, and experts without biases, with a gate that makes zero of zero, give zero for them: what
they give is added up as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.choices import ids_of_weights
from inductor_passes.raising.evaluation import Cut
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import WeightedSum
from inductor_passes.raising.totals import Given, Part, by_expert, weighed
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    is_cast,
    is_one,
    is_shown,
    rank,
    same_shape,
    size,
    unseen,
)
from inductor_passes.raising.writing import of_any_rows


class Fed(NamedTuple):
    """What is weighed: rows behind the tokens, or what a gate gives."""

    rows: Node
    ids: Node
    is_input: bool


def fed_into(shown: Node, is_input: bool) -> Iterator[Fed]:
    """What is weighed by a choice in what is `shown` to a product: what is multiplied with a number for each row."""
    product = unseen(shown)
    has_all = same_shape(
        [product.meta["val"].numel()], [shown.meta["val"].numel()]
    )  # else no number for each
    for rows, numbers in _factors(product) if has_all else ():
        ids = ids_of_weights(numbers)
        if isinstance(ids, Node):
            yield Fed(rows if is_input else unseen(_uncast(rows)), ids, is_input)


def _factors(product: Node) -> Iterator[tuple[Node, Node]]:
    """(rows, numbers): a number for each row."""
    product = _uncast(product)
    if product.target is aten.mul.Tensor:
        for rows, numbers in (args(product), args(product)[::-1]):
            if rank(rows) > 0 and rank(numbers) > 0 and is_one(size(numbers, -1)):
                yield rows, numbers


def _uncast(node: Node) -> Node:
    return unseen(args(node)[0]) if is_cast(node) else node


def weighed_rows(
    root: Node, parts: Mapping[Node, Part], indices: Indices, tried: Sequence[Tensor]
) -> WeightedSum:
    """What weighs `parts`, of which `root` is made. Raises Refusal where it is not by one tensor, zero elsewhere."""
    found = weighed([root], Given(parts, indices.num_experts, by_expert), indices, tried)
    if found is None:
        raise Refusal(root, f"{describe(root)} is not what goes into experts, weighed by one tensor")
    return found


def weighed_tokens(
    rows: Node, fed: Fed, indices: Indices, tried: Sequence[Tensor]
) -> tuple[Node, WeightedSum]:
    """The tokens [T, H], or [B, S, H], that are weighed. Raises Refusal where `rows` [E, T, H] are of others."""
    for tokens in _shown(fed.rows, indices):
        given = Given({tokens: _alike}, indices.num_experts, _of_tokens)
        found = weighed([rows], given, indices, tried)
        if found is not None:
            return tokens, found
    raise Refusal(rows, f"{describe(rows)} is not the tokens, for each expert weighed by one tensor")


def _alike(rows: Tensor, place: int) -> Tensor:
    return rows[:, 0]


def _of_tokens(weights: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    return by_expert(weights, ids, rows[:, :1].expand_as(rows))


def _shown(rows: Node, indices: Indices) -> Iterator[Node]:
    """What `rows` may show for each expert: tensors with a row for each token."""
    leading, found = indices.ids.meta["val"].shape[:-1], [rows]
    while is_shown(found[-1]) or found[-1].target in _REPEATS:
        found.append(args(found[-1])[0])
    for node in found:
        shape = node.meta["val"].shape[:-1]
        if same_shape(shape, leading) or same_shape(shape, [indices.num_tokens]):
            yield node


_REPEATS = (aten.repeat.default, aten.gather.default, aten.index.Tensor, aten.index_select.default)


def expect_zero_of_zero(gate: Cut, firsts: Sequence[Node], activated: Node) -> None:
    """Refuses a gate that makes something of nothing: what nobody chose would be in the sum."""
    zeros: list[Any] = [torch.zeros(1, each.meta["val"].shape[-1], dtype=torch.float64) for each in firsts]
    try:
        made = of_any_rows(gate, firsts, activated)(*zeros)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError):
        made = None
    if made is None or bool(made.ne(0).any()):
        raise Refusal(
            activated, "what goes into experts is weighed, and their gate does not make zero of zero"
        )
