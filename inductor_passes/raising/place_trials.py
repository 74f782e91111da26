"""What masks of tokens and places hold, tried for random ids and logits, and for many tokens at the same experts.

Where a token has a weight at a place, it alone has to be there, as it is, and has to have chosen the place's expert.
Whatever else stands at places, and what experts make of it, is weighed by zero then.
"""

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes._compat import statically_known_true
from inductor_passes.base import Refusal
from inductor_passes.forms import form
from inductor_passes.graph_tools import describe
from inductor_passes.raising.elsewhere import of_sizes
from inductor_passes.raising.evaluation import WIDE, Cut, aten, concrete, cut, evaluate, is_size
from inductor_passes.raising.finders import may_repeat, num_found_among
from inductor_passes.raising.indices import compared, is_integral, samples
from inductor_passes.raising.place_masks import Chosen, Masks, num_choices
from inductor_passes.raising.seen_rows import Sizes, seen_rows
from inductor_passes.sizes import is_open

_MOST_NUMBERS = 1 << 25
"""Of one mask, at once."""
_MANY_NUMBERS = 1 << 22
"""Of one mask, in all samples."""


class _Layout(NamedTuple):
    """Where the places of a layer are."""

    experts: Tensor
    """[P]: whose each place of a batch is, as weights have them."""
    rows: Tensor
    """[B, P]: which row of experts, of all batches, is there."""
    orders: tuple[set[bool], set[bool]]
    """Whether experts come one after another, and then the next place of each: of weights, and of the mask."""


class Draw(NamedTuple):
    """What is tried at once."""

    ids: Tensor
    """[T, K]."""
    power: int
    """How far apart logits are."""
    seed: int
    """Of logits, noise, and what else is drawn."""


Known = dict[Hashable, tuple[bool, bool]]
"""What has been found out of masks of one graph, by their form: of alike layers the first is tried for all."""


def order_of_places(layer: Masks, known: Known) -> tuple[bool, bool]:
    """Whether the places of weights, and of the mask, are by place and then by expert, rather than by expert.

    Raises:
        Refusal: weights are of no experts that were chosen, or of places that hold something else.
    """
    key = _form(layer)
    if key not in known:
        expect_ids(layer.chosen)
        _expect_integral(layer)
        known[key] = _tried(layer)
    return known[key]


def _form(layer: Masks) -> Hashable:
    """All that is tried of a layer."""
    made, first, second = layer.made, layer.dispatch, layer.inside.second
    places = {node: place for place, node in enumerate((*made.leaves, *made.nodes))}
    wanted = [places[node] for node in (first.mask.node, layer.combine.mask.node, *layer.choices)]
    found = [(num_found_among(each), may_repeat(each)) for each in layer.choices]
    views = [cut([each.rows], {first.product}.__contains__) for each in layer.inside.firsts]
    views.append(cut([layer.combine.rows], {second.node}.__contains__))
    turned = [(each.mask.is_turned, each.columns) for each in (first, layer.combine)]
    forms = tuple(form(each.leaves, each.nodes) for each in (made, *views))
    return (layer.num_experts, second.place, *wanted, *found, *turned, *forms)


def _tried(layer: Masks) -> tuple[bool, bool]:
    orders = [{False, True}, {False, True}]
    for sizes, tried in draws(layer.chosen):
        layout = _layout(layer, sizes)
        orders = [known & found for known, found in zip(orders, layout.orders, strict=True)]
        for draw in tried:
            _expect_in_place(layer, layout, sizes, draw)
    if not all(orders):
        raise refusal(layer.chosen, "places of experts are in no order")
    return min(orders[0]), min(orders[1])


def refusal(layer: Chosen, reason: str) -> Refusal:
    """Why a layer stays."""
    return Refusal(layer.inside.products[-1], f"tokens are {layer.how}: {reason}")


def expect_ids(layer: Chosen) -> None:
    """Refuses ids of other experts, and places that are not counted right."""
    if any((num_found_among(each) or 0) > layer.num_experts for each in layer.choices):
        raise refusal(layer, "its ids may be out of range")
    if layer.top_k > layer.num_experts:
        raise refusal(layer, f"each token has {layer.top_k} ids of {layer.num_experts} experts")
    _expect_counted(layer)


def _expect_integral(layer: Masks) -> None:
    """Refuses a mask that has a gradient."""
    counted = cut([layer.dispatch.mask.node], is_integral).leaves
    for leaf in counted:
        if not is_integral(leaf) and not is_size(leaf):
            raise refusal(
                layer.chosen, f"{describe(leaf)} is in it, so tokens are weighed where they are placed"
            )


def _expect_counted(layer: Chosen) -> None:
    """Refuses places that are counted in a dtype which has no number for some: two tokens would have one there.

    A mask of as many tokens as float32 has integers is in nobody's memory.
    """
    slots = layer.num_tokens * layer.top_k
    for node in layer.made.nodes:
        dtype = node.meta["val"].dtype if node.target is aten.cumsum.default else torch.int64
        if dtype in (torch.bfloat16, torch.float16) and not statically_known_true(
            slots <= 2 / torch.finfo(dtype).eps
        ):
            raise refusal(layer, f"places are counted in {dtype}, which may not have all numbers")


def draws(layer: Chosen) -> Iterator[tuple[Sizes, list[Draw]]]:
    """What is tried, by number of tokens."""
    tokens = concrete(layer.num_tokens) or 0
    places = layer.numbers
    batches = _crowded(layer, tokens)
    if not places or places * batches * batches > _MOST_NUMBERS:
        raise refusal(layer, f"{places} numbers in it are too many to be tried out")
    repeats = len(layer.choices) > 1 or any(map(may_repeat, layer.choices))
    *drawn, crowd = samples((tokens, layer.top_k), layer.num_experts, repeats, batches)
    drawn = drawn[: max(1, _MANY_NUMBERS // places)]
    tried = [*(Draw(ids, 0, seed) for seed, ids in enumerate(drawn)), Draw(drawn[0], 2, 0)]
    for number, each in ((tokens, tried), (len(crowd), [Draw(crowd, 0, 0)])):
        yield Sizes(layer.num_tokens, number), each


def _crowded(layer: Chosen, tokens: int) -> int:
    """How many times T tokens are tried at the same experts: more than there are places, where T is open."""
    if not is_open(layer.num_tokens):
        return 1
    places = concrete(layer.inside.firsts[0].rows.meta["val"].shape[1]) or 0
    limits = [each for each in compared(layer.made.nodes) if each < _MOST_NUMBERS]
    return max(2, math.ceil((max([places, *limits]) + 1) / tokens))


def _layout(layer: Masks, sizes: Sizes) -> _Layout:
    first, second, number = layer.inside.firsts[0], layer.inside.second, layer.num_experts
    dispatch, combine = layer.dispatch, layer.combine
    rows = seen_rows(dispatch.product, first.rows, sizes, (dispatch.columns, -1))
    outs = seen_rows(second.node, combine.rows, sizes, (-1, combine.columns))
    others = [
        seen_rows(dispatch.product, each.rows, sizes, (dispatch.columns, -1)) for each in layer.inside.firsts
    ]
    if (
        rows is None
        or outs is None
        or not all(each is not None and torch.equal(each, rows) for each in others)
    ):
        raise refusal(layer.chosen, "what experts read, or give, is not what is placed")
    places = torch.arange(outs.numel()).view(sizes.shape(second.node)[:-1]).movedim(second.place, 0)
    by_out = places.flatten().argsort()  # experts, and their rows, of what they give as it lies
    of_place = by_out[outs.view(-1, outs.shape[-1])]
    of_mask = rows.flatten().argsort().view(len(of_place), -1) // rows.shape[1]
    experts = of_place // rows.shape[1]
    orders = _orders(experts, number), _orders(of_mask, number)
    return _Layout(experts[0], rows.flatten()[of_place], orders)


def _orders(experts: Tensor, number: int) -> set[bool]:
    """In which orders places [B, P] of these experts may be."""
    places = torch.arange(experts.shape[1])
    wanted = {False: places // (len(places) // number), True: places % number}
    return {is_minor for is_minor, each in wanted.items() if bool((experts == each).all())}


def _expect_in_place(layer: Masks, layout: _Layout, sizes: Sizes, draw: Draw) -> None:
    values, ids = _values(layer, sizes, draw), draw.ids
    weights = layer.combine.mask.by_token(values[layer.combine.mask.node])
    mask = layer.dispatch.mask.by_token(values[layer.dispatch.mask.node])
    weighed = weights.ne(0)
    by_row = mask.mT.flatten(0, 1)  # [B * P, S]
    batch = torch.arange(len(mask)).unsqueeze(1)
    if not bool((layout.rows // mask.shape[2] == batch).all()):
        raise refusal(layer.chosen, "tokens of one batch have weights at places of another")
    there = by_row[layout.rows].mT
    if not bool((there == 1)[weighed].all()):
        raise refusal(layer.chosen, "a token with a weight is not there once, as it is")
    if bool((there.ne(0).sum(1) > 1)[weighed.any(1)].any()):
        raise refusal(layer.chosen, "a place may hold several tokens")
    chosen = torch.zeros(len(ids), layer.num_experts, dtype=torch.bool).scatter(1, ids, True)
    chosen = chosen[:, layout.experts].view(weighed.shape)
    if bool((weighed & ~chosen).any()) or not bool(weighed.any()):
        raise refusal(layer.chosen, "tokens have weights of experts that they did not choose")


def _values(layer: Masks, sizes: Sizes, draw: Draw) -> Mapping[Node, Any]:
    """Both masks."""
    chosen = layer.chosen
    try:
        known = drawn(chosen, sizes, draw)
        return only(chosen.made, known, {layer.combine.mask.node, layer.dispatch.mask.node})
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise refusal(chosen, f"it cannot be tried out, {error}") from error


def drawn(layer: Chosen, sizes: Sizes, draw: Draw) -> dict[Node, Any]:
    """What a layer's places and weights are made of. Raises ValueError where that may be anything."""
    known: dict[Node, Any] = dict(_ids(layer, sizes, draw.ids))
    generator = torch.Generator().manual_seed(draw.seed)
    for leaf in layer.made.leaves:
        if leaf not in known:
            known[leaf] = _drawn(leaf, sizes, draw.power, generator)
    return known


def _ids(layer: Chosen, sizes: Sizes, ids: Tensor) -> Iterator[tuple[Node, Tensor]]:
    numbers = [num_choices(each, layer.num_tokens) or 1 for each in layer.choices]
    for node, columns in zip(layer.choices, ids.split(numbers, 1), strict=True):
        yield node, columns.reshape(sizes.shape(node))


def _drawn(leaf: Node, sizes: Sizes, power: int, generator: torch.Generator) -> Any:
    """What a leaf may hold: logits, noise, or which tokens are padding."""
    if is_size(leaf):
        return sizes.given(leaf.meta["val"])
    dtype = leaf.meta["val"].dtype
    if dtype not in (*WIDE, torch.bool):
        raise ValueError(f"{describe(leaf)} may hold anything")
    numbers = of_sizes(sizes.shape(leaf), power, generator)
    return numbers > 0 if dtype == torch.bool else numbers


def only(found: Cut, known: dict[Node, Any], wanted: set[Node]) -> dict[Node, Any]:
    """What is wanted, for what is known. Masks are large: each is kept until the last that reads it."""
    last = {each: node for node in found.nodes for each in node.all_input_nodes}
    for node in found.nodes:
        known[node] = evaluate([node], known)[node]
        for each in {*node.all_input_nodes} - wanted:
            if last[each] is node:
                del known[each]
    return known
