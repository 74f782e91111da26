"""A report in words: layer by layer, those that are alike told once."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch

from inductor_passes.costs import of_run
from inductor_passes.hazards import Hazard
from inductor_passes.ranges import count, counted, name_ranges, place_of, starred, unnumbered
from inductor_passes.records import Break, Cost, Entry, Exchange, LayerGraph, Unfused
from inductor_passes.stories import Story, Told, Verdict, alike

# What the lists of a pass log are called; another one is called what it is.
_ACTIONS = {"lowered": "written out", "kept": "kept as a call", "captured": "gate inlined"}


def lines(told: Told) -> list[str]:
    """The whole report."""
    stories, breaks, hazards = told.stories(), told.breaks, told.hazards
    return [
        f"{headline(told, stories)} (torch {torch.__version__})",
        *saved_lines(stories),
        *(f"note: {remark}" for remark in told.remarks),
        *layer_lines(stories, told.outside()),
        *section("graph breaks", break_lines(breaks), len(breaks)),
        *section("capture hazards", hazard_lines(hazards), len(hazards)),
        *exchange_section(told.exchanges),
    ]


def headline(told: Told, stories: Sequence[Story]) -> str:
    """How many graphs and layers there are, and what became of these."""
    graphs = graphs_told(told)
    if not told.num_graphs:
        return graphs
    total = sum(story.size.calls for story in stories)
    if not total:
        return f"{graphs}, 0 MoE layers"
    return f"{graphs}, {count(total, 'MoE layer')}, {outcome(stories)}{_inside(stories)}"


def graphs_told(told: Told) -> str:
    """How many graphs there are, and of which kind."""
    kind = f"{'training' if told.is_training else 'inference'} graph"
    return count(told.num_graphs, kind) if told.num_graphs else "no graph"


def outcome(stories: Sequence[Story]) -> str:
    """Whether all are fused, or how many are, wholly and in part, and how many run none of our operators."""
    number = numbers(stories)
    if number[Verdict.FUSED] == number.total():
        return "all fused"
    some = number[Verdict.FUSED] or number[Verdict.PART]
    told = [f"{number[Verdict.FUSED]} fused" if some else "none fused"]
    told += [
        f"{number[each]} {each.value}"
        for each in (Verdict.PART, Verdict.STOCK, Verdict.UNSEEN)
        if number[each]
    ]
    return ", ".join(told)


def numbers(stories: Iterable[Story]) -> Counter[Verdict]:
    """How many layers there are of each verdict, one that is called twice counting twice."""
    found: Counter[Verdict] = Counter()
    for story in stories:
        found[story.verdict] += story.size.calls
    return found


def _inside(stories: Sequence[Story]) -> str:
    places: dict[str, list[LayerGraph]] = defaultdict(list)
    for story in stories:
        if story.size.where:
            places[starred(story.size.where)].append(story.size)
    told = (
        f"{sum(layer.calls for layer in inside)}{place_of([layer.where for layer in inside])}"
        for inside in places.values()
    )
    return f"; {', '.join(told)}" if places else ""


def saved_lines(stories: Sequence[Story]) -> list[str]:
    """What one run of all layers is estimated to take, before and after; nothing where nothing changed."""
    before, after = of_run(story.size for story in stories)
    return [f"estimated for a GPU, all MoE layers: {cost_change(before, after)}"] if before != after else []


def cost_change(before: Cost, after: Cost) -> str:
    """As in "7 -> 5 kernels, 1.5 MB -> 1.2 MB, 20 MFLOP"; what stays is told once."""
    kernels = change(str(before.kernels), str(after.kernels))
    moved = change(amount(before.bytes, "B"), amount(after.bytes, "B"))
    return f"{kernels} kernels, {moved}, {amount(after.flops, 'FLOP')}"


def change(before: str, after: str) -> str:
    """One text, or both with an arrow between them."""
    return after if before == after else f"{before} -> {after}"


def amount(number: float, unit: str) -> str:
    """A number with three digits and a prefix: "1.23 MB"."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5 or prefix == "T":
            break
        number /= 1000
    return f"{number:.3g} {prefix}{unit}"


def layer_lines(stories: Sequence[Story], outside: Sequence[Entry]) -> list[str]:
    """Every layer with its size and what happened to it, alike layers together; then what happened to none."""
    lines = []
    for members in alike(stories):
        lines.append(f"{title(members)}: {size(members[0])}")
        lines += [f"  {line}" for line in member_lines(members)]
    by_layer: dict[str, list[Entry]] = defaultdict(list)
    for entry in outside:
        by_layer[entry.layer].append(entry)
    for name, entries in by_layer.items():
        lines += ["operators outside a layer:" if name == "?" else f"{name}:"]
        times = Counter(map(unnumbered, entry_lines(entries)))
        lines += [f"  {line}{f' ({number} times)' if number > 1 else ''}" for line, number in times.items()]
    return lines


def title(members: Sequence[Story]) -> str:
    """The names of alike layers, how many they are and how often each is called."""
    calls = members[0].size.calls
    times = f", called {calls} times" if calls > 1 else ""
    each = " each" if times and len(members) > 1 else ""
    names = name_ranges([member.name for member in members]) or "the model"
    number = f"{len(members)} layers" if len(members) > 1 else ""
    told = " of ".join(filter(None, (number, members[0].kind)))
    return f"{names}{f' ({told})' if told else ''}{times}{each}"


def size(story: Story) -> str:
    """Operator calls and launches."""
    layer = story.size
    if story.verdict is Verdict.UNSEEN:
        return "cut up by graph breaks" if story.breaks else "not in a graph of its own"
    if story.kind:
        return f"{count(layer.before, 'operator call')}, none of them ours"
    launches = f", {layer.launches} Triton launches" if layer.launches else ""
    return f"{layer.before} -> {layer.after} operator calls{launches}"


def member_lines(members: Sequence[Story]) -> list[str]:
    """What alike layers tell, without the numbers that differ."""
    lines = story_lines(members[0])
    return lines if len(members) == 1 else list(map(unnumbered, lines))


def story_lines(story: Story) -> list[str]:
    """One line for each thing there is to tell of a layer."""
    before, after = story.size.cost_before, story.size.cost_after
    return [
        *([f"estimated for a GPU: {cost_change(before, after)}"] if after.kernels else []),
        *entry_lines(story.entries),
        *(f"graph break: {line}" for line in break_headlines(story.breaks)),
        *(f"capture hazard: {each.node} ({each.target}): {each.reason}" for each in story.hazards),
    ]


def entry_lines(entries: Iterable[Entry]) -> list[str]:
    """What was done, a line for each action, and what was not, a line for each reason."""
    done: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    lines: dict[str, None] = {}
    for entry in entries:
        if entry.reason:
            lines[f"{action(entry)}: {entry.nodes[0]}: {entry.reason}"] = None
            continue
        done[entry.action][entry.kind] += entry.nodes
        lines[entry.action] = None  # its place; all of an action is told there
    return [_done(line, done[line]) if line in done else line for line in lines]


def action(entry: Entry) -> str:
    """What is called what was done."""
    return _ACTIONS.get(entry.action, entry.action)


def _done(name: str, kinds: dict[str, list[str]]) -> str:
    if name == "lowered":
        return f"written out: {', '.join(f'{counted(nodes)} as {kind}' for kind, nodes in kinds.items())}"
    return f"{_ACTIONS.get(name, name)}: {', '.join(kinds)}"


def unfused_lines(modules: Sequence[Unfused]) -> list[str]:
    """Modules by class, with name ranges."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        by_kind[module.kind].append(module.name)
    return [f"{name_ranges(names) or 'the model'} ({kind})" for kind, names in by_kind.items()]


def break_headlines(breaks: Iterable[Break]) -> list[str]:
    """Reason and place of each graph break."""
    headlines = ((each.reason.strip().partition("\n")[0], each.location) for each in breaks)
    return [f"{reason} ({location})" if location else reason for reason, location in headlines]


def break_lines(breaks: Sequence[Break]) -> list[str]:
    """Each graph break, the user's line under it and the layers it is in."""
    lines = []
    for each, headline in zip(breaks, break_headlines(breaks), strict=True):
        layers = f"    in {name_ranges(each.layers)}" if each.layers else ""
        lines += [headline, *([f"    {each.source}"] if each.source else []), *([layers] if layers else [])]
    return lines


def exchange_section(exchanges: Sequence[Exchange]) -> list[str]:
    """Nothing for a model on one device."""
    return section("exchanges", exchange_lines(exchanges), len(exchanges)) if exchanges else []


def exchange_lines(exchanges: Iterable[Exchange]) -> list[str]:
    """What runs during each exchange or why nothing does; those of alike layers told once."""
    lines = Counter(_exchange_line(each) for each in exchanges)
    return [f"{line}{f' ({number} times)' if number > 1 else ''}" for line, number in lines.items()]


def _exchange_line(each: Exchange) -> str:
    calls = (
        f"{name}{f' ({number} times)' if number > 1 else ''}" for name, number in Counter(each.during).items()
    )
    meanwhile = f"meanwhile {', '.join(calls)}" if each.during else f"nothing meanwhile: {each.reason}"
    return starred(f"{each.kind}{f' of {each.module}' if each.module else ''}: ") + meanwhile


def hazard_lines(hazards: Iterable[Hazard]) -> list[str]:
    """Hazards, the same one at several nodes told once."""
    alike_ones: dict[tuple[str, str], list[Hazard]] = defaultdict(list)
    for each in hazards:
        alike_ones[each.target, each.reason].append(each)
    return [_hazard_line(ones) for ones in alike_ones.values()]


def _hazard_line(ones: Sequence[Hazard]) -> str:
    first, modules = ones[0], dict.fromkeys(each.module for each in ones if each.module)
    more = f", and {len(ones) - 1} more like it" if ones[1:] else ""
    where = f", in {name_ranges(modules)}" if modules else ""
    return f"{first.node} ({first.target}): {first.reason}{more}{where}"


def section(title: str, lines: Sequence[str], number: int) -> list[str]:
    """A title with the number of things told, and the lines under it."""
    return [f"{title}: {number or 'none'}", *(f"  {line}" for line in lines)]
