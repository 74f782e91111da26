"""Brings what passes made of an image back into the graph of Dynamo's that it is the image of.

Only what the passes put in comes back, with whatever of the image it reads and the Dynamo graph does not hold itself.
Nothing is taken away: what nobody reads any more AOTAutograd drops; what changed a tensor in place goes on doing so.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import arguments, describe, inherit_meta, is_moe_op, is_op
from inductor_passes.image import VALUE, Image, reads_of
from inductor_passes.raising.evaluation import is_plain
from inductor_passes.raising.views_of_rows import aten, prims

Inputs = dict[Node, list[Node]]
"""What each node of an image reads."""


def inputs_of(graph: Graph) -> Inputs:
    """What each node reads, argument by argument."""
    return {node: list(_arguments(node)) for node in graph.nodes}


def _arguments(node: Node) -> list[Node]:
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


class Transplant:
    """Puts what replaced nodes of `image` into `graph`; `before` is `inputs_of` the image as it was traced."""

    def __init__(self, graph: Graph, image: Image, before: Inputs) -> None:
        self.graph, self.image, self.before = graph, image, before
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.copies: dict[Node, Node] = {}
        self.leaves: set[Node] = set()
        self.changed: list[tuple[Node, tuple[Any, Any]]] = []

    def commit(self) -> list[tuple[Refusal, Node]]:
        """Writes what can be written. For each place that keeps what it had: why, and the new node of the image."""
        replaced = {old: new for old, new in self._replaced() if reads_of(self.image, old)}
        refused: list[tuple[Refusal, Node]] = []
        for old in sorted(replaced, key=lambda each: self.order[self.image.sources[each]]):
            copies, changed = len(self.copies), len(self.changed)
            try:
                self._replace(old, replaced[old])
            except Refusal as refusal:
                self.take_back(copies, changed)
                refused.append((refusal, replaced[old]))
        return refused

    def still_read(self, products: Iterable[Node]) -> list[Node]:
        """Which products of the image the Dynamo graph still needs."""
        read: set[Node] = set()
        pending = [node for node in self.graph.nodes if node.op == "output" or _acts(node)]
        while pending:
            node = pending.pop()
            if node not in read:
                read.add(node)
                pending.extend(node.all_input_nodes)
        return [product for product in products if self.image.sources[product] in read]

    def _replaced(self) -> Iterator[tuple[Node, Node]]:
        """(node, what is in its place), where the Dynamo graph sees it."""
        pending = list(dict.fromkeys(self._pairs()))
        seen: set[Node] = set()
        while pending:
            old, new = pending.pop()
            if old in seen or old.op != "call_function":
                continue
            seen.add(old)
            yield old, new
            if not reads_of(
                self.image, old
            ):  # part of a call that gives something else: that is computed anew
                pending += [(user, user) for user in new.users if user in self.before and user.op != "output"]

    def _pairs(self) -> Iterator[tuple[Node, Node]]:
        for node, inputs in self.before.items():
            if not node._erased:
                yield from (
                    (old, new) for old, new in zip(inputs, _arguments(node), strict=True) if old is not new
                )

    def _replace(self, old: Node, new: Node) -> None:
        place = self.image.sources[old]
        assert place is not None  # a node of no call is an input, which nothing replaces
        with self.graph.inserting_before(place):
            written = self._written(new, place)
        self._expect_gradients(old)
        for reader, read in reads_of(self.image, old):
            if self.image.final[read] is not old:
                raise Refusal(read, f"{read.name} is changed in place later")
            self.changed.append((reader, (reader.args, reader.kwargs)))
            reader.replace_input_with(read, written)

    def _written(self, node: Node, place: Node, reader: Node | None = None) -> Node:
        """The node of the Dynamo graph that holds what `reader` reads of `node`, written where there is none."""
        if node in self.image.ambiguous:
            raise Refusal(place, f"{describe(node)} is there with a gradient and without")
        held = self.image.made.get(node) if self._is_as_traced(node) else None
        if (
            held is not None
            and self._is_before(held, place)
            and self._is_before(self.image.sources.get(node), place)
        ):
            self.leaves.add(node)
            return held
        if node.op == "placeholder":
            return self._as_it_was(node, place, reader)
        if node not in self.copies:
            if node.op != "call_function" or not (is_moe_op(node) or _has_derivative(node)):
                raise Refusal(place, f"{describe(node)} cannot be computed again")
            for each in node.all_input_nodes:
                self._written(each, place, node)
            copy = self.graph.node_copy(node, lambda each: self._written(each, place, node))
            copy.target, copy.args, copy.kwargs = _with_derivative(copy)
            inherit_meta(copy, node)
            value = copy.meta.pop("val", None)  # torch asks it, too, whether there is a gradient
            copy.meta[VALUE] = _recorded(value, place in self.image.with_gradients)
            self.copies[node] = copy
        return self.copies[node]

    def _as_it_was(self, given: Node, place: Node, reader: Node | None) -> Node:
        """A copy of a router's bias that is changed in place later, as one is that follows the load of experts.

        Of anything else a backward may read the copy, for which AOTAutograd takes what has become of it.
        """
        is_bias = reader is not None and is_op(reader, "topk_routing") and _bias(reader) is given
        reads = reads_of(self.image, given)
        held = next((read for reader, read in reads if not self._is_before(reader, place)), None)
        if held is None or not is_bias:
            raise Refusal(place, f"{describe(given)} is changed in place")
        if given not in self.copies:
            self.copies[given] = self.graph.call_function(aten.clone.default, (held,))
            self.copies[given].meta[VALUE] = held.meta[VALUE]
        return self.copies[given]

    def _is_before(self, node: Node | None, place: Node) -> bool:
        return node is None or self.order[node] < self.order[place]

    def _is_as_traced(self, node: Node) -> bool:
        return self.before.get(node) == _arguments(node) or node.op == "placeholder"

    def _expect_gradients(self, old: Node) -> None:
        """Refuses where gradients stop on the way to `old`: the operators would let them pass."""
        pending, seen = [old], set(self.leaves)
        while pending:
            node = pending.pop()
            if node in seen or not _is_floating(node.meta.get("val")):
                continue
            seen.add(node)
            stopping, inputs = self.image.stopping.get(node), self.before.get(node, [])
            is_computed = any(
                _is_floating(each.meta.get("val")) for each in inputs
            )  # `zeros_like` reads a shape
            if stopping is not None and is_computed:
                raise Refusal(stopping, f"gradients stop at {stopping.name}")
            pending += inputs

    def take_back(self, copies: int = 0, changed: int = 0) -> None:
        """Undoes what came after so many copies and changed readers; by default everything."""
        while len(self.changed) > changed:
            node, (args, kwargs) = self.changed.pop()
            node.args, node.kwargs = args, kwargs
        while len(self.copies) > copies:
            self.graph.erase_node(self.copies.popitem()[1])


def _bias(router: Node) -> object:
    return arguments(router).router.correction_bias


def _has_derivative(node: Node) -> bool:
    """Whether a call gives the same when it is made again, and has a gradient where its inputs have one."""
    if getattr(node.target, "namespace", "") == "prims" and _is_floating(node.meta.get("val")):
        return node.target in (prims.convert_element_type.default, prims.rev.default)
    return is_plain(node) and node.target is not aten.copy.default


def _with_derivative(copy: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target and arguments of the same call as an operator that has a derivative."""
    if copy.target is prims.convert_element_type.default:
        return aten._to_copy.default, copy.args[:1], {"dtype": copy.args[1]}
    if copy.target is prims.rev.default:
        return aten.flip.default, copy.args, {}
    return copy.target, copy.args, copy.kwargs


def _recorded(value: Any, has_gradient: bool) -> Any:
    """The fake value of a copy, which was traced without gradients, as torch asks it in a nested region."""
    if not isinstance(value, Tensor) or not _is_floating(value):
        return value
    return value.detach().requires_grad_(has_gradient)


def _is_floating(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_floating, value))
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def _acts(node: Node) -> bool:
    """Whether a call does something even if nobody reads what it gives, other than changing a tensor of the graph."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)
