"""Layers that multiply every token with every expert at once, and weigh what nobody chose by zero.

    hidden = gate(torch.einsum("th,eih->tei", hidden_states, w13))
    out = (torch.einsum("tei,ehi->teh", hidden, w2) * weights.unsqueeze(-1)).sum(1)

`weights` [T, E] has been scattered into zeros. Which dimension of a product is that of tokens and which that of experts
is told by strides: both may be as long.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.choices import choice, ids_of_weights
from inductor_passes.raising.evaluation import Cut, concrete, cut, is_size
from inductor_passes.raising.gates import is_in_gate
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.layer import Experts, Outcome, Parts, Tokens, WeightedSum
from inductor_passes.raising.products import Product
from inductor_passes.raising.rowwise import expect_rowwise
from inductor_passes.raising.stacks import Stack
from inductor_passes.raising.tokens import flat
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    has_layout,
    indexed,
    is_cast,
    is_one,
    is_reshape,
    only_user,
    operand,
    prims,
    rank,
    same_shape,
    seen_from,
    size,
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
    """[T, E, B] or [E, T, B], with dimensions of size 1 perhaps, and T in several."""
    bias: Stack | None
    place: int
    """Which dimension of `node` is that of experts."""

    @property
    def num_experts(self) -> int:
        """E."""
        return self.weight.value.shape[0]


class Everyone(NamedTuple):
    """The products of one layer."""

    firsts: tuple[Spread, ...]
    second: Spread
    gate: Cut
    activated: Node
    column: Node
    """The weights, as the second product is multiplied with them."""
    is_by_token: bool
    """Whether they lie token by token, [T, E]."""
    root: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All products."""
        return tuple(each.product for each in (*self.firsts, self.second))

    def experts(self) -> Experts:
        """The layer as its stages want it. Raises Refusal where it does not compute what they do."""
        return _experts(self)


def everyone(graph: Graph) -> Iterator[Everyone]:
    """Every layer in `graph` that multiplies all tokens with all experts at once, and weighs them by a choice."""
    spreads = [found for node in graph.nodes if (found := _spread(node)) is not None]
    known = {each.node: each for each in spreads}
    for second in spreads:
        activated = unseen(second.rows)
        gate = cut([activated], lambda node: node in known or not is_in_gate(node))
        firsts = tuple(known[leaf] for leaf in gate.leaves if leaf in known)
        if firsts and second not in firsts and (found := _weighed(second)) is not None:
            if isinstance(ids_of_weights(found[0]), Node):
                yield Everyone(firsts, second, gate, activated, *found)


def _spread(product: Node) -> Spread | None:
    """A product of rows with all experts: `rows [E, T, A] @ [E, A, B]`, or `rows [T, A] @ [A, E * B]`."""
    if product.target not in (aten.bmm.default, aten.baddbmm.default, aten.mm.default) or product.kwargs:
        return None
    *_, rows, factor = args(product)
    source = unseen(factor)
    if (
        rank(source) != 3
        or indexed(source) is not None
        or not all(isinstance(each, int) for each in source.meta["val"].shape)
    ):
        return None
    shown, (num_experts, x, y) = seen_from(source, factor), source.meta["val"].shape
    tokens = concrete(size(rows, -2))
    if shown is None or tokens is None or num_experts < 2:
        return None
    if has_layout(shown, (num_experts, x, y), (x * y, y, 1)):
        return _followed(Spread(product, rows, Stack(source).transposed(), product, None, 0), (y, tokens * y))
    if has_layout(shown, (num_experts, y, x), (x * y, 1, y)):
        return _followed(Spread(product, rows, Stack(source), product, None, 0), (x, tokens * x))
    if has_layout(
        shown.view(shown.shape[-2:]) if shown.shape[0] == 1 else shown, (y, num_experts * x), (1, y)
    ):
        return _followed(Spread(product, rows, Stack(source), product, None, 0), (num_experts * x, x))
    return None


def unseen(node: Node) -> Node:
    """What `node` shows in another shape, its dimensions exchanged perhaps."""
    return unseen(args(node)[0]) if is_shown(node) else node


def is_shown(node: Node) -> bool:
    """Whether `node` shows a tensor in another shape, copied perhaps."""
    return is_reshape(node) or node.target is aten.clone.default


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


def _weighed(second: Spread) -> tuple[Node, bool, Node] | None:
    """The weights, whether they lie token by token, and the sum over experts."""
    node, user = second.node, only_user(second.node)
    while user is not None and (is_cast(user) or is_shown(user)):
        node, user = user, only_user(user)
    if user is not None and user.target in (aten.bmm.default, aten.mm.default):
        return _multiplied(second, node, user)
    column = operand(user, node) if user is not None and user.target is aten.mul.Tensor else None
    if user is None or column is None or (place := _seen_place(second, node)) is None:
        return None
    shape, root = list(node.meta["val"].shape), only_user(user)
    is_whole = same_shape(column.meta["val"].shape, (*shape[:-1], 1))
    if not is_whole or root is None or root.target is not aten.sum.dim_IntList or len(args(root)) > 2:
        return None
    if [dim % len(shape) for dim in args(root)[1]] != [place]:
        return None
    return column, all(map(is_one, shape[place + 1 : -1])), root


def _seen_place(second: Spread, node: Node) -> int | None:
    """Which dimension of `node`, which shows what experts give, is that of experts."""
    shown = seen_from(second.node, node, _CASTS)
    shape = [concrete(each) or 0 for each in second.node.meta["val"].shape]
    return None if shown is None else _place(shown, *_layout(shape, second.place))


def _layout(shape: Sequence[int], place: int) -> tuple[Strides, tuple[int, int, int]]:
    """Strides and sizes of a dense tensor [T, E, B] or [E, T, B]: of experts is the dimension at `place`."""
    tokens, behind = math.prod(shape[:-1]) // shape[place], math.prod(shape[place + 1 :])
    is_by_token = behind == shape[-1]
    of_token = shape[place] * shape[-1] if is_by_token else shape[-1]
    return (of_token, behind), (tokens, shape[place], shape[-1])


def _multiplied(second: Spread, node: Node, product: Node) -> tuple[Node, bool, Node] | None:
    """The sum as a product: `[T, H, E] @ weights [T, E, 1]`, or `weights [T, 1, E] @ [T, E, H]`."""
    is_left = args(product)[0] is node
    shown = seen_from(second.node, node, _CASTS)
    shape = [concrete(each) or 0 for each in second.node.meta["val"].shape]
    (of_token, of_expert), (tokens, num_experts, columns) = _layout(shape, second.place)
    if shown is None or shown.dim() != 3:
        return None
    wanted = ((columns, 1), (num_experts, of_expert)) if is_left else ((num_experts, of_expert), (columns, 1))
    sizes, strides = zip((tokens, of_token), *wanted, strict=True)
    weights = args(product)[is_left]
    if not has_layout(shown, sizes, strides) or not is_one(size(weights, -1 if is_left else -2)):
        return None
    return weights, True, product


def _experts(layer: Everyone) -> Experts:
    second = layer.second

    def part(weights: Tensor) -> Tensor:
        return weights if layer.is_by_token else weights.T

    indices, topk_weights, score = choice(layer.column, part, second.num_experts)
    _expect_gate(layer)
    tokens = [_tokens(each, indices) for each in layer.firsts]
    if any(each is not tokens[0] for each in tokens):
        raise Refusal(second.product, "the products before the gate have different inputs")
    *firsts, last = (_outcome(each, indices) for each in (*layer.firsts, second))
    parts = Parts(Tokens(tokens[0], None), tuple(firsts), layer.gate, {}, layer.activated, last)
    return Experts(indices, parts, WeightedSum(topk_weights, layer.root, score))


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
    fits = shape[:-1] == leading and shown is not None and has_layout(shown, sizes, strides)
    if len(alike) > 1 or not fits:
        raise Refusal(second.product, f"{describe(second.rows)} gives experts rows of others")


def _tokens(first: Spread, indices: Indices) -> Node:
    """The tokens that each expert reads all of. Raises Refusal where it reads something else."""
    if rank(first.rows) == 2 or is_one(size(first.rows, 0)):
        return flat(first.rows, indices)
    source = unseen(first.rows)
    shown = seen_from(source, first.rows)
    tokens, columns = len(indices.samples[0]), concrete(size(first.rows, 2)) or 0
    sizes, strides = (first.num_experts, tokens, columns), (0, columns, 1)
    if source.target is aten.repeat.default and args(source)[1] == [first.num_experts, 1]:
        source, strides = args(source)[0], (tokens * columns, columns, 1)
    is_seen = shown is not None and has_layout(shown, sizes, strides)
    if not is_seen or not same_shape([size(source, -1)], [size(first.rows, 2)]):
        raise Refusal(first.product, f"experts read {describe(first.rows)}, not all of them all tokens")
    return flat(source, indices)


def _outcome(spread: Spread, indices: Indices) -> Outcome:
    product = Product(spread.product, spread.rows, spread.weight, indices.ids, "looped")
    return Outcome(product, spread.bias, spread.node)
