"""A report in words: layer by layer, those that are alike told once."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inductor_passes.base import Fusion, Refused
from inductor_passes.hazards import Hazard
from inductor_passes.records import Break, LayerGraph, Unfused


@dataclass(frozen=True, slots=True)
class Events:
    """What the passes did, by kind."""

    fused: Sequence[Fusion]
    refused: Sequence[Refused]
    lowered: Sequence[Fusion]
    kept: Sequence[Refused]

    def of(self, layer: str) -> tuple[str, ...]:
        """One line for each thing that happened to a layer."""
        fused = dict.fromkeys(each.kind for each in self.fused if each.layer == layer)
        lowered: dict[str, list[str]] = defaultdict(list)
        for each in self.lowered:
            if each.layer == layer:
                lowered[each.kind] += each.nodes
        return (
            *([f"fused: {', '.join(fused)}"] if fused else []),
            *(f"refused: {each.node}: {each.reason}" for each in self.refused if each.layer == layer),
            *(f"written out: {_counted(nodes)} as {kind}" for kind, nodes in lowered.items()),
            *(f"kept as a call: {each.node}: {each.reason}" for each in self.kept if each.layer == layer),
        )

    def layers(self) -> dict[str, None]:
        """Names of the layers anything happened to."""
        return dict.fromkeys(each.layer for each in (*self.fused, *self.refused, *self.lowered, *self.kept))


def headline(num_graphs: int, is_training: bool, layers: Sequence[LayerGraph], events: Events) -> str:
    """How many graphs and layers there are, and how many of these are fused, wholly or in part."""
    if not num_graphs:
        return "no graph"
    graphs = _count(num_graphs, f"{'training' if is_training else 'inference'} graph")
    total = sum(layer.calls for layer in layers)
    if not total:
        return f"{graphs}, 0 MoE layers"
    touched, refused = ({each.layer for each in kind} for kind in (events.fused, events.refused))
    wholly = sum(layer.calls for layer in layers if layer.name in touched - refused)
    partly = sum(layer.calls for layer in layers if layer.name in touched & refused)
    told = "all fused" if wholly == total else f"{wholly} fused" if wholly or partly else "none fused"
    part = f", {partly} in part" if partly else ""
    return f"{graphs}, {_count(total, 'MoE layer')}, {told}{part}{_inside(layers)}"


def _inside(layers: Sequence[LayerGraph]) -> str:
    places: dict[str, list[LayerGraph]] = defaultdict(list)
    for layer in layers:
        if layer.where:
            places[_starred(layer.where)].append(layer)
    told = (
        f"{sum(layer.calls for layer in inside)}{_place([layer.where for layer in inside])}"
        for inside in places.values()
    )
    return f"; {', '.join(told)}" if places else ""


def layer_lines(layers: Sequence[LayerGraph], events: Events) -> list[str]:
    """Every layer with its size and what happened to it, alike layers together."""
    alike: dict[object, list[LayerGraph]] = defaultdict(list)
    for layer in layers:
        story = tuple(map(_unnumbered, events.of(layer.name)))
        alike[layer.before, layer.after, layer.launches, layer.calls, story].append(layer)
    lines = []
    for members in alike.values():
        told = events.of(members[0].name)
        lines.append(f"{_title(members)}: {_size(members[0])}")
        lines += [f"  {line if len(members) == 1 else _unnumbered(line)}" for line in told]
    outside = [name for name in events.layers() if name not in {layer.name for layer in layers}]
    for name in outside:
        lines += ["operators outside a layer:" if name == "?" else f"{name}:"]
        times = Counter(map(_unnumbered, events.of(name)))
        lines += [f"  {line}{f' ({number} times)' if number > 1 else ''}" for line, number in times.items()]
    return lines


def _title(members: Sequence[LayerGraph]) -> str:
    times = f", called {members[0].calls} times" if members[0].calls > 1 else ""
    each = " each" if times and len(members) > 1 else ""
    alike = f" ({len(members)} layers)" if len(members) > 1 else ""
    return f"{name_ranges([member.name for member in members])}{alike}{times}{each}"


def _size(layer: LayerGraph) -> str:
    launches = f", {layer.launches} Triton launches" if layer.launches else ""
    return f"{layer.before} -> {layer.after} operator calls{launches}"


def _unnumbered(line: str) -> str:
    """Without the numbers torch appends to the names of nodes, which tell one layer's from the next one's."""
    return re.sub(r"\b([A-Za-z]\w*?)_\d+\b", r"\1", re.sub(r"\barg\d+_1\b", "arg", line))


def _counted(nodes: Iterable[str]) -> str:
    times = Counter(map(_unnumbered, nodes))
    return ", ".join(name if number == 1 else f"{name} x{number}" for name, number in times.items())


def name_ranges(names: Iterable[str]) -> str:
    """Dotted names in short: those that differ in their first number only become one, "layers.0-3,5.mlp"."""
    numbers: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    places: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in names:
        path, _, where = name.partition(" in ")
        before, number, after = re.fullmatch(
            r"(.*?)(?:(?<![A-Za-z\d])(\d+)(?![A-Za-z\d])(.*))?", path
        ).groups("")  # type: ignore[union-attr]
        key = before, after, _starred(where)
        places[key].append(where)
        numbers[key] += [int(number)] if number else []
    return ", ".join(f"{key[0]}{_ranges(numbers[key])}{key[1]}{_place(places[key])}" for key in places)


def _place(places: Sequence[str]) -> str:
    place = places[0] if len(set(places)) == 1 else _starred(places[0])
    return f" in {place}" if place else ""


def _starred(place: str) -> str:
    """A subgraph's name without the numbers that tell it from others of its kind."""
    return re.sub(r"\d+", "*", place)


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def unfused_lines(modules: Sequence[Unfused]) -> list[str]:
    """Modules by class, with name ranges."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        by_kind[module.kind].append(module.name)
    return [f"{name_ranges(names) or 'the model'} ({kind})" for kind, names in by_kind.items()]


def break_lines(breaks: Iterable[Break]) -> list[str]:
    """One line for each graph break."""
    headlines = ((each.reason.strip().partition("\n")[0], each.location) for each in breaks)
    return [f"{reason} ({location})" if location else reason for reason, location in headlines]


def hazard_lines(hazards: Iterable[Hazard]) -> list[str]:
    """Hazards, the same one at several nodes told once."""
    nodes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in hazards:
        nodes[each.target, each.reason].append(each.node)
    return [
        f"{names[0]} ({target}): {reason}{f', and {len(names) - 1} more like it' if names[1:] else ''}"
        for (target, reason), names in nodes.items()
    ]


def section(title: str, lines: Sequence[str], number: int | None = None) -> list[str]:
    """A title with the number of things told, and the lines under it."""
    number = len(lines) if number is None else number
    return [f"{title}: {number or 'none'}", *(f"  {line}" for line in lines)]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
