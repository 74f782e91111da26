"""The sum over a token's experts, each weighed, where it is written in any way out of what experts give.

Between what experts give and their sum stand operators that add and multiply, and some that move rows. What those make
is a quotient of polynomials in rows and weights: one that is ours at random numbers is ours. None of them lets two
columns of a row meet, so few columns tell of all.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.elsewhere import are_of_all, is_zero_elsewhere, of_sizes
from inductor_passes.raising.evaluation import VIEWS, Cut, cut, evaluate, is_size
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import Score, WeightedSum, as_they_are
from inductor_passes.raising.views_of_rows import args, aten, is_cast, is_one, rank, readers, size
from inductor_passes.raising.weights import are_weights, chosen

_COLUMNS, _CLOSE = 5, 1e-9
_ALIGNED = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.where.self,
    aten.addcmul.default,
    aten.gather.default,
    aten.scatter_add.default,
)
"""Each column of what they give is made of the same column of what they read."""
_UNDERSTOOD = (
    *_ALIGNED,
    *VIEWS,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.cat.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.unbind.int,
    aten.permute.default,
    aten.clone.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.index_put.default,
    aten.index_add.default,
    aten.bmm.default,
    aten.mm.default,
    operator.getitem,
)


def _of_ids(numbers: Tensor, ids: Tensor) -> Tensor:
    """Those of all experts, which are zero where nobody was chosen."""
    return numbers.gather(1, ids)


Part = Callable[[Tensor, int], Tensor]
"""What a node holds of rows [T, N, C], where ids are the sample of this number."""


class Given(NamedTuple):
    """What experts give for tokens, rows [T, N, C]: of all N experts, or of the N choices of each token."""

    parts: Mapping[Node, Part]
    number: int
    of_slots: Callable[[Tensor, Tensor], Tensor]
    """[T, K, C]: of these rows, and of ids [T, K] in range, those of the slots."""


def of_experts(rows: Tensor, ids: Tensor) -> Tensor:
    """The rows of slots, of those of all experts."""
    return rows.gather(1, ids.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def of_choices(rows: Tensor, ids: Tensor) -> Tensor:
    """The rows of slots, which are all."""
    return rows


def total(graph: Graph, given: Given, indices: Indices, tried: Sequence[Tensor]) -> WeightedSum:
    """The sum, which is ours for all ids `tried`: the samples of `indices`, and some out of range, which weigh nothing.

    Raises:
        Refusal: what experts give is not added up, weighed by one tensor [T, K], or something else reads it.
    """
    found, columns = list(ends(graph, given.parts)), _columns(given.parts)
    few = {tokens: _Few(columns, indices, tokens) for tokens in {*map(len, tried)}}
    for root, numbers, score in chain(_candidates(found, given, indices), _of_all(found, given, indices)):
        steps = _steps(cut([root], {numbers, indices.ids, *given.parts}.__contains__), given.parts)
        samples = ((few[len(ids)], place, ids) for place, ids in enumerate(tried))
        if all(_agrees(steps, numbers, score, given, each) for each in samples):
            return WeightedSum(numbers, root, score)
    raise Refusal(
        found[0], f"{describe(found[0])} is not the sum of what experts give, weighed by one tensor"
    )


def ends(graph: Graph, parts: Mapping[Node, Part]) -> Iterator[Node]:
    """Every node that all `parts` lead to, through what is understood here, while they lead to nothing else.

    Raises:
        Refusal: there is none: something else reads what experts give.
    """
    node, missing, is_found = next(iter(parts)), {*parts}, False
    unread: dict[Node, int] = {}
    for node in graph.nodes:
        read = [each for each in node.all_input_nodes if each in unread and node in readers(each)]
        if node not in missing and not read:
            continue
        if node not in missing and not _is_understood(node, _columns(parts)):
            break
        missing.discard(node)
        for each in read:
            unread[each] -= 1
        unread[node] = len(readers(node))
        is_end = not missing and isinstance(node.meta["val"], Tensor)
        if is_end and [each for each, count in unread.items() if count] == [node]:
            is_found = True
            yield node
    if not is_found:
        raise Refusal(node, f"{describe(node)} reads what experts give, not a weighted sum")


def _columns(parts: Iterable[Node]) -> Any:
    return size(next(iter(parts)), -1)


def _is_understood(node: Node, columns: Any) -> bool:
    """Whether `node` adds, multiplies or moves whole rows."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    is_whole = all(isinstance(each, Tensor) and _place(each, columns) is not None for each in values)
    return is_whole and (is_cast(node) or node.target in _UNDERSTOOD)


def _place(value: Tensor, columns: Any) -> int | None:
    """Which dimension, counted from the end, is that of columns: the last, of several rows perhaps, or another.

    Where several may be, that whose numbers lie side by side. None where it cannot be told.
    """
    if value.dim() < 2 or not isinstance(columns, int):
        return None
    sizes = [each if isinstance(each, int) else -1 for each in value.shape]
    found = [dim for dim in range(-len(sizes), -1) if sizes[dim] == columns]
    if sizes[-1] > 0 and sizes[-1] % columns == 0:
        found.append(-1)
    dense = [dim for dim in found if is_one(value.stride(dim))] if len(found) > 1 else found
    return dense[0] if len(dense) == 1 else None


def _candidates(roots: Iterable[Node], given: Given, indices: Indices) -> Iterator[tuple[Node, Node, Score]]:
    """What may be a sum and its weights, before they were rounded; nearer the router first."""
    for root in roots:
        region = cut([root], {indices.ids, *given.parts}.__contains__)
        for node in (*region.leaves, *region.nodes):
            if rank(node) > 1 and are_weights(node, indices) and chosen(node, indices) is node:
                yield root, node, as_they_are


def _of_all(roots: Iterable[Node], given: Given, indices: Indices) -> Iterator[tuple[Node, Node, Score]]:
    """The same of weights [T, E], where these are zero for who was not chosen."""
    seen: dict[Node, bool] = {}
    for root in roots:
        region = cut([root], {indices.ids, *given.parts}.__contains__)
        behind = _steps(region, given.parts).behind
        for node in region.nodes:
            if node not in behind and are_of_all(node, indices):
                if node not in seen:
                    seen[node] = is_zero_elsewhere(node, indices)
                if seen[node]:
                    yield root, node, _of_ids


class _Steps(NamedTuple):
    """How a sum is computed: first what is made of weights, then what is made of rows."""

    between: Cut
    behind: set[Node]
    """Rows, and what is made of them."""
    constants: list[Node]
    """What rows alone meet."""
    others: list[Node]


def _steps(between: Cut, parts: Iterable[Node]) -> _Steps:
    behind = {*parts}
    for node in between.nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    constants = [node for node in between.nodes if node not in behind and _is_constant(node, behind)]
    others = [node for node in between.nodes if node not in behind and node not in constants]
    return _Steps(between, behind, constants, others)


def _is_constant(node: Node, behind: set[Node]) -> bool:
    """Whether rows alone meet what is filled, or holds anything yet."""
    return node.target in (aten.full.default, aten.empty.memory_format) and behind.issuperset(readers(node))


def _agrees(
    steps: _Steps, numbers: Node, score: Score, given: Given, sample: tuple["_Few", int, Tensor]
) -> bool:
    """Whether the sum is ours for ids [T, K]: of numbers large, small and negative.

    With ids out of range it is ours, or these are none that PyTorch takes.
    """
    few, place, ids = sample
    indices = few.indices
    generator = torch.Generator().manual_seed(0)
    weights = of_sizes(ids.shape, 2, generator)
    if score is _of_ids:
        weights = torch.zeros(len(ids), indices.num_experts, dtype=torch.float64).scatter(1, ids, weights)
    rows = torch.randn(len(ids), given.number, _COLUMNS, generator=generator, dtype=torch.float64)
    in_range = (ids >= 0) & (ids < indices.num_experts)
    known: dict[Node, Any] = {
        leaf: indices.size(leaf, len(ids)) for leaf in filter(is_size, steps.between.leaves)
    }
    known |= {indices.ids: indices.in_shape(ids), numbers: indices.in_shape(weights)}
    parts = {node: part(rows, place) for node, part in given.parts.items()}
    try:
        ours = _computed(steps, known, parts, few)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError):
        return not bool(in_range.all())
    kept = score(weights, ids).where(in_range, 0.0).unsqueeze(-1)
    terms = kept * given.of_slots(rows, ids.where(in_range, 0))
    ours, wanted = ours.reshape(-1, ours.shape[-1]), terms.sum(1)
    is_alike = ours.shape == wanted.shape
    return is_alike and bool(((ours - wanted).abs() <= _CLOSE * terms.abs().sum(1)).all())


class _Few:
    """How rows are tried: with few of their `columns`, of so many tokens."""

    def __init__(self, columns: Any, indices: Indices, tokens: int) -> None:
        self.columns, self.indices, self.tokens = columns, indices, tokens
        self._shapes: dict[Node, list[int]] = {}  # asked for in every trial

    def shape(self, node: Node) -> list[int]:
        """The shape that rows have then. Raises ValueError where that is not known."""
        if node not in self._shapes:
            self._shapes[node] = self._shape(node)
        return self._shapes[node]

    def _shape(self, node: Node) -> list[int]:
        value = node.meta["val"]
        shape, place = value.shape, _place(value, self.columns)
        sizes = [self.indices.given(each, self.tokens) for each in shape]
        if place is None or None in sizes:
            raise ValueError(f"{describe(node)} has a size that does not follow from the number of tokens")
        sizes[place] = shape[place] // self.columns * _COLUMNS
        return [each or 0 for each in sizes]

    def narrowed(self, value: Tensor, node: Node) -> Tensor:
        """What meets the rows that `node` gives. Raises ValueError where it differs along their columns."""
        place = _place(node.meta["val"], self.columns) or 0
        if value.dim() < -place:
            return value
        column = value.narrow(place, 0, 1)
        if not bool((value == column).all()):
            raise ValueError("columns are weighed differently")
        few = [-1] * value.dim()
        few[place] = self.shape(node)[place]
        return column.expand(few)


def _computed(steps: _Steps, known: Mapping[Node, Any], parts: Mapping[Node, Tensor], few: _Few) -> Tensor:
    """What is at the end: weights are computed first, then rows, of few columns."""
    rows = {node: part.reshape(few.shape(node)) for node, part in parts.items()}
    filled = {node: _filled(node, few) for node in steps.constants}
    values = evaluate(steps.others, known) | filled | rows
    for node in steps.between.nodes:
        if node in steps.behind:
            values[node] = _row(node, values, steps.behind, few)
    return values[steps.between.nodes[-1]]


def _filled(node: Node, few: _Few) -> Tensor:
    """One number, as many times as there are rows; NaN where there may be any."""
    number = args(node)[1] if node.target is aten.full.default else math.nan
    value = torch.tensor(number, dtype=torch.float64)
    return value.expand(few.shape(node)) if rank(node) > 1 else value


def _row(node: Node, known: Mapping[Node, Any], behind: set[Node], few: _Few) -> Any:
    if isinstance(node.meta["val"], tuple | list):
        return evaluate([node], known)[node]
    wanted = few.shape(node)
    if node.target in VIEWS:
        source = known[args(node)[0]]
        return source.expand(wanted) if node.target is aten.expand.default else source.reshape(wanted)
    given = {each: known[each] for each in node.all_input_nodes}
    if node.target in _ALIGNED:
        others = [each for each in given if each not in behind and isinstance(given[each], Tensor)]
        given |= {each: few.narrowed(given[each], node) for each in others}
    value = evaluate([node], given)[node]
    if list(value.shape) != wanted:
        raise ValueError(f"{describe(node)} takes some columns from others")
    return value
