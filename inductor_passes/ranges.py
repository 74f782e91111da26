"""Many names in short: what differs in numbers only is told once."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence


def unnumbered(line: str) -> str:
    """Without the numbers torch appends to the names of nodes, which tell one layer's from the next one's."""
    return re.sub(r"\b([A-Za-z_]\w*?)_\d+\b", r"\1", re.sub(r"\barg\d+_1\b", "arg", line))


def counted(names: Iterable[str]) -> str:
    """Names of nodes without numbers, each with how often it occurs."""
    times = Counter(map(unnumbered, names))
    return ", ".join(name if number == 1 else f"{name} x{number}" for name, number in times.items())


def count(number: int, thing: str) -> str:
    """As in "1 layer", "2 layers"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def name_ranges(names: Iterable[str]) -> str:
    """Dotted names in short: those that differ in their first number only become one, "layers.0-3,5.mlp"."""
    numbers: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    places: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in names:
        path, _, where = name.partition(" in ")
        before, number, after = re.fullmatch(
            r"(.*?)(?:(?<![A-Za-z\d])(\d+)(?![A-Za-z\d])(.*))?", path
        ).groups("")  # type: ignore[union-attr]
        key = before, after, starred(where)
        places[key].append(where)
        numbers[key] += [int(number)] if number else []
    return ", ".join(f"{key[0]}{_ranges(numbers[key])}{key[1]}{place_of(places[key])}" for key in places)


def place_of(places: Sequence[str]) -> str:
    """Where layers sit, as in " in true_graph_0 of cond"; empty for no subgraph."""
    place = places[0] if len(set(places)) == 1 else starred(places[0])
    return f" in {place}" if place else ""


def starred(place: str) -> str:
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
