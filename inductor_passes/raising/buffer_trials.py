"""What buffers hold, and what is read back from them, tried for random ids and logits, and for crowds.

Tokens are rows of few random columns, which tell them apart: so it shows which token is alone in a place, as it is.
What experts give is random too, the same for the same token. The sum has to be that over the slots of a token, each
weighed by what we take for its weight: that with which its place alone is read.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes._compat import statically_known_true
from inductor_passes.base import Refusal
from inductor_passes.forms import form
from inductor_passes.raising.buffer_parts import Buffers
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.moved_rows import num_rows
from inductor_passes.raising.place_trials import Draw, drawn, draws, expect_ids, only, refusal
from inductor_passes.raising.row_trials import COLUMNS, Few, Steps, computed
from inductor_passes.raising.seen_rows import Sizes
from inductor_passes.raising.totals import of_experts
from inductor_passes.raising.views_of_rows import changes_dtype, size

_CLOSE = 1e-9


class _Result(NamedTuple):
    """What came of a trial."""

    reason: str
    """Why these are no slots of ours; else empty."""
    weights: int | None = None
    """Which of the `Buffers.weights` are those of the slots."""


Known = dict[Hashable, _Result]
"""What has been found out of buffers of one graph, by their form: of alike layers the first is tried for all."""


def weights_of_slots(layer: Buffers, known: Known) -> Node | None:
    """The weights [T, K] of a layer's slots, if a node holds them.

    Raises:
        Refusal: its sum is not that over its slots.
    """
    key = _form(layer)
    if key not in known:
        known[key] = _tried(layer)
    result = known[key]
    if result.reason:
        raise Refusal(layer.inside.products[-1], result.reason)
    return None if result.weights is None else layer.weights[result.weights]


def _form(layer: Buffers) -> Hashable:
    """All that is tried of a layer."""
    found = layer.between
    places = {node: place for place, node in enumerate((*found.leaves, *found.nodes))}
    wanted = [*layer.ends, layer.root, *(each.rows for each in layer.inside.firsts), *layer.choices]
    return (layer.slots, *(places[node] for node in wanted), form(found.leaves, found.nodes))


def _tried(layer: Buffers) -> _Result:
    try:
        expect_ids(layer.chosen)
        _expect_exact(layer)
        weighed = [_weights(layer, sizes, draw) for sizes, tried in draws(layer.chosen) for draw in tried]
    except Refusal as found:
        return _Result(found.reason)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        return _Result(refusal(layer.chosen, f"they cannot be tried out, {error}").reason)
    if not any(each.is_any for each in weighed):
        return _Result(refusal(layer.chosen, "nobody has a weight").reason)
    found = set.intersection(*(each.found for each in weighed))
    return _Result("", min(found, default=None))


def _expect_exact(layer: Buffers) -> None:
    """Refuses indices out of floating numbers that are too few to tell all rows of buffers apart."""
    rows = num_rows(layer.inside.firsts[0].rows)
    for node in layer.made.nodes:
        dtype = _rounded_in(node)
        if dtype is not None and not statically_known_true(rows < 2 / torch.finfo(dtype).eps):
            raise refusal(layer.chosen, f"indices are computed in {dtype}, which may not have all numbers")


def _rounded_in(index: Node) -> torch.dtype | None:
    """The dtype of 16 bits in which an index was computed, if it was."""
    if not changes_dtype(index) or not is_integral(index) or index.meta["val"].dtype == torch.bool:
        return None
    dtype = index.all_input_nodes[0].meta["val"].dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


class _Weighed(NamedTuple):
    """What slots weigh in one run."""

    is_any: bool
    """Whether anything."""
    found: set[int]
    """Which of the `Buffers.weights` these are."""


class _Held(NamedTuple):
    """What stands in places."""

    token: Tensor
    """[E, C]: which token is alone there, as it is; -1 where none is."""
    slots: Tensor
    """[T, K]: ids, as `Slots` gives them."""
    own: Tensor
    """Whose each place is, as `Slots` gives it."""

    def of(self, rows: Tensor) -> Tensor:
        """[E, C, F] of rows [T, E, F], where a place has a token."""
        return rows[self.token, torch.arange(len(self.token)).unsqueeze(1)]


def _weights(layer: Buffers, sizes: Sizes, draw: Draw) -> _Weighed:
    """What slots weigh. Raises Refusal where the sum is not that over slots."""
    values, ids = _values(layer, sizes, draw), draw.ids
    held, generator = _held(layer, sizes, values, ids), torch.Generator().manual_seed(draw.seed)
    of_all = _random((len(ids), layer.num_experts), generator)
    there = _random((len(ids), 1), generator)
    outs = torch.where((held.token < 0).unsqueeze(-1), _random(held.token.shape, generator), held.of(of_all))
    total = _read(layer, sizes, values, outs, there)
    weights = _read(layer, sizes, values, held.own.double(), torch.zeros(len(ids), 1, ids.shape[1]).double())
    kept = weights.where(held.slots >= 0, 0.0)
    terms = of_experts(kept, ids, of_all)
    terms = terms if layer.into is None else torch.cat([terms, there], 1)
    is_right = ((total - terms.sum(1)).abs() <= _CLOSE * terms.abs().sum(1)).all(1)
    if draw.power:  # a router makes NaN of ids that weigh nothing beside the best
        is_right |= weights.isnan().any(1)
    if not bool(is_right.all()):
        raise refusal(layer.chosen, "a token reads what experts give for others")
    named = [values[each].reshape(ids.shape).where(held.slots >= 0, 0.0) for each in layer.weights]
    found = {place for place, each in enumerate(named) if _are_close(each, kept)}
    return _Weighed(bool(kept.nan_to_num().any()), found)


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Rows of few columns."""
    return torch.randn(*shape, COLUMNS, generator=generator, dtype=torch.float64)


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_CLOSE, atol=0.0, equal_nan=True)


def _values(layer: Buffers, sizes: Sizes, draw: Draw) -> dict[Node, Any]:
    """All that rows meet on their way."""
    steps = (*layer.put, layer.read)
    met = {each for step in steps for node in step.behind for each in node.all_input_nodes}
    return only(layer.made, drawn(layer.chosen, sizes, draw), {*met, *layer.choices, *layer.weights})


def _held(layer: Buffers, sizes: Sizes, values: Mapping[Node, Any], ids: Tensor) -> _Held:
    """What stands in places. Raises Refusal where our slots do not have what they say."""
    codes = torch.randn(len(ids), COLUMNS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    few = Few(size(layer.tokens, -1), sizes.given)
    rows = [_moved(each, values, {layer.tokens: codes}, few) for each in layer.put]
    if not all(torch.allclose(each, rows[0], rtol=0, atol=0, equal_nan=True) for each in rows):
        raise refusal(layer.chosen, "the products before the gate have different inputs")
    token = _whose(rows[0], codes)
    if bool(rows[0][token < 0].nan_to_num().any()):  # what is in it might be the number of a token
        raise refusal(layer.chosen, "a place may hold several tokens, or something else")
    numbers = torch.arange(1.0, len(ids) + 1).double().unsqueeze(1)
    one = Few(size(layer.tokens, -1), sizes.given, 1, 0.0)
    numbers = _moved(layer.put[0], values, {layer.tokens: numbers}, one)
    slots, own = layer.slots(numbers, *(values[each] for each in layer.choices))
    if not torch.equal(slots >= 0, _has_place(token, ids, layer.num_experts)):
        raise refusal(layer.chosen, "tokens are added to memory that nobody has written")
    return _Held(token, slots, own)


def _whose(rows: Tensor, codes: Tensor) -> Tensor:
    """[E, C]: which of the codes each row is."""
    ranked, order = codes[:, 0].sort()
    token = order[torch.searchsorted(ranked, rows[..., 0].contiguous()).clamp(max=len(codes) - 1)]
    return token.where((codes[token] == rows).all(-1), -1)


def _has_place(token: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """[T, K]: whether a token is in a place of its expert; of an id that it has twice the first slot is."""
    there = torch.zeros(len(ids) + 1, num_experts, dtype=torch.bool)
    there[token, torch.arange(num_experts).unsqueeze(1).expand_as(token)] = True  # the last row is nobody's
    is_first = ~ids.unsqueeze(2).eq(ids.unsqueeze(1)).tril(-1).any(2)
    return there[:-1].gather(1, ids) & is_first


def _read(layer: Buffers, sizes: Sizes, values: Mapping[Node, Any], outs: Tensor, there: Tensor) -> Tensor:
    """[T, F]: the sum of what experts give, [E, C, F], with what is there, [T, 1, F]."""
    _, given, *into = layer.ends
    few = Few(size(given, -1), sizes.given, there.shape[-1])
    return _moved(
        layer.read, values, {given: layer.slots.as_given(outs), **dict.fromkeys(into, there)}, few
    ).flatten(0, -2)


def _moved(steps: Steps, values: Mapping[Node, Any], parts: Mapping[Node, Tensor], few: Few) -> Tensor:
    return computed(steps._replace(others=[]), values, parts, few)
