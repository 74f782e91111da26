"""Products of rows with all experts at once, and what stands between two of them.

Which dimension of a product is that of rows and which that of experts is told by strides: both may be as long.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import Cut, concrete, cut, is_size
from inductor_passes.raising.gates import is_in_gate
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import Outcome
from inductor_passes.raising.products import Product
from inductor_passes.raising.rowwise import expect_rowwise
from inductor_passes.raising.seen_rows import Sizes, seen_rows
from inductor_passes.raising.stacks import Stack
from inductor_passes.raising.totals import Given, Part, of_experts
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
    prims,
    rank,
    same_shape,
    seen_from,
    size,
    unseen,
)

_CASTS = (prims.convert_element_type.default,)

Strides = tuple[int, int]
"""How far apart two tokens are in a tensor, and two experts."""


class Spread(NamedTuple):
    """A product of rows with all experts."""

    product: Node
    rows: Node
    """[E, T, A] or [T, A], as they are multiplied."""
    weight: Stack
    node: Node
    """[T, E, B] or [E, T, B], with dimensions of size 1 perhaps, and T in several, on both sides of E perhaps."""
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
        shape = self.node.meta["val"].shape
        before, behind = math.prod(shape[: self.place]), math.prod(shape[self.place + 1 : -1])
        sizes = (-1, behind) if isinstance(behind, int) else (before if isinstance(before, int) else 1, -1)
        return Given({self.node: _between(sizes)}, self.num_experts, of_experts)


class Inside(NamedTuple):
    """The products of one layer, and the gate between."""

    firsts: tuple[Spread, ...]
    second: Spread
    gate: Cut
    activated: Node

    @property
    def products(self) -> tuple[Node, ...]:
        """All products, the second one at the end."""
        return tuple(each.product for each in (*self.firsts, self.second))


def spreads(graph: Graph) -> dict[Node, Spread]:
    """Every product of rows with all experts in `graph`, by what it gives."""
    found = (_spread(node) for node in graph.nodes)
    return {each.node: each for each in found if each is not None}


def inside_of(activated: Node, second: Spread, known: Mapping[Node, Spread]) -> Inside:
    """What stands before a second product, back to the first ones: none where it is one itself.

    `activated` may be a first product with nothing between, as in LoRA: then it is what that gives, as it is seen.
    """
    activated = next((each.node for each in known.values() if each.product is activated), activated)
    gate = cut([activated], lambda node: node in known or not is_in_gate(node))
    firsts = tuple(known[leaf] for leaf in gate.leaves if leaf in known)
    return Inside(() if second in firsts else firsts, second, gate, activated)


def _spread(product: Node) -> Spread | None:
    """A product of rows with all experts: `rows [E, T, A] @ [E, A, B]`, or `rows [T, A] @ [A, E * B]`."""
    if product.target not in (aten.bmm.default, aten.baddbmm.default, aten.mm.default) or product.kwargs:
        return None
    *_, rows, factor = args(product)
    weight = _weight(factor)
    source = weight.source
    if (
        rank(source) != 3
        or _is_gathered(source)
        or not all(isinstance(each, int) for each in source.meta["val"].shape)
    ):
        return None
    shown, (num_experts, x, y) = seen_from(source, factor, _CASTS), source.meta["val"].shape
    tokens = concrete(size(rows, -2))
    if tokens is None or num_experts < 2:
        return None
    if shown is None:
        is_flat = rank(rows) == 2 or is_one(size(rows, 0))
        if not is_flat or not _are_beside(source, factor):
            return None
        beside = Spread(product, rows, weight.transposed(), product, None, 0)
        return _followed(beside, (num_experts * y, y))
    if has_layout(shown, (num_experts, x, y), (x * y, y, 1)):
        return _followed(Spread(product, rows, weight.transposed(), product, None, 0), (y, tokens * y))
    if has_layout(shown, (num_experts, y, x), (x * y, 1, y)):
        return _followed(Spread(product, rows, weight, product, None, 0), (x, tokens * x))
    if has_layout(
        shown.view(shown.shape[-2:]) if shown.shape[0] == 1 else shown, (y, num_experts * x), (1, y)
    ):
        return _followed(Spread(product, rows, weight, product, None, 0), (num_experts * x, x))
    return None


def _weight(factor: Node) -> Stack:
    """What `factor` shows. Under autocast an einsum casts it as it shows it, which may be no [E, A, B]."""
    source = unseen(factor)
    inner = unseen(args(source)[0]) if changes_dtype(source) else source
    if not changes_dtype(source) or inner is args(source)[0]:
        return Stack(source)
    return Stack(inner, ((*_CASTS, args(source)[1:]),))


def _is_gathered(source: Node) -> bool:
    """Whether there is a matrix for each row, cast perhaps: these are not all experts'."""
    return indexed(unseen(args(source)[0]) if changes_dtype(source) else source) is not None


def _are_beside(source: Node, factor: Node) -> bool:
    """Whether `factor` [A, E * B] is a copy of `source` [E, A, B], its matrices one beside the other.

    No view of `source` is: strides end at the copy, behind which only dimensions are merged.
    """
    (num_experts, x, y), merged = source.meta["val"].shape, factor
    while changes_dtype(merged) or (is_view(merged) and merged.target is not aten.permute.default):
        merged = args(merged)[0]
    shown = seen_from(source, merged, _CASTS)
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


def _between(sizes: tuple[int, int]) -> Part:
    """Rows [T, E, C] as they lie where T is two `sizes`, before and behind E."""
    return lambda rows, place: rows.unflatten(0, sizes).transpose(1, 2)


def _layout(shape: Sequence[int], place: int) -> tuple[Strides, tuple[int, int, int]]:
    """Strides and sizes of a dense tensor [T, E, B] or [E, T, B]: of experts is the dimension at `place`."""
    tokens, behind = math.prod(shape[:-1]) // shape[place], math.prod(shape[place + 1 :])
    is_by_token = behind == shape[-1]
    of_token = shape[place] * shape[-1] if is_by_token else shape[-1]
    return (of_token, behind), (tokens, shape[place], shape[-1])


def expect_gate(inside: Inside) -> None:
    """Refuses a gate that reads more than products, or in which a row meets another."""
    first, nodes = inside.firsts[0], [each.node for each in inside.firsts]
    others = [leaf for leaf in inside.gate.leaves if leaf not in nodes and not is_size(leaf)]
    if others:
        raise Refusal(others[0], f"the gate also reads {describe(others[0])}")
    expect_rowwise(inside.gate, nodes, (), math.prod(first.node.meta["val"].shape[:-1]))
    alike = {(each.place, tuple(map(str, each.node.meta["val"].shape[:-1]))) for each in inside.firsts}
    leading = [
        [concrete(each) for each in node.meta["val"].shape[:-1]] for node in (first.node, inside.activated)
    ]
    if len(alike) > 1 or leading[0] != leading[1]:
        raise _of_others(inside)


def expect_own_rows(inside: Inside) -> None:
    """Refuses a gate that does not give every expert its own rows."""
    shape = [concrete(each) or 0 for each in inside.activated.meta["val"].shape]
    (of_token, of_expert), (tokens, num_experts, columns) = _layout(shape, inside.firsts[0].place)
    shown, sizes = seen_from(inside.activated, inside.second.rows), (num_experts, tokens, columns)
    is_seen = shown is not None and has_layout(shown, sizes, (of_expert, of_token, 1))
    if not is_seen and not _are_copied(inside, shape[:-1]):
        raise _of_others(inside)


def _are_copied(inside: Inside, leading: Sequence[int]) -> bool:
    """The same of rows that no view of the gate's gives, as T lies on both sides of E in it."""
    place, of_tokens = inside.firsts[0].place, [*inside.activated.meta["val"].shape[:-1]]
    number = math.prod(leading) // of_tokens.pop(place)
    rows = seen_rows(inside.activated, inside.second.rows, Sizes(math.prod(of_tokens), number))
    wanted = torch.arange(math.prod(leading)).view(*leading).movedim(place, 0).reshape(-1, number)
    return rows is not None and torch.equal(rows, wanted)


def _of_others(inside: Inside) -> Refusal:
    reason = f"{describe(inside.second.rows)} gives experts rows of others"
    return Refusal(inside.second.product, reason)


def outcome(spread: Spread, indices: Indices) -> Outcome:
    """What one product of a layer gives, with its bias."""
    product = Product(spread.product, spread.rows, spread.weight, indices.ids, "looped")
    return Outcome(product, spread.bias, spread.node)
