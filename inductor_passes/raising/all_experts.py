"""Layers that multiply every token with every expert at once, and take what was chosen.

    hidden = gate(torch.einsum("th,eih->tei", hidden_states, w13))
    out = (torch.einsum("tei,ehi->teh", hidden, w2) * weights.unsqueeze(-1)).sum(1)

`weights` [T, E] has been scattered into zeros, or what a token chose is gathered out of what all experts give; or they
weigh what goes into a product (`fed.py`). Which dimension of a product is that of tokens and which that of experts is
told by strides: both may be as long.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.choices import chosen_ids, stray_ids
from inductor_passes.raising.evaluation import Cut, concrete, cut, is_size
from inductor_passes.raising.fed import Fed, expect_zero_of_zero, fed_into, weighed_rows, weighed_tokens
from inductor_passes.raising.gates import is_in_gate
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import Experts, Outcome, Parts, Tokens, WeightedSum
from inductor_passes.raising.products import Product
from inductor_passes.raising.rowwise import expect_rowwise
from inductor_passes.raising.stacks import Stack
from inductor_passes.raising.tokens import flat
from inductor_passes.raising.totals import Given, as_given, ends, of_experts, total, unweighed
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    changes_dtype,
    has_layout,
    indexed,
    is_one,
    is_shown,
    is_view,
    only_user,
    operand,
    rank,
    same_shape,
    seen_from,
    size,
    unseen,
)

Strides = tuple[int, int]
"""How far apart two tokens are in a tensor, and two experts."""


class Spread(NamedTuple):
    """A product of rows with all experts."""

    product: Node
    rows: Node
    """[E, T, A] or [T, A], as they are multiplied."""
    weight: Stack
    node: Node
    """[T, E, B] or [E, T, B], with dimensions of size 1 perhaps, and T in several."""
    bias: Stack | None
    place: int
    """Which dimension of `node` is that of experts."""

    @property
    def num_experts(self) -> int:
        """E."""
        return self.weight.value.shape[0]

    @property
    def given(self) -> Given:
        """What it gives of all experts."""
        is_by_token = all(map(is_one, self.node.meta["val"].shape[self.place + 1 : -1]))
        part = _as_they_lie if is_by_token else _by_expert
        return Given({self.node: part}, self.num_experts, of_experts)


class Everyone(NamedTuple):
    """The products of one layer."""

    firsts: tuple[Spread, ...]
    second: Spread
    gate: Cut
    activated: Node
    ids: Node
    """By which tokens choose among what the second product gives."""
    fed: Fed | None
    """What is weighed, where that is not what the second product gives."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All products."""
        return tuple(each.product for each in (*self.firsts, self.second))

    def experts(self) -> Experts:
        """The layer as its stages want it. Raises Refusal where it does not compute what they do."""
        return _experts(self)


def everyone(graph: Graph) -> Iterator[Everyone]:
    """Every layer in `graph` that multiplies all tokens with all experts at once, and takes some by a choice."""
    spreads = [found for node in graph.nodes if (found := _spread(node)) is not None]
    known = {each.node: each for each in spreads}
    for second in spreads:
        if (layer := _layer(second, known)) is not None:
            yield layer


def _layer(second: Spread, known: Mapping[Node, Spread]) -> Everyone | None:
    activated, ids = unseen(second.rows), _ids(second)
    gate, firsts = _gate(activated, second, known)
    if firsts and ids is not None:
        return Everyone(firsts, second, gate, activated, ids, None)
    for fed in fed_into(second.rows, is_input=False):
        inner, read = _gate(fed.rows, second, known)
        if read:
            return Everyone(read, second, inner, fed.rows, fed.ids, fed)
    inputs = chain.from_iterable(fed_into(first.rows, is_input=True) for first in firsts)
    fed = next(inputs, None)
    return fed and Everyone(firsts, second, gate, activated, fed.ids, fed)


def _gate(activated: Node, second: Spread, known: Mapping[Node, Spread]) -> tuple[Cut, tuple[Spread, ...]]:
    """What stands in front of a second product, back to the first ones, and these: none where it is one itself."""
    gate = cut([activated], lambda node: node in known or not is_in_gate(node))
    firsts = tuple(known[leaf] for leaf in gate.leaves if leaf in known)
    return gate, () if second in firsts else firsts


def _spread(product: Node) -> Spread | None:
    """A product of rows with all experts: `rows [E, T, A] @ [E, A, B]`, or `rows [T, A] @ [A, E * B]`."""
    if product.target not in (aten.bmm.default, aten.baddbmm.default, aten.mm.default) or product.kwargs:
        return None
    *_, rows, factor = args(product)
    source = unseen(factor)
    if (
        rank(source) != 3
        or _is_gathered(source)
        or not all(isinstance(each, int) for each in source.meta["val"].shape)
    ):
        return None
    shown, (num_experts, x, y) = seen_from(source, factor), source.meta["val"].shape
    tokens = concrete(size(rows, -2))
    if tokens is None or num_experts < 2:
        return None
    if shown is None:
        is_flat = rank(rows) == 2 or is_one(size(rows, 0))
        if not is_flat or not _are_beside(source, factor):
            return None
        beside = Spread(product, rows, Stack(source).transposed(), product, None, 0)
        return _followed(beside, (num_experts * y, y))
    if has_layout(shown, (num_experts, x, y), (x * y, y, 1)):
        return _followed(Spread(product, rows, Stack(source).transposed(), product, None, 0), (y, tokens * y))
    if has_layout(shown, (num_experts, y, x), (x * y, 1, y)):
        return _followed(Spread(product, rows, Stack(source), product, None, 0), (x, tokens * x))
    if has_layout(
        shown.view(shown.shape[-2:]) if shown.shape[0] == 1 else shown, (y, num_experts * x), (1, y)
    ):
        return _followed(Spread(product, rows, Stack(source), product, None, 0), (num_experts * x, x))
    return None


def _is_gathered(source: Node) -> bool:
    """Whether there is a matrix for each row, cast perhaps: these are not all experts'."""
    return indexed(unseen(args(source)[0]) if changes_dtype(source) else source) is not None


def _are_beside(source: Node, factor: Node) -> bool:
    """Whether `factor` [A, E * B] is a copy of `source` [E, A, B], its matrices one beside the other.

    No view of `source` is: strides end at the copy, behind which only dimensions are merged.
    """
    (num_experts, x, y), merged = source.meta["val"].shape, factor
    while is_view(merged) and merged.target is not aten.permute.default:
        merged = args(merged)[0]
    shown = seen_from(source, merged)
    is_turned = shown is not None and has_layout(shown.squeeze(), (x, num_experts, y), (y, x * y, 1))
    return is_turned and same_shape(factor.meta["val"].shape[-2:], (x, num_experts * y))


def _followed(spread: Spread, strides: Strides) -> Spread | None:
    """The product past views and its bias, as far as they show tokens and experts; `strides` are those in it."""
    node, found = spread.product, None
    sizes = (concrete(size(spread.rows, -2)) or 0, spread.num_experts, spread.weight.value.shape[1])
    while node is not None:
        shown = seen_from(spread.product, node)
        place = None if shown is None else _place(shown, strides, sizes)
        found = found if place is None else spread._replace(node=node, place=place)
        user = only_user(node)
        node = user if user is not None and is_shown(user) else None
    if found is not None and spread.product.target is aten.baddbmm.default:
        bias = _bias(args(spread.product)[0], spread, sizes[1:])
        return None if bias is None else found._replace(bias=bias)
    user = None if found is None else only_user(found.node)
    if found is None or user is None or user.target is not aten.add.Tensor:
        return found
    added = operand(user, found.node)
    bias = None if added is None else _bias(added, found, sizes[1:])
    return found if bias is None else found._replace(node=user, bias=bias)


def _place(shown: Tensor, strides: Strides, sizes: tuple[int, int, int]) -> int | None:
    """Which dimension is that of experts, where besides are those of tokens, and columns at the end."""
    (of_token, of_expert), (tokens, num_experts, columns) = strides, sizes
    *leading, last = zip(shown.shape, shown.stride(), strict=True)
    places = [place for place, each in enumerate(leading) if each == (num_experts, of_expert)]
    others = [each for place, each in enumerate(leading) if each[0] != 1 and place not in places]
    for length, stride in reversed(others):
        if stride != of_token:
            return None
        of_token *= length
    is_whole = math.prod(length for length, _ in others) == tokens and last == (columns, 1)
    return places[0] if is_whole and len(places) == 1 else None


def _bias(added: Node, spread: Spread, shape: tuple[int, int]) -> Stack | None:
    """What is added, as [E, B]; None where it is not the same for all tokens."""
    behind = rank(spread.node) - spread.place
    sizes = [*[1] * (rank(added) - behind), shape[0], *[1] * (behind - 2), shape[1]]
    is_aligned = rank(added) >= behind and same_shape(added.meta["val"].shape, sizes)
    return Stack(added, ((aten.view.default, (shape,)),)) if is_aligned else None


def _ids(second: Spread) -> Node | None:
    """By which tokens choose among what experts give; None in a mixture of all."""
    parts = second.given.parts
    try:
        return chosen_ids(ends(second.product.graph, parts), parts)
    except Refusal:
        return None


def _as_they_lie(rows: Tensor, place: int) -> Tensor:
    return rows


def _by_expert(rows: Tensor, place: int) -> Tensor:
    return rows.transpose(0, 1)


def _layout(shape: Sequence[int], place: int) -> tuple[Strides, tuple[int, int, int]]:
    """Strides and sizes of a dense tensor [T, E, B] or [E, T, B]: of experts is the dimension at `place`."""
    tokens, behind = math.prod(shape[:-1]) // shape[place], math.prod(shape[place + 1 :])
    is_by_token = behind == shape[-1]
    of_token = shape[place] * shape[-1] if is_by_token else shape[-1]
    return (of_token, behind), (tokens, shape[place], shape[-1])


def _experts(layer: Everyone) -> Experts:
    second = layer.second
    indices = Indices(layer.ids, second.num_experts, {})
    _expect_gate(layer)
    *firsts, last = (_outcome(each, indices) for each in (*layer.firsts, second))
    tried = [*indices.samples, *stray_ids(indices)]
    if layer.fed is None:
        tokens = Tokens(_tokens_of_all(layer, indices), None)
        weighted_sum = total(second.product.graph, second.given, indices, tried)
    else:
        tokens, weights = _weighed_before(layer, layer.fed, indices, tried)
        given = second.given._replace(terms=as_given)
        root = unweighed(second.product.graph, given, indices, tried).root
        weighted_sum = weights._replace(root=root)
    parts = Parts(tokens, tuple(firsts), layer.gate, {}, layer.activated, last)
    return Experts(indices, parts, weighted_sum)


def _tokens_of_all(layer: Everyone, indices: Indices) -> Node:
    tokens = [_tokens(each, indices) for each in layer.firsts]
    if any(each is not tokens[0] for each in tokens):
        raise Refusal(layer.second.product, "the products before the gate have different inputs")
    return tokens[0]


def _weighed_before(
    layer: Everyone, fed: Fed, indices: Indices, tried: Sequence[Tensor]
) -> tuple[Tokens, WeightedSum]:
    """What is weighed, and by what. Raises Refusal where those that nobody chose would add anything."""
    biased = (*layer.firsts, layer.second) if fed.is_input else (layer.second,)
    if any(each.bias is not None for each in biased):
        raise Refusal(
            layer.second.product, "what goes into experts with biases is weighed, not what they give"
        )
    if not fed.is_input:
        given = layer.firsts[0].given.parts[layer.firsts[0].node]
        found = weighed_rows(layer.second.rows, {fed.rows: given}, indices, tried)
        return Tokens(_tokens_of_all(layer, indices), None), found
    if any(unseen(each.rows) is not unseen(layer.firsts[0].rows) for each in layer.firsts):
        raise Refusal(layer.second.product, "the products before the gate have different inputs")
    expect_zero_of_zero(layer.gate, [each.node for each in layer.firsts], layer.activated)
    tokens, found = weighed_tokens(layer.firsts[0].rows, fed, indices, tried)
    return Tokens(tokens, found.topk_weights), found


def _expect_gate(layer: Everyone) -> None:
    """Refuses a gate that reads more than products, or does not give every expert its own rows."""
    first, second = layer.firsts[0], layer.second
    nodes = [each.node for each in layer.firsts]
    others = [leaf for leaf in layer.gate.leaves if leaf not in nodes and not is_size(leaf)]
    if others:
        raise Refusal(others[0], f"the gate also reads {describe(others[0])}")
    value = first.node.meta["val"]
    expect_rowwise(layer.gate, nodes, (), math.prod(value.shape[:-1]))
    shape = [concrete(each) or 0 for each in layer.activated.meta["val"].shape]
    shown, leading = seen_from(layer.activated, second.rows), [concrete(each) for each in value.shape[:-1]]
    (of_token, of_expert), (tokens, num_experts, columns) = _layout(shape, first.place)
    sizes, strides = (num_experts, tokens, columns), (of_expert, of_token, 1)
    alike = {(each.place, tuple(map(str, each.node.meta["val"].shape[:-1]))) for each in layer.firsts}
    is_shown = shown is not None and has_layout(shown, sizes, strides)
    is_weighed = layer.fed is not None and not layer.fed.is_input  # which then says what is where
    if len(alike) > 1 or shape[:-1] != leading or not (is_shown or is_weighed):
        raise Refusal(second.product, f"{describe(second.rows)} gives experts rows of others")


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


def _outcome(spread: Spread, indices: Indices) -> Outcome:
    product = Product(spread.product, spread.rows, spread.weight, indices.ids, "looped")
    return Outcome(product, spread.bias, spread.node)
