"""What the integer tensors around grouped products mean, found by computing them for random expert ids.

Sorting slots by expert can be written in many ways: sort, argsort, one_hot and cumsum; histc, bincount. All give the
same numbers.
"""

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import Refusal
from inductor_passes.forms import form
from inductor_passes.graph_tools import describe, getitem_source
from inductor_passes.raising.evaluation import VIEWS, Cut, aten, concrete, cut, evaluate, is_size, numbers
from inductor_passes.raising.finders import is_cut_out, is_found_in_rows, longer, may_repeat
from inductor_passes.sizes import is_open, size_given

_MIN_SAMPLES, _MIN_ROWS = 4, 256
_MOST_SLOTS = 1 << 22
_MANY_TOKENS, _MOST_TOKENS = 4096, 1 << 17
_COMPARISONS = frozenset(
    (
        aten.lt.Scalar,
        aten.le.Scalar,
        aten.gt.Scalar,
        aten.ge.Scalar,
        aten.clamp.default,
        aten.clamp_max.default,
    )
)

Order = tuple[Tensor, ...]
"""For each sample [S]: the slot that each row stands for."""


Found = dict[Any, Any]
"""What has been computed for layers of one graph, by the form of what was computed."""


def is_integral(node: Node) -> bool:
    """Whether `node` is an integer or boolean tensor."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.dtype.is_floating_point


class Indices:
    """Every integer tensor that follows from the ids of one router.

    Args:
        ids: [T, K], a node, or [B, S, K] with as many tokens.
        num_experts: E; ids lie in [0, E).
        found: What other layers of the graph have computed: of alike layers the first computes for all.
        start: What the graph's ids have in addition: the first expert of a part of all that a rank has.

    Raises:
        Refusal: ids of another rank, T or K are zero or not known, or there are too many slots to try.
    """

    def __init__(self, ids: Node, num_experts: int, found: Found, start: int = 0) -> None:
        self.ids, self.start = ids, start
        self.num_experts = num_experts
        shape = ids.meta["val"].shape
        self.num_tokens: int | torch.SymInt = math.prod(shape[:-1])
        """T."""
        if not isinstance(num_experts, int):
            raise Refusal(ids, f"a number of experts that is not known, {num_experts}, cannot be tried out")
        if len(shape) < 2:
            raise Refusal(
                ids, f"expert ids have shape {list(shape)}, raised are [T, K] or those of a best of row"
            )
        tokens, self.top_k = map(concrete, (self.num_tokens, shape[-1]))
        if not tokens or not self.top_k or tokens * self.top_k > _MOST_SLOTS or self.top_k > num_experts:
            raise Refusal(ids, f"expert ids of shape {list(shape)} cannot be tried out")
        repeats = self.top_k > 1 and may_repeat(ids)
        self._found, self._sizes = found, (num_experts, start, repeats, *map(str, shape))
        if self._sizes not in found:
            batches = crowded_batches(ids.graph, self.num_tokens, self.top_k)
            found[self._sizes] = samples((tokens, self.top_k), num_experts, repeats, batches)
        self.samples = found[self._sizes]
        """[T, K] each."""
        self._known: list[dict[Node, Any]] = [{ids: self.as_read(sample)} for sample in self.samples]

    @cached_property
    def slot_order(self) -> Order:
        """Row by row the slots as they come."""
        return tuple(torch.arange(sample.numel()) for sample in self.samples)

    @cached_property
    def by_choice(self) -> Order:
        """The first choices of all tokens, then the second ones, and so on."""
        return tuple(torch.arange(sample.numel()).view(sample.shape).T.flatten() for sample in self.samples)

    def of_choice(self, place: int) -> Order:
        """Row by row the slots of one choice of each token."""
        return tuple(torch.arange(len(sample)) * sample.shape[1] + place for sample in self.samples)

    def in_shape(self, given: Tensor) -> Tensor:
        """What has a number for each slot [T, K], or for each token [T, 1], in the shape that the ids have."""
        shape = self.ids.meta["val"].shape
        sizes = [size for each in shape[:-1] if (size := self.given(each, len(given))) is not None]
        if len(sizes) < len(shape) - 1:  # a capacity, say: of each expert, tokens were chosen
            reason = f"expert ids of shape {list(shape)} cannot be tried out for other numbers of tokens"
            raise Refusal(self.ids, reason)
        return given.view(*sizes, given.shape[1])

    def as_read(self, ids: Tensor) -> Tensor:
        """Ids [T, K] as the graph has them."""
        return self.in_shape(ids) + self.start

    def values(self, node: Node) -> tuple[Tensor, ...] | None:
        """`node` for each sample of ids; None when it depends on anything else."""
        found = cut([node], lambda each: each is self.ids)
        key = (self._sizes, form(found.leaves, found.nodes), self._leaves(found))
        if key not in self._found:
            self._found[key] = self._computed(node, found)
        return self._found[key]

    def _leaves(self, found: Cut) -> tuple[Any, ...]:
        """Which leaf is the ids; sizes are in the form."""
        return tuple(leaf is self.ids for leaf in found.leaves)

    def _computed(self, node: Node, found: Cut) -> tuple[Tensor, ...] | None:
        sizes = [leaf for leaf in found.leaves if leaf is not self.ids]
        if any(self.size(leaf, len(self.samples[0])) is None for leaf in sizes):
            return None
        try:
            for known, sample in zip(self._known, self.samples, strict=True):
                known.update({leaf: self.size(leaf, len(sample)) for leaf in sizes})
                known.update(evaluate([each for each in found.nodes if each not in known], known))
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return None
        return tuple(known[node] for known in self._known)

    def slots_behind(self, tokens: Node) -> tuple[Node, Order] | None:
        """[S]: the place of each row, by expert, lowest first, from which `tokens`, that of each row, is computed.

        `tokens` may be that place, too. Places are in the order that is given with them.
        """
        wanted = self.values(tokens)
        if wanted is None:
            return None
        nodes = cut([tokens], lambda each: each is self.ids).nodes
        found = ((node, self.values(node)) for node in nodes if is_integral(node))
        known = [(node, each) for node, each in found if each is not None and self._is_permutation(each)]
        for node, places in known:
            for order in (self.slot_order, self.by_choice):
                slots = taken(order, places)
                if self._is_sorted(slots) and self._leads_to(places, slots, wanted):
                    return node, order
        return None

    def order_of_places(self, node: Node, order: Order) -> Order | None:
        """In which order the rows lie of which `node` [S] picks those in `order`."""
        places = self.values(node)
        if places is None or not self._is_permutation(places):
            return None
        fits = (each for each in (self.slot_order, self.by_choice) if _equal(taken(each, places), order))
        return next(fits, None)

    def are_tokens(self, node: Node, order: Order) -> bool:
        """Whether `node` [S] is the token of each row."""
        values = self.values(node)
        return values is not None and self._tokens(order, values)

    def has_each_token(self, order: Order) -> bool:
        """Whether the rows are those of the tokens as they come, each once."""
        return self._tokens(order, tuple(torch.arange(len(sample)) for sample in self.samples))

    def lies_by_choice(self, order: Order) -> bool:
        """Whether rows are those of the first choices of all tokens, then of the second ones, and so on."""
        return all(map(torch.equal, self.by_choice, order))

    def are_slots(self, node: Node, order: Order) -> bool:
        """Whether `node` [S] is the slot of each row."""
        return _equal(self.values(node), order)

    def are_rows(self, node: Node, order: Order) -> bool:
        """Whether `node` [S] is the row of each slot."""
        return _equal(self.values(node), tuple(rows.argsort() for rows in order))

    def are_experts(self, node: Node, order: Order) -> bool:
        """Whether `node` [S] is the expert of each row."""
        experts = tuple(s.flatten()[rows] for s, rows in zip(self.samples, order, strict=True))
        return _equal(self.values(node), experts)

    def are_offsets(self, node: Node) -> bool:
        """Whether `node` [E] is where the rows of each expert end."""
        counts = (sample.flatten().bincount(minlength=self.num_experts) for sample in self.samples)
        return _equal(self.values(node), tuple(each.cumsum(0) for each in counts))

    def is_everywhere(self, node: Node, value: bool) -> bool:
        """Whether a mask has this value for every id that is in range."""
        values = self.values(node)
        return values is not None and all(
            each.dtype == torch.bool and bool((each == value).all()) for each in values
        )

    def size(self, leaf: Node, tokens: int) -> int | None:
        """A size with so many tokens; None for one that does not follow from T: it may differ from what was traced."""
        return self.given(leaf.meta["val"], tokens) if is_size(leaf) else None

    def given(self, size: int | torch.SymInt, tokens: int) -> int | None:
        """What a size is with so many tokens; None as above."""
        return size_given(size, self.num_tokens, tokens)

    def _is_sorted(self, order: Order) -> bool:
        return all(
            bool((sample.flatten()[rows].diff() >= 0).all())
            for sample, rows in zip(self.samples, order, strict=True)
        )

    def _tokens(self, order: Order, wanted: tuple[Tensor, ...]) -> bool:
        assert self.top_k is not None
        return _equal(wanted, tuple(rows // self.top_k for rows in order))

    def _leads_to(self, places: Order, order: Order, wanted: tuple[Tensor, ...]) -> bool:
        """Whether `wanted` has the token of each row, or its place among tokens that are repeated for each."""
        return self._tokens(order, wanted) or _equal(wanted, places)

    def _is_permutation(self, values: tuple[Tensor, ...]) -> bool:
        return all(
            isinstance(each, Tensor) and each.shape == rows.shape and torch.equal(each.sort().values, rows)
            for each, rows in zip(values, self.slot_order, strict=True)
        )


def crowded_batches(graph: Graph, num_tokens: int | torch.SymInt, top_k: int) -> int:
    """How many times T tokens are tried at the same experts: where T is open, more than any capacity in the graph has.

    More than `_MOST_TOKENS` at one expert are not tried.
    """
    if not is_open(num_tokens):
        return 1
    limits = (int(each) for each in compared(graph.nodes) if each < min(_MOST_TOKENS, _MOST_SLOTS // top_k))
    many = max(_MANY_TOKENS, *(each + 1 for each in limits), 0)
    return max(2, -(-many // (concrete(num_tokens) or 1)))


def compared(nodes: Iterable[Node]) -> tuple[float, ...]:
    """The constants that something is compared with."""
    return numbers(node for node in nodes if node.target in _COMPARISONS)


def samples(shape: tuple[int, int], num_experts: int, repeats: bool, batches: int) -> list[Tensor]:
    """Random ids [T, K], and batches of all tokens at the same experts, where a capacity shows.

    A token has an id twice only if it `repeats` any.
    """
    (tokens, top_k), generator = shape, torch.Generator().manual_seed(0)
    count = max(_MIN_SAMPLES, -(-_MIN_ROWS // tokens))
    if repeats:
        samples = [torch.randint(num_experts, shape, generator=generator) for _ in range(count)]
    else:
        draws = [torch.rand(tokens, num_experts, generator=generator) for _ in range(count)]
        samples = [draw.topk(top_k).indices for draw in draws]
    return [*samples, samples[0][:1].repeat(batches * tokens, 1)]


def taken(order: Order, places: Order) -> Order:
    """The slots at some places of an order."""
    return tuple(slots[place] for slots, place in zip(order, places, strict=True))


def _equal(values: tuple[Tensor, ...] | None, wanted: tuple[Tensor, ...]) -> bool:
    """Whether the numbers are the same, row by row; [T, K] and [S] may stand for each other."""
    return values is not None and all(
        isinstance(one, Tensor) and one.numel() == other.numel() and bool((one.flatten() == other).all())
        for one, other in zip(values, wanted, strict=True)
    )


def ids_behind(index: Node, num_slots: int | torch.SymInt) -> Node:
    """The ids [T, K], or [B, S, K], that `index` is computed from. Raises Refusal where there are none, or several."""

    def is_ids(node: Node) -> bool:
        value: Any = node.meta.get("val")
        if not is_integral(node) or value.dtype == torch.bool:
            return False
        has_all = _compat.statically_known_true(value.numel() == num_slots)
        return (has_all and value.dim() > 1 and not _is_reshaped(node)) or is_chosen(node)

    leaves = [leaf for leaf in cut([index], is_ids).leaves if not is_size(leaf)]
    if len(leaves) != 1 or not is_ids(leaves[0]):
        raise Refusal(index, f"expert ids come from {', '.join(map(describe, leaves)) or 'nowhere'}")
    return _innermost(leaves[0])


def _is_reshaped(node: Node) -> bool:
    """Whether `node` only shows ids in another shape, [T, 1, K], or follows from [B, S, K] seen as something else."""
    value: Any = node.meta["val"]
    if value.dim() > 2:
        return node.target in (*VIEWS, aten.permute.default, aten.clone.default)
    leaves = cut([node], lambda each: is_integral(each) and is_chosen(each)).leaves
    is_shown = node.target in VIEWS or (_is_turned(node) and all(map(is_found_in_rows, leaves)))
    fewest = 2 if is_shown else 3  # [S, 1] is no top-1 where ids are [T, K], nor is [K, T]
    chosen = (leaf.meta.get("val") for leaf in leaves)
    return any(isinstance(each, Tensor) and each.dim() >= fewest for each in chosen)


def _is_turned(node: Node) -> bool:
    """Whether `node` exchanges dimensions, copied perhaps."""
    while node.target is aten.clone.default:
        node = node.all_input_nodes[0]
    return node.target is aten.permute.default


def _innermost(ids: Node) -> Node:
    """The innermost tensor that `ids` shows in the same shape: a model copies them twice, or flattens one token's."""
    shown, inner = ids, ids
    while inner.target in (*VIEWS, aten.clone.default):
        inner = inner.all_input_nodes[0]
        shown = inner if inner.meta["val"].shape == ids.meta["val"].shape else shown
    return shown


def is_chosen(node: Node) -> bool:
    """Whether an integer comes out of an operator on floating numbers, as those of a top-k do."""
    rows = longer(node)
    if rows is not None and is_cut_out(node):
        return is_chosen(rows)
    source = getitem_source(node)
    inputs = node.all_input_nodes if source is None else source[0].all_input_nodes
    return not all(_is_counted(each) for each in inputs)


def _is_counted(node: Node, depth: int = 4) -> bool:
    """Whether `node` holds integers, as floating numbers perhaps: `histc` counts only those."""
    if not isinstance(node.meta.get("val"), Tensor) or is_integral(node):
        return True
    if node.op != "call_function" or depth == 0:
        return False
    return all(_is_counted(each, depth - 1) for each in node.all_input_nodes)
