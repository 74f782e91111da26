"""Which expert ids out of range a layer may have: they are tried, as those in range are."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import concrete, cut, evaluate, is_size
from inductor_passes.raising.finders import num_found_among
from inductor_passes.raising.indices import Indices, is_chosen, is_integral

_ROUNDS = 4
"""How often the numbers of several sources are put together, at random."""
_MOST_RUNS = 4096


class Run(NamedTuple):
    """Ids of which some are out of range."""

    sources: Mapping[Node, Tensor]
    """What they are computed from."""
    ids: Tensor
    """In the shape that they have in the graph."""
    is_stray: Tensor
    """[S]: whether the id of a slot is out of range."""

    def value(self, node: Node) -> Tensor | None:
        """`node` for these ids; None where PyTorch does not take them, or it depends on anything else."""
        return _value(node, self.sources)


def stray_runs(indices: Indices) -> list[Run]:
    """Runs that have every id out of range that there may be, as far as that can be told; none if there is none.

    Raises:
        Refusal: there are too many ids to try.
    """
    ids, num_experts = indices.ids, indices.num_experts
    end = indices.start + num_experts
    if (num_found_among(ids) or num_experts + 1) <= num_experts:
        return []
    sources = [leaf for leaf in cut([ids], _is_source).leaves if not is_size(leaf)]
    tried = _tried(ids, sources, end) if all(map(is_integral, sources)) else []
    tried = tried or _tried(ids, [ids], end)
    own = ((known, value - indices.start) for known, value in tried)
    runs = (Run(known, value, ((value < 0) | (value >= num_experts)).flatten()) for known, value in own)
    return [run for run in runs if bool(run.is_stray.any())]


def _is_source(node: Node) -> bool:
    return is_integral(node) and is_chosen(node)


def _tried(
    ids: Node, sources: Sequence[Node], num_experts: int
) -> list[tuple[Mapping[Node, Tensor], Tensor]]:
    """Numbers for the sources, and the ids that come of them."""
    values = ((known, _value(ids, known)) for known in _draws(ids, sources, num_experts))
    return [(known, value) for known, value in values if value is not None]


def _value(node: Node, known: Mapping[Node, Tensor]) -> Tensor | None:
    found = cut([node], lambda each: each in known)
    sizes: dict[Node, Any] = {leaf: concrete(leaf.meta["val"]) for leaf in found.leaves if is_size(leaf)}
    try:
        return evaluate(found.nodes, {**sizes, **known})[node]
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, NotImplementedError):
        return None


def _draws(ids: Node, sources: Sequence[Node], num_experts: int) -> Iterator[Mapping[Node, Tensor]]:
    """Every number of every source."""
    generator = torch.Generator().manual_seed(0)
    shapes = [[concrete(size) or 0 for size in leaf.meta["val"].shape] for leaf in sources]
    for numbers in product(*(_numbers(leaf, num_experts) for leaf in sources)):
        needed = max([1, *map(_runs_of, numbers, shapes)])
        if needed > _MOST_RUNS:
            raise Refusal(ids, f"expert ids from {', '.join(map(describe, sources))} cannot be tried out")
        for run in range(needed if len(sources) < 2 else _ROUNDS * needed):
            if run % needed == 0:
                numbers = [each[torch.randperm(len(each), generator=generator)] for each in numbers]
            tiles = map(_tile, numbers, shapes, repeat(run))
            yield {leaf: tile.to(leaf.meta["val"].dtype) for leaf, tile in zip(sources, tiles, strict=True)}


def _numbers(source: Node, num_experts: int) -> list[Tensor]:
    """What a tensor may hold: if nothing is known of it numbers below zero and, in other runs, numbers too large."""
    if source.meta["val"].dtype == torch.bool:
        return [torch.tensor([False, True])]
    number = num_found_among(source)
    if number is not None:
        return [torch.arange(number)]
    return [torch.arange(-num_experts, num_experts), torch.arange(2 * num_experts)]


def _runs_of(numbers: Tensor, shape: Sequence[int]) -> int:
    return -(-len(numbers) // max(1, math.prod(shape)))


def _tile(numbers: Tensor, shape: Sequence[int], run: int) -> Tensor:
    """As many of the numbers as there is room for: a run goes on where the last one has ended."""
    count = math.prod(shape)
    return numbers[(torch.arange(count) + run * count) % len(numbers)].view(*shape)
