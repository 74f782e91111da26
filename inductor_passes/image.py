"""The ATen image of a graph of Dynamo's: what it computes, functional and decomposed as the passes expect it.

A Dynamo graph calls whatever the user called, changes tensors in place, and has regions with autocast. Its image is
what AOTAutograd would make of the forward, node by node, so that what a pass finds there can be brought back. What must
not be looked into (higher-order operators, operators of ours, functions of the user's, what is called on DTensors) or
need not be (large dense operators) is an input of the image; what those change in place is random in the image from
there on, as nothing is known of it. Whose memory a DTensor is cannot be told: where one changes there is no image.
"""

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta, set_current_meta

from inductor_passes import _compat_tracing as tracing
from inductor_passes.raising.views_of_rows import VIEWS, aten

VALUE = "example_value"
"""Where Dynamo keeps the fake value of a node."""


class Image(NamedTuple):
    """What a Dynamo graph computes, and how the two correspond."""

    graph: Graph
    made: dict[Node, Node]
    """The node of the Dynamo graph that holds what a node here gives, once that is computed, and to the end."""
    ambiguous: set[Node]
    """What the Dynamo graph holds twice, once with a gradient and once without."""
    sources: dict[Node, Node | None]
    """The node of the Dynamo graph whose call a node here is part of."""
    reads: dict[tuple[Node, Node], Node]
    """For a node of the Dynamo graph and one that it reads: what that gives here, as it was when it was read."""
    final: dict[Node, Node]
    """What a node of the Dynamo graph holds in the end."""
    with_gradients: set[Node]
    """The nodes of the Dynamo graph whose values have a gradient."""
    stopping: dict[Node, Node]
    """Nodes here that what has a gradient goes into, and out of which comes what has none: of which node they are."""


def _stops_gradients(node: Node, with_gradients: set[Node]) -> bool:
    return node not in with_gradients and not with_gradients.isdisjoint(node.all_input_nodes)


def image_of(graph: Graph) -> Image:
    """The image of a Dynamo graph, whose nodes have the fake values of tracing.

    Raises:
        ValueError: a tensor made of tensors changes in place.
    """
    _expect_unchanged_wrappers(graph)
    traced = set(_traced(graph))
    inputs = [*_read_by(traced, graph)]
    run = _Tracing(graph, traced, inputs)
    with preserve_node_meta():
        module = tracing.functional_trace(run.compute, [node.meta[VALUE] for node in inputs])
    return run.image(module.graph)


class _Tracing:
    """One run over a Dynamo graph that remembers what became of each of its values."""

    def __init__(self, graph: Graph, traced: set[Node], inputs: list[Node]) -> None:
        self.graph, self.traced, self.inputs = graph, traced, inputs
        self.reads: dict[tuple[Node, Node], Node] = {}
        self.last: dict[Node, Node] = {}
        self.sources: dict[Node, Node | None] = {}
        self.same: dict[Node, Node] = {}
        self.shown: dict[Node, Node] = {}

    def compute(self, *values: Any) -> list[Any]:
        """What nodes read that are not traced: the outputs of the image."""
        known = dict(zip(self.inputs, values, strict=True))
        self.sources.update(dict.fromkeys(tracing.traced_nodes()))  # of no call
        outputs: list[Any] = []
        with tracing.autocast_left_as_it_is():
            for node in self.graph.nodes:
                given = {each: known[each] for each in node.all_input_nodes if each in known}
                for each, value in given.items():
                    self._note_read(node, each, value)
                with set_current_meta(node):
                    if node in self.traced:
                        known[node] = _run(node, known)
                        self._note_same(node, known)
                    else:
                        outputs += [value for value in given.values() if isinstance(value, Tensor)]
                        for each in tracing.changed_by(node):
                            if each in known:
                                known[each].bernoulli_()
                self.sources.update(dict.fromkeys(self._fresh(), node))
        self.last.update(_images(known))
        return outputs

    def _note_read(self, reader: Node, node: Node, value: Any) -> None:
        """Notes what `node` is now. A view of what has changed in place since is shown anew, all the way from that."""
        image = tracing.traced_node(value)
        if image is not None:
            self.reads[reader, node] = image
        shown = self._fresh()
        self.shown.update(dict.fromkeys(shown, node))
        self.sources.update(dict.fromkeys(shown, reader))

    def _fresh(self) -> list[Node]:
        return [*itertools.takewhile(lambda each: each not in self.sources, tracing.traced_nodes())]

    def _note_same(self, node: Node, known: dict[Node, Any]) -> None:
        """Notes whether a call gave the tensor that it was given: a cast to the dtype that it has stops no gradient."""
        value = known[node]
        given = next((each for each in node.all_input_nodes if known[each] is value), None)
        if given is not None and isinstance(value, Tensor) and not _changes_its_input(node):
            self.same[node] = given

    def image(self, graph: Graph) -> Image:
        """The image, once it is traced."""
        has_gradient = with_gradients(self.graph, self.same)
        stopping = dict(self._stopping(has_gradient))
        same = _once(graph, stopping)
        final = {node: same.get(found, found) for node, found in self.last.items()}
        reads = {read: same.get(found, found) for read, found in self.reads.items()}
        placeholders = (node for node in graph.nodes if node.op == "placeholder")
        made = {found: node for node, found in zip(self.inputs, placeholders, strict=True) if _is_size(node)}
        ambiguous: set[Node] = set()
        for node, found in final.items():
            other = made.setdefault(found, node)
            if (other in has_gradient) != (node in has_gradient):
                ambiguous.add(found)
        return Image(graph, made, ambiguous, self.sources, reads, final, has_gradient, stopping)

    def _stopping(self, has_gradient: set[Node]) -> Iterator[tuple[Node, Node]]:
        for found, node in self.sources.items():
            if node is not None and _stops_gradients(node, has_gradient):
                yield found, node
        of = {**self.sources, **self.shown}
        for found, node in self.shown.items():
            if node not in has_gradient and any(
                of.get(each) in has_gradient for each in found.all_input_nodes
            ):
                yield found, node
        for (_, node), found in self.reads.items():  # `detach_` gives what it is given
            if node not in has_gradient and of.get(found) in has_gradient:
                yield found, node


def _images(values: dict[Node, Any]) -> dict[Node, Node]:
    found = ((node, tracing.traced_node(value)) for node, value in values.items())
    return {node: image for node, image in found if image is not None}


def _once(graph: Graph, stopping: Collection[Node]) -> dict[Node, Node]:
    """Shows a tensor in one way once: functional code shows it anew whenever it may have changed in place.

    A size is asked for once: code asks it of any tensor that has it, of what experts give, too.
    """
    seen: dict[Any, Node] = {}
    same: dict[Node, Node] = {}
    for node in graph.nodes:
        key = _key(node, stopping)
        first = node if key is None else seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            same[node] = first
    graph.eliminate_dead_code()
    return same


def _key(node: Node, stopping: Collection[Node]) -> Any:
    """What is the same for two nodes that give the same view, or the same size; None for others."""
    if node.target in _VIEWS:
        return node.target, str(node.args), str(node.kwargs), node in stopping
    value = node.meta.get("val")
    return str(value) if isinstance(value, torch.SymInt) else None


_VIEWS = frozenset((*VIEWS, aten.permute.default, aten.slice.Tensor, aten.select.int, aten.alias.default))


def _run(node: Node, known: dict[Node, Any]) -> Any:
    args: Any = map_arg(node.args, known.__getitem__)
    kwargs: Any = map_arg(node.kwargs, known.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.target is tracing.DATA_OF:
        return args[0].detach()  # the same memory, which functional tensors do not see otherwise
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _read_by(traced: set[Node], graph: Graph) -> Iterator[Node]:
    read = {each for node in traced for each in node.all_input_nodes}
    return (node for node in graph.nodes if node in read and node not in traced)


def _traced(graph: Graph) -> Iterator[Node]:
    """The nodes that are looked into, and of whose inputs the values are known."""
    known: set[Node] = set()
    for node in graph.nodes:
        if _is_looked_into(node) and all(each in known or _has_value(each) for each in node.all_input_nodes):
            known.add(node)
            yield node


def _is_size(node: Node) -> bool:
    return not isinstance(node.meta[VALUE], Tensor)


def _has_value(node: Node) -> bool:
    value = node.meta.get(VALUE)
    is_known = isinstance(value, Tensor | int | float | torch.SymInt | torch.SymFloat)
    return is_known and not tracing.is_made_of_tensors(value)


def _expect_unchanged_wrappers(graph: Graph) -> None:
    for node in graph.nodes:
        first = node.all_input_nodes[0].meta.get(VALUE) if node.all_input_nodes else None
        if _changes_its_input(node) and tracing.is_made_of_tensors(first):
            raise ValueError(f"{node.target} changes a {type(first).__name__} in place")


def _is_looked_into(node: Node) -> bool:
    value, target = node.meta.get(VALUE), node.target
    if tracing.depends_on_data(value):
        return False
    if node.op == "call_method":
        return isinstance(value, Tensor | tuple | list)
    if node.op != "call_function" or (target in _DENSE and not _is_of_an_expert(node)):
        return False
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).partition(".")[0] in ("aten", "prims", "transformers")
    return target in (*tracing.AUTOCAST_CALLS, tracing.DATA_OF) or _is_of_torch(target)


def _is_of_an_expert(node: Node) -> bool:
    """Whether a dense product is one with `weight[expert]`, or with a part of that; or rows are of flat matrices."""
    is_with_weight = node.target in (torch.nn.functional.linear, torch.nn.functional.embedding)
    weight: Any = node.args[1] if is_with_weight and len(node.args) > 1 else None
    value = None if weight is None or weight.op == "placeholder" else weight.meta.get(VALUE)
    return isinstance(value, Tensor) and value._is_view()


_DENSE = frozenset(
    (
        torch.nn.functional.linear,
        torch.nn.functional.scaled_dot_product_attention,
        torch.nn.functional.embedding,
    )
)
_MODULES = frozenset(("torch", "torch.functional", "torch.nn.functional", "torch._C._nn"))


def _is_of_torch(target: Any) -> bool:
    """Whether a function is one of torch's on tensors, or an operator of Python's."""
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None)
    if getattr(operator, name, None) is target or getattr(torch, name, None) is target:
        return True
    return module in _MODULES or target is getattr


def with_gradients(graph: Graph, same: Mapping[Node, Node]) -> set[Node]:
    """The nodes of a Dynamo graph whose values have a gradient, those that are the `same` as what they read among them.

    A fake value does not say it all: of a view made where gradients are off it says what it says of the base.
    """
    found: set[Node] = set()
    is_on = True
    for node in graph.nodes:
        is_on = tracing.gradients_on_after(node, is_on)
        value, inputs = node.meta.get(VALUE), node.all_input_nodes
        may_have = not isinstance(value, Tensor) or value.requires_grad
        has_one = is_on and may_have and (not inputs or not found.isdisjoint(inputs))
        if same[node] in found if node in same else has_one:
            found.add(node)
            if inputs and _changes_its_input(node):
                found.add(inputs[0])
    return found


def _changes_its_input(node: Node) -> bool:
    """Whether a call changes the first tensor that it is given, as names say: `add_`, `setitem`, `iadd`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_operator = getattr(operator, name, None) is node.target
    return name.partition(".")[0].endswith("_") or (is_operator and (name == "setitem" or name[0] == "i"))


def reads_of(image: Image, node: Node) -> Iterable[tuple[Node, Node]]:
    """Where the Dynamo graph reads what `node` of the image gives: who, and what there."""
    return [pair for pair, found in image.reads.items() if found is node]
