"""Layers with a part of all experts, as a rank has them: ids count from the first of these.

for e in range(num_local_experts):
    weight = (topk_weights * (topk_ids == start + e)).sum(-1, keepdim=True)
    out += experts[e](hidden_states) * weight
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from torch.fx import Graph

from inductor_passes.base import Refusal
from inductor_passes.raising.choices import stray_ids
from inductor_passes.raising.evaluation import cut, numbers
from inductor_passes.raising.finders import num_found_among
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import WeightedSum
from inductor_passes.raising.totals import Given, ends, total
from inductor_passes.raising.views_of_rows import aten, prims

_TELL_APART = (
    aten.eq.Scalar,
    aten.ne.Scalar,
    aten.sub.Tensor,
    aten.select.int,
    aten.slice.Tensor,
    prims.iota.default,
)
"""Operators that say which experts are meant: of ids, or of the columns of all experts."""
_MOST = 4
"""A loop has a number for each expert, of which the first one counts."""


def total_of_some(graph: Graph, given: Given, indices: Indices) -> tuple[Indices, WeightedSum]:
    """The sum over the experts that ids choose, and these ids: as they are, or from the first expert on.

    Raises Refusal as `total` does.
    """
    try:
        return indices, _total(graph, given, indices)
    except Refusal:
        for start in _starts(graph, given, indices):
            own = Indices(indices.ids, indices.num_experts, {}, start)
            with suppress(Refusal):
                return own, _total(graph, given, own)
        raise


def _total(graph: Graph, given: Given, indices: Indices) -> WeightedSum:
    return total(graph, given, indices, [*indices.samples, *stray_ids(indices)])


def _starts(graph: Graph, given: Given, indices: Indices) -> Iterator[int]:
    """Which expert may be the first, by the least numbers that tell experts apart between ids and the sum."""
    between = cut(ends(graph, given.parts), {indices.ids, *given.parts}.__contains__)
    written = sorted(numbers(node for node in between.nodes if node.target in _TELL_APART))
    last = (num_found_among(indices.ids) or math.inf) - indices.num_experts
    yield from islice((int(each) for each in written if 0 < each <= last and each % 1 == 0), _MOST)
