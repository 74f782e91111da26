"""What a graph does again and again, found by what its nodes call: a model's layers are a row of alike stretches.

A stretch is a run of nodes that calls the same operators with the same options on tensors of the same layout, put
together in the same way, from other inputs.
"""

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.forms import form, kind_of

MIN_REPEATS = 4
_MAX_PERIODS, _MAX_TRIES = 8, 16


class Stretch(NamedTuple):
    """A run of nodes, what it reads and what is read of it."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    """In the order in which they are read first."""


class Repeats(NamedTuple):
    """Alike stretches."""

    stretches: tuple[Stretch, ...]
    outputs: tuple[int, ...]
    """Places of the nodes that anything behind any of the stretches reads."""


def repeats(graph: Graph) -> Repeats | None:
    """The stretches that cover most of `graph`: at least four, of nodes that a function may run."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    kinds = _numbered(map(kind_of, nodes))
    period, first, last = _longest_run(kinds)
    if (last - first) // period < MIN_REPEATS:
        return None
    staying = _Staying(nodes)
    found = (
        _alike(staying, kinds, range(begin, last - length + 1, period), length)
        for begin, length in _bounds(staying, first, last, period)[:_MAX_TRIES]
    )
    return next((each for each in found if each is not None), None)


def _alike(staying: "_Staying", kinds: Sequence[int], starts: range, length: int) -> Repeats | None:
    """Those of the stretches at `starts` that are put together as most are, if one function can stand for them."""
    nodes, starts_free = staying.all, [at for at in starts if not staying.stands_in(at, at + length)]
    if not starts_free:
        return None
    known, gap = dict(zip(nodes, kinds, strict=True)), starts.step - length
    found = [
        _stretch((*_siblings(nodes[max(start - gap, 0) : start], inside, known), *inside))
        for start in starts_free
        for inside in [[node for node in nodes[start : start + length] if may_move(node)]]
    ]
    forms = [form(each.inputs, each.nodes, known) for each in found]
    most = Counter(forms).most_common(1)[0][0]
    alike = [each for each, one in zip(found, forms, strict=True) if one == most]
    while shown := _views_of_inputs(alike):
        alike = [
            _stretch(node for place, node in enumerate(each.nodes) if place not in shown) for each in alike
        ]
    outputs = _outputs(alike)
    if len(alike) < MIN_REPEATS or _shares_memory(alike[0], outputs):
        return None
    return Repeats(tuple(alike), outputs)


def _siblings(before: Sequence[Node], inside: Sequence[Node], kinds: Mapping[Node, int]) -> list[Node]:
    """Those of the nodes `before` a stretch that are read inside alone, and that Inductor would fuse with one there.

    Both do the same with an input that both read: what attention gathers of cached keys and of values. Their views too.
    """
    within, twins = set(inside), {(kinds[node], each) for node in inside for each in node.all_input_nodes}
    found: list[Node] = []
    if any(map(changes, before)):
        return found
    for node in before:
        if any((kinds[node], each) in twins for each in node.all_input_nodes):
            views = _with_views(node, before)
            if all(user in within or user in views for each in views for user in each.users):
                found += views
    return found


def _with_views(node: Node, nodes: Iterable[Node]) -> list[Node]:
    views = [node]
    for each in nodes:
        if is_part(each) and each.args[0] in views:
            views.append(each)
    return views


def _numbered(kinds: Iterable[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(kind, len(numbers)) for kind in kinds]


def _longest_run(kinds: Sequence[int]) -> tuple[int, int, int]:
    """A period and the range in which `kinds` repeat with it: the longest range, and of these the shortest period."""
    last_seen: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for place, kind in enumerate(kinds):
        if kind in last_seen:
            distances[place - last_seen[kind]] += place - last_seen[kind]
        last_seen[kind] = place
    runs = [_run(kinds, period) for period, _ in distances.most_common(_MAX_PERIODS)]
    return max(runs, key=lambda run: (run[2] - run[1], -run[0]), default=(1, 0, 0))


def _run(kinds: Sequence[int], period: int) -> tuple[int, int, int]:
    best, start = (period, 0, 0), 0
    for place in range(len(kinds) - period + 1):
        if place == len(kinds) - period or kinds[place] != kinds[place + period]:
            if place > start and place + period - start > best[2] - best[1]:
                best = (period, start, place + period)
            start = place + 1
    return best


def _bounds(staying: "_Staying", first: int, last: int, period: int) -> list[tuple[int, int]]:
    """Where the first stretch may begin and how long it may be, the most gainful first.

    It begins and ends behind calls that Inductor fuses with nothing, so that no fusion is lost at its borders, where
    few values are alive. What has to stay in the graph runs before it.
    """
    nodes = staying.all
    second = first + period  # what is alive in the first may come from before the run
    cuts = [
        place for place in range(second, second + period) if _is_behind_a_call(nodes[place - 1], nodes[place])
    ]
    pairs = [
        (cut - period, length)
        for cut in cuts
        for end in (*cuts, *(each + period for each in cuts))
        if (length := end - cut) in range(1, period + 1) and not staying.stands_in(cut, end)
    ]
    alive = {cut - period: _alive(nodes, cut) for cut in cuts}

    def gain(pair: tuple[int, int]) -> tuple[int, int]:
        begin, length = pair
        return len(range(begin, last - length + 1, period)) * length, -alive[begin]

    return sorted(pairs, key=gain, reverse=True)


class _Staying:
    """The nodes of a graph that no function may take in."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.all = nodes
        self.places = {node: place for place, node in enumerate(nodes)}
        self.nodes = [node for node in nodes if not may_move(node)]

    def stands_in(self, begin: int, end: int) -> bool:
        """Whether one of those from `begin` to `end` cannot run before all others there."""
        inside = [node for node in self.nodes if begin <= self.places[node] < end]
        read = (source for node in inside for source in node.all_input_nodes if may_move(source))
        return any(map(changes, inside)) or any(self.places.get(source, -1) >= begin for source in read)


def _alive(nodes: Sequence[Node], cut: int) -> int:
    """How many values computed before `cut` are read behind it."""
    before = set(nodes[:cut])
    return len({source for node in nodes[cut:] for source in node.all_input_nodes if source in before})


def _is_behind_a_call(before: Node, here: Node) -> bool:
    while is_part(before):
        before = before.args[0]  # type: ignore[assignment]
    return not is_part(here) and before.op == "call_function" and is_call(before)


def is_part(node: Node) -> bool:
    """Whether a node picks an output of another, or views it."""
    is_view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
    return node.target is operator.getitem or is_view or node.target in _RESHAPES


aten = torch.ops.aten
_RESHAPES = (aten.reshape.default, aten._unsafe_view.default)
_SIZES = (
    aten.sym_size.int,
    aten.sym_numel.default,
    operator.mul,
    operator.add,
    operator.sub,
    operator.floordiv,
)
_GENERATED_OR_SENT = ("aten", "prims", "_c10d_functional")
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"))


def is_call(node: Node) -> bool:
    """Whether Inductor calls a kernel for this node, rather than generating one. What ranks send is none."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target in _calls()
    namespace, _, name = node.target._schema.name.partition("::")
    return namespace not in _GENERATED_OR_SENT or name in _PRODUCTS or name.startswith("_scaled_dot_product")


def _calls() -> tuple[Any, ...]:
    """What calls a kernel and is no operator."""
    return _compat.triton_launch(), _compat.grouped_mm()


def may_move(node: Node) -> bool:
    """Whether a node may run in a function of its own: it changes nothing, and no input is to be changed to it."""
    target = node.target
    if any(user.target is aten.copy_.default for user in node.users) or node.meta.get("unbacked_bindings"):
        return False
    if _is_size(node):
        return target in _SIZES
    if isinstance(target, torch._ops.OpOverload):
        return not changes(node) and not _draws(node, target)
    return target is operator.getitem or target in _calls()


def changes(node: Node) -> bool:
    """Whether a node changes a tensor that is there."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _draws(node: Node, target: torch._ops.OpOverload) -> bool:
    """Whether a node draws random numbers; attention without dropout does not."""
    names = (argument.name for argument in target._schema.arguments)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    is_attention = target._schema.name.startswith("aten::_scaled_dot_product")
    draws = torch.Tag.nondeterministic_seeded in target.tags
    return draws and not (is_attention and not given.get("dropout_p", 0.0))


def _stretch(nodes: Iterable[Node]) -> Stretch:
    inside = dict.fromkeys(nodes)
    read = dict.fromkeys(source for node in inside for source in node.all_input_nodes if source not in inside)
    return Stretch(tuple(inside), tuple(read))


def _views_of_inputs(stretches: Sequence[Stretch]) -> set[int]:
    """Places of what is read behind a stretch and only shows an input or sizes of inputs: that stays where it is."""
    inputs = set(stretches[0].inputs)
    outputs = ((place, stretches[0].nodes[place]) for place in _outputs(stretches))
    shown = ((place, node) for place, node in outputs if is_part(node) or _is_size(node))
    return {place for place, node in shown if inputs.issuperset(node.all_input_nodes)}


def _outputs(stretches: Iterable[Stretch]) -> tuple[int, ...]:
    read = set()
    for stretch in stretches:
        inside = set(stretch.nodes)
        read |= {
            place for place, node in enumerate(stretch.nodes) if any(u not in inside for u in node.users)
        }
    return tuple(sorted(read))


def _shares_memory(stretch: Stretch, outputs: Sequence[int]) -> bool:
    """Whether an output is a view of an input or of another output, which a function must not return."""
    results = [stretch.nodes[place].meta["val"] for place in outputs]
    if not all(isinstance(each, torch.Tensor) for each in results):
        return True
    read = [node.meta["val"] for node in stretch.inputs if isinstance(node.meta["val"], torch.Tensor)]
    inputs = {each.untyped_storage()._cdata for each in read}
    storages = [each.untyped_storage()._cdata for each in results]
    return len(set(storages)) < len(storages) or not inputs.isdisjoint(storages)
