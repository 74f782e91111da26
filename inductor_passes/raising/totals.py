"""The sum over a token's experts, each weighed, where it is written in any way out of what experts give.

What stands between what experts give and their sum is tried on random rows (`row_trials.py`). So is what stands between
rows and products of all experts, where a model weighs what goes into these.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.added import added_to
from inductor_passes.raising.choices import is_of_router
from inductor_passes.raising.elsewhere import is_zero_elsewhere, of_sizes, ways_of_all
from inductor_passes.raising.evaluation import VIEWS, WIDE, Cut, cut, is_size, numbers
from inductor_passes.raising.gates import are_columns
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import Score, WeightedSum, as_they_are, scaled
from inductor_passes.raising.row_trials import (
    ALIGNED,
    COLUMNS,
    Few,
    Steps,
    computed,
    place_of_columns,
    steps_between,
)
from inductor_passes.raising.views_of_rows import aten, has_numbers, is_cast, rank, readers, size
from inductor_passes.raising.weights import are_weights, chosen

_CLOSE = 1e-9
_UNDERSTOOD = (
    *ALIGNED,
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
    aten.slice_scatter.default,
    aten.constant_pad_nd.default,
    aten.repeat.default,
    aten.embedding.default,
    aten.bmm.default,
    aten.mm.default,
    operator.getitem,
)


_SCALES = (aten.mul.Tensor, aten.div.Tensor)


def _of_ids(numbers: Tensor, ids: Tensor) -> Tensor:
    """Those of all experts, which are zero where nobody was chosen."""
    return numbers.gather(1, ids)


def _of_ids_by_expert(numbers: Tensor, ids: Tensor) -> Tensor:
    """The same of numbers [E, T]."""
    return numbers.T.gather(1, ids)


def _ones(numbers: Tensor, ids: Tensor) -> Tensor:
    """Where nothing is weighed."""
    return torch.ones_like(ids, dtype=torch.float32)


Part = Callable[[Tensor, int], Tensor]
"""What a node holds of rows [T, N, C], where ids are the sample of this number."""

Candidate = tuple[Node, Node, Score]
"""What may be a sum, and of what its weights are made."""

Terms = Callable[[Tensor, Tensor, Tensor], Tensor]
"""[..., M, C]: of weights [T, K], ids [T, K] in range, and rows, what each row of a sum is the sum of."""


class Given(NamedTuple):
    """What experts give for tokens, rows [T, N, C]: of all N experts, or of the N choices of each token."""

    parts: Mapping[Node, Part]
    number: int
    terms: Terms
    into: Node | None = None
    """What their sum is added to, if that has a row for each token as well."""
    scales: Node | None = None
    """E numbers, by which what experts give is multiplied, if it is."""


def of_experts(weights: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Weighed rows of slots, out of those of all experts."""
    return weights.unsqueeze(-1) * rows.gather(1, ids.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def of_choices(weights: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Weighed rows of slots, which are all."""
    return weights.unsqueeze(-1) * rows


def as_given(weights: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Rows that have been weighed."""
    return rows


def by_expert(weights: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """[E, T, 1, C]: rows of all experts, zero where nobody was chosen, none added to another."""
    of_all = weights.new_zeros(rows.shape[:2]).scatter_add(1, ids, weights)
    return (rows * of_all.unsqueeze(-1)).transpose(0, 1).unsqueeze(2)


def total(graph: Graph, given: Given, indices: Indices, tried: Sequence[Tensor]) -> WeightedSum:
    """The sum, which is ours for all ids `tried`: the samples of `indices`, and some out of range, which weigh nothing.

    Raises:
        Refusal: what experts give is not added up, weighed by one tensor [T, K], or something else reads it.
    """
    roots = list(ends(graph, given.parts))
    ways = [*_with_what_is_there(roots, given)]
    scaled = (way for each in ways for way in _scaled_by_expert(*each, indices))
    found = next(filter(None, (_times_a_number(*way, indices, tried) for way in chain(ways, scaled))), None)
    if found is None:
        raise Refusal(
            roots[0], f"{describe(roots[0])} is not the sum of what experts give, weighed by one tensor"
        )
    return found


def weighed(
    roots: Sequence[Node], given: Given, indices: Indices, tried: Sequence[Tensor]
) -> WeightedSum | None:
    """The first of some nodes that is made of rows, weighed by one tensor, in the way that is `given`."""
    found = ((1.0, each) for each in _candidates(roots, given, indices))
    return _first_of(found, given, indices, tried)


def _times_a_number(
    roots: Sequence[Node], given: Given, indices: Indices, tried: Sequence[Tensor]
) -> WeightedSum | None:
    """The same, which may be times a number."""
    found = _with_factors(_candidates(roots, given, indices), given)
    return _first_of(found, given, indices, tried)


def unweighed(graph: Graph, given: Given, indices: Indices, tried: Sequence[Tensor]) -> WeightedSum:
    """The same where nothing is weighed, but for weights of one. Raises Refusal as well."""
    roots = list(ends(graph, given.parts))
    for some, way in _with_what_is_there(roots, given):
        candidates = ((1.0, (root, indices.ids, _ones)) for root in some)
        if (found := _first_of(candidates, way, indices, tried)) is not None:
            return found
    raise Refusal(roots[-1], f"{describe(roots[-1])} is not the sum of what experts give")


def _with_what_is_there(roots: Sequence[Node], given: Given) -> Iterator[tuple[Sequence[Node], Given]]:
    """Sums of rows alone, then those that begin with what a shared expert gives, or with a residual."""
    yield roots, given
    for root in roots:
        there = added_to(root, given.parts)
        if len(there) == 1:
            yield [root], given._replace(into=there[0])


def _scaled_by_expert(
    roots: Sequence[Node], given: Given, indices: Indices
) -> Iterator[tuple[Sequence[Node], Given]]:
    """The same, times E numbers that stand between rows and their sum, and do not follow from ids."""
    between = _before(roots[-1], given, indices)
    behind = steps_between(between, [indices.ids, *given.parts]).behind
    for node in reversed((*between.leaves, *between.nodes)):
        is_floating = node not in behind and rank(node) > 0 and node.meta["val"].dtype in WIDE
        if is_floating and has_numbers(node, indices.num_experts):
            yield roots, given._replace(scales=node)


def _first_of(
    candidates: Iterable[tuple[float, Candidate]], given: Given, indices: Indices, tried: Sequence[Tensor]
) -> WeightedSum | None:
    columns = _columns(given.parts)
    few = {tokens: Few(columns, partial(indices.given, tokens=tokens)) for tokens in {*map(len, tried)}}
    rows = [*given.parts] if given.into is None else [*given.parts, given.into]
    for factor, (root, weights, score) in candidates:
        ends_here = {weights, indices.ids, given.scales, *rows}
        steps = steps_between(cut([root], ends_here.__contains__), rows)
        samples = ((few[len(ids)], place, ids) for place, ids in enumerate(tried))
        found = WeightedSum(weights, root, score, given.into, given.scales)
        if all(_agrees(steps, found, given, indices, each, factor) for each in samples):
            return found if factor == 1 else found._replace(score=_scaled(score, factor))
    return None


def _with_factors(candidates: Iterable[Candidate], given: Given) -> Iterator[tuple[float, Candidate]]:
    """What may be a sum as it is, then times each number that is written between rows and it, as LoRA's `alpha / r`."""
    seen = []
    for each in candidates:
        seen.append(each)
        yield 1.0, each
    for root, weights, score in seen:
        between = cut([root], {weights, *given.parts}.__contains__)
        behind = steps_between(between, given.parts).behind - {*given.parts}
        for number in numbers(each for each in between.nodes if each in behind and each.target in _SCALES):
            yield from ((factor, (root, weights, score)) for factor in (number, 1 / number) if number)


def _scaled(score: Score, factor: float) -> Score:
    def run(numbers: Tensor, ids: Tensor) -> Tensor:
        return score(numbers, ids) * factor

    return run


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
        if node not in missing and not is_understood(node, _columns(parts)):
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
    """How many columns rows have, which one token's product with a matrix gives as [S, H, 1]."""
    rows = next(iter(parts))
    return size(rows, -2 if are_columns(rows.meta["val"]) else -1)


def is_understood(node: Node, columns: Any) -> bool:
    """Whether `node` adds, multiplies or moves whole rows."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    is_whole = all(
        isinstance(each, Tensor) and place_of_columns(each, columns) is not None for each in values
    )
    return is_whole and (is_cast(node) or node.target in _UNDERSTOOD)


def _before(root: Node, given: Given, indices: Indices) -> Cut:
    """Back to rows, to ids, and to logits, which are made of the same tokens as rows perhaps."""
    ends_here = {indices.ids, *given.parts}
    return cut([root], lambda node: node in ends_here or is_of_router(node))


def _candidates(roots: Sequence[Node], given: Given, indices: Indices) -> Iterator[Candidate]:
    return chain(_of_tokens(roots, given, indices), _of_all(roots, given, indices))


def _of_tokens(roots: Iterable[Node], given: Given, indices: Indices) -> Iterator[Candidate]:
    """What may be a sum and its weights, before they were rounded; nearer the router first."""
    for root in roots:
        region = _before(root, given, indices)
        for node in (*region.leaves, *region.nodes):
            if rank(node) > 1 and are_weights(node, indices) and chosen(node, indices) is node:
                yield root, node, as_they_are


def _of_all(roots: Iterable[Node], given: Given, indices: Indices) -> Iterator[Candidate]:
    """The same of weights [T, E] or [E, T], where these are zero for who was not chosen."""
    seen: dict[tuple[Node, bool], bool] = {}
    for root in roots:
        region = _before(root, given, indices)
        behind = steps_between(region, given.parts).behind
        for node in region.nodes:
            for is_by_expert in () if node in behind else ways_of_all(node, indices):
                key = node, is_by_expert
                if key not in seen:
                    seen[key] = is_zero_elsewhere(node, indices, is_by_expert)
                if seen[key]:
                    yield root, node, _of_ids_by_expert if is_by_expert else _of_ids


def _agrees(
    steps: Steps,
    found: WeightedSum,
    given: Given,
    indices: Indices,
    sample: tuple[Few, int, Tensor],
    factor: float,
) -> bool:
    """Whether the sum is ours for ids [T, K]: of numbers large, small and negative.

    With ids out of range it is ours, or these are none that PyTorch takes. Each sample has numbers of its own: of few
    tokens those of one may all lie on one side of a limit.
    """
    (few, place, ids), score = sample, found.score
    generator = torch.Generator().manual_seed(place)
    weights = _numbers(of_sizes(ids.shape, 2, generator), ids, score, indices)
    rows = torch.randn(len(ids), given.number, COLUMNS, generator=generator, dtype=torch.float64)
    in_range = (ids >= 0) & (ids < indices.num_experts)
    known: dict[Node, Any] = {
        leaf: indices.size(leaf, len(ids)) for leaf in filter(is_size, steps.between.leaves)
    }
    shown = weights if score is _of_ids_by_expert else indices.in_shape(weights)
    known |= {found.topk_weights: shown, indices.ids: indices.as_read(ids)}
    scales = torch.randn(indices.num_experts, generator=generator, dtype=torch.float64)
    known |= {} if given.scales is None else {given.scales: scales.view(given.scales.meta["val"].shape)}
    parts = {node: part(rows, place) for node, part in given.parts.items()}
    there = torch.randn(len(ids), 1, COLUMNS, generator=generator, dtype=torch.float64)
    parts |= {} if given.into is None else {given.into: there}
    try:
        ours = computed(steps, known, parts, few)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError):
        return not bool(in_range.all())
    kept = score(weights, ids).where(in_range, 0.0) * factor
    kept = kept if given.scales is None else scaled(kept, ids, scales)
    terms = given.terms(kept, ids.where(in_range, 0), rows)
    terms = terms if given.into is None else torch.cat([terms, there], 1)
    ours, wanted = ours.reshape(-1, ours.shape[-1]), terms.sum(-2).flatten(0, -2)
    is_alike = ours.shape == wanted.shape
    return is_alike and bool(((ours - wanted).abs() <= _CLOSE * terms.abs().sum(-2).flatten(0, -2)).all())


def _numbers(weights: Tensor, ids: Tensor, score: Score, indices: Indices) -> Tensor:
    """Of which `score` makes weights [T, K]."""
    if score not in (_of_ids, _of_ids_by_expert):
        return weights
    of_all = torch.zeros(len(ids), indices.num_experts, dtype=torch.float64).scatter(1, ids, weights)
    return of_all.T.contiguous() if score is _of_ids_by_expert else of_all
