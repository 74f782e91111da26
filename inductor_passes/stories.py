"""What happened to each MoE layer, gathered from the records of a report, and which layers have the same to tell."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from inductor_passes.base import Fusion, Refused
from inductor_passes.hazards import Hazard
from inductor_passes.naming import WHOLE_LAYERS, is_within, path_of
from inductor_passes.ranges import starred, unnumbered
from inductor_passes.records import Break, Entry, Exchange, GraphView, LayerGraph, NodeView, Unfused


class Verdict(Enum):
    """What became of a layer; the value is what people read."""

    FUSED = "fused"
    PART = "in part"
    NONE = "not fused"
    STOCK = "stock"
    UNSEEN = "not traced"


@dataclass(frozen=True, slots=True)
class Story:
    """One layer with everything that is known about it."""

    size: LayerGraph
    kind: str
    """Its class, for a module that runs no operator of ours."""
    entries: tuple[Entry, ...]
    hazards: tuple[Hazard, ...]
    breaks: tuple[Break, ...]
    before: tuple[NodeView, ...]
    after: tuple[NodeView, ...]
    written: tuple[NodeView, ...]

    @property
    def name(self) -> str:
        """The layer's."""
        return self.size.name

    @property
    def verdict(self) -> Verdict:
        """Fused wholly when something was fused and nothing refused, or one operator is all of it from the start."""
        actions = {entry.action for entry in self.entries}
        if self.kind:
            return Verdict.STOCK if self.size.before else Verdict.UNSEEN
        if "fused" not in actions and not self._is_one_operator:
            return Verdict.NONE
        return Verdict.PART if "refused" in actions else Verdict.FUSED

    @property
    def _is_one_operator(self) -> bool:
        return any(node.label.rpartition(".")[2] in WHOLE_LAYERS for node in self.after if node.layer)

    @property
    def key(self) -> object:
        """Equal for layers that are alike in all but the numbers in their names."""
        return (
            self.kind,
            replace(self.size, name="", where=""),
            tuple(
                (each.action, each.kind, _unnumbered(each.nodes), unnumbered(each.reason))
                for each in self.entries
            ),
            tuple((unnumbered(each.node), each.target, each.reason) for each in self.hazards),
            tuple((each.reason, each.location) for each in self.breaks),
            *(shape(drawn) for drawn in (self.before, self.after, self.written)),
        )


def _unnumbered(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(unnumbered, names))


def shape(nodes: Sequence[NodeView]) -> object:
    """The layer's part of a drawing, without the names of its nodes: what reads which, by position."""
    nodes = [node for node in nodes if node.layer]
    places = {node.name: index for index, node in enumerate(nodes)}
    return tuple(
        (
            starred(node.label),
            node.detail,
            tuple(places[name] for name in node.inputs if name in places),
        )
        for node in nodes
    )


def entries_of(action: str, records: Iterable[Fusion | Refused]) -> list[Entry]:
    """The records of one list of a `PassLog`: they have a layer, `nodes` or a `node`, and a kind or a reason."""
    return [
        Entry(
            action,
            each.layer,
            getattr(each, "nodes", None) or (getattr(each, "node", ""),),
            getattr(each, "kind", ""),
            getattr(each, "reason", ""),
        )
        for each in records
    ]


@dataclass(frozen=True, slots=True)
class Told:
    """What a report holds, for those who tell it."""

    subject: str
    is_training: bool
    remarks: Sequence[str]
    layers: Sequence[LayerGraph]
    unfused: Sequence[Unfused]
    entries: Sequence[Entry]
    hazards: Sequence[Hazard]
    breaks: Sequence[Break]
    graphs: Sequence[GraphView]
    exchanges: Sequence[Exchange] = ()

    @property
    def num_graphs(self) -> int:
        """How many Dynamo traced, subgraphs aside."""
        return sum(not graph.where for graph in self.graphs)

    def stories(self) -> list[Story]:
        """One for each layer, those that run no operator of ours last."""
        stock = [(each.size or LayerGraph(each.name, 0, 0, 0), each.kind) for each in self.unfused]
        return [self._story(size, kind) for size, kind in (*((layer, "") for layer in self.layers), *stock)]

    def outside(self) -> list[Entry]:
        """What happened to no layer."""
        known = {each.name for each in (*self.layers, *self.unfused)}
        return [entry for entry in self.entries if self._layer_of(entry) not in known]

    def _layer_of(self, entry: Entry) -> str:
        """The layer's name, or the MoE module it is in: a pass may know no more than the experts."""
        path = path_of(entry.layer)
        return next((each.name for each in self.unfused if is_within(path, each.name)), entry.layer)

    def _story(self, size: LayerGraph, kind: str) -> Story:
        name, path = size.name, path_of(size.name)
        return Story(
            size,
            kind,
            tuple(each for each in self.entries if self._layer_of(each) == name),
            tuple(each for each in self.hazards if is_within(each.module, path)),
            tuple(each for each in self.breaks if path in each.layers),
            tuple(node for graph in self.graphs for node in _with_inputs(name, graph.before)),
            tuple(node for graph in self.graphs for node in _with_inputs(name, graph.after)),
            tuple(node for graph in self.graphs for node in _with_inputs(name, graph.written)),
        )


def _with_inputs(layer: str, nodes: Sequence[NodeView]) -> list[NodeView]:
    """The nodes of one layer, and what they read."""
    read = {name for node in nodes if node.layer == layer for name in node.inputs}
    return [
        node if node.layer == layer else replace(node, layer="", inputs=())
        for node in nodes
        if node.layer == layer or node.name in read
    ]


def alike(stories: Iterable[Story]) -> list[list[Story]]:
    """Stories that differ in numbers only, together, in order of the first of each."""
    groups: dict[object, list[Story]] = defaultdict(list)
    for story in stories:
        groups[story.key].append(story)
    return list(groups.values())
