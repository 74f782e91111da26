"""A report as one self-contained page: the verdict, then each kind of layer once, before and after side by side.

Plain HTML, CSS and SVG; nothing is loaded from elsewhere and no script runs.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from html import escape

import torch

from inductor_passes import text
from inductor_passes.costs import of_run
from inductor_passes.drawing import KINDS, draw
from inductor_passes.html_style import STYLE
from inductor_passes.naming import path_of
from inductor_passes.ranges import count, name_ranges
from inductor_passes.records import Break, Entry, NodeView
from inductor_passes.stories import Story, Told, Verdict, alike, shape

_CELLS = {
    Verdict.FUSED: "fused-cell",
    Verdict.PART: "part-cell",
    Verdict.NONE: "none-cell",
    Verdict.STOCK: "stock-cell",
    Verdict.UNSEEN: "stock-cell",
}


def page(told: Told, whole_text: str) -> str:
    """The whole page; `whole_text` is the report as it prints."""
    stories = told.stories()
    groups = alike(stories)
    subject = f"{told.subject}: " if told.subject else ""
    parts = [
        f"<h1>{escape(subject)}what the MoE passes did</h1>",
        _verdict(told, stories),
        _tiles(told, stories),
        _remarks(told.remarks),
        _overview(groups),
        *(_layer(index, members) for index, members in enumerate(groups)),
        _breaks(told.breaks),
        _lines("Capture hazards", text.hazard_lines(told.hazards), len(told.hazards)),
        _lines("Exchanges", text.exchange_lines(told.exchanges), len(told.exchanges))
        if told.exchanges
        else "",
        f"<details><summary>The report as text</summary><pre>{escape(whole_text)}</pre></details>",
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(subject)}MoE passes</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n"
    )


def _verdict(told: Told, stories: Sequence[Story]) -> str:
    look, sentence = _judged(stories)
    hurdles = [
        count(number, thing)
        for number, thing in (
            (len(told.breaks), "graph break"),
            (len(told.hazards), "capture hazard"),
        )
        if number
    ]
    in_the_way = f"{' and '.join(hurdles)} in the way of one CUDA graph. " if hurdles else ""
    look = "warn" if look == "good" and hurdles else look
    graphs = text.graphs_told(told)
    return (
        f"<div class='verdict {look}'><strong>{sentence}</strong>{in_the_way}{graphs}, "
        f"torch {torch.__version__}.</div>"
    )


def _judged(stories: Sequence[Story]) -> tuple[str, str]:
    number = text.numbers(stories)
    total, fused = number.total(), number[Verdict.FUSED]
    if not total:
        return "none", "No MoE layer was found."
    if fused == total:
        return "good", "The MoE layer is fused." if total == 1 else f"All {total} MoE layers are fused."
    if not fused and not number[Verdict.PART]:
        return "bad", f"None of the {count(total, 'MoE layer')} is fused."
    part = f", {number[Verdict.PART]} in part" if number[Verdict.PART] else ""
    return "warn", f"{fused} of {count(total, 'MoE layer')} fused{part}."


def _tiles(told: Told, stories: Sequence[Story]) -> str:
    number = text.numbers(stories)
    before, after = of_run(story.size for story in stories)
    refused = sum(story.size.calls for story in stories if any(e.action == "refused" for e in story.entries))
    tiles = [
        _tile(f"{number[Verdict.FUSED]} / {number.total()}", "layers fused"),
        _tile(str(refused), "layers with refusals", refused),
        _tile(str(len(told.breaks)), "graph breaks", len(told.breaks)),
        _tile(str(len(told.hazards)), "capture hazards", len(told.hazards)),
    ]
    if before.kernels:
        launches, traffic = before.kernels - after.kernels, max(before.bytes - after.bytes, 0)
        whole = text.amount(before.bytes, "B")
        tiles += [
            _tile(str(launches), f"of {before.kernels} launches saved", part=launches / before.kernels),
            _tile(
                text.amount(traffic, "B"), f"of {whole} traffic saved", part=traffic / max(before.bytes, 1)
            ),
            _tile(text.amount(after.flops, "FLOP"), "in matrix products"),
        ]
    return f"<div class='tiles'>{''.join(tiles)}</div>"


def _tile(value: str, label: str, alert: int = 0, part: float = 0) -> str:
    percent = f" <small>{100 * part:.0f} %</small>" if part else ""
    look = "tile alert" if alert else "tile"
    return f"<div class='{look}'><b>{escape(value)}{percent}</b><span>{escape(label)}</span></div>"


def _remarks(remarks: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(remark)}.</li>" for remark in remarks)
    return f"<ul class='remarks'>{items}</ul>" if items else ""


def _overview(groups: Sequence[Sequence[Story]]) -> str:
    """A cell for each layer, in the order of their names, with the letter of what it is like; then the legend."""
    cells = sorted(
        ((_order(story.name), _cell(index, story)) for index, group in enumerate(groups) for story in group),
        key=lambda cell: cell[0],
    )
    if not cells:
        return ""
    legend = "".join(f"<span><i class='{kind}'></i>{escape(what)}</span>" for kind, what in KINDS.items())
    return (
        f"<h2>MoE layers</h2><div class='strip'>{''.join(cell for _, cell in cells)}</div>"
        f"<div class='legend'>{legend}<span><i class='is-refused'></i>a fusion was refused here</span>"
        "<span>⊏ a weight or another input</span></div>"
        "<p class='facts'>Kernels, bytes and FLOPs are estimates for one run on a GPU: the one here, or an H200.</p>"
    )


def _order(name: str) -> list[tuple[str, int]]:
    return [(letters, int(number or 0)) for letters, number in re.findall(r"(\D*)(\d*)", name)]


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index)


def _cell(index: int, story: Story) -> str:
    title = escape(f"{story.name}: {story.verdict.value}", quote=True)
    return f"<a class='{_CELLS[story.verdict]}' href='#layers-{index}' title='{title}'>{_letter(index)}</a>"


def _layer(index: int, members: Sequence[Story]) -> str:
    story, badge = members[0], _CELLS[members[0].verdict]
    return (
        f"<section class='layer' id='layers-{index}'><header>"
        f"<span class='badge {badge}'>{_letter(index)}: {story.verdict.value}</span>"
        f"<h3>{escape(text.title(members))}</h3></header>"
        f"<p class='facts'>{escape(_facts(members))}</p>{_pictures(story)}{_events(members)}</section>"
    )


def _facts(members: Sequence[Story]) -> str:
    size = members[0].size
    if not size.cost_after.kernels:
        return text.size(members[0])
    cost = text.cost_change(size.cost_before, size.cost_after)
    each = ", each" if len(members) > 1 else ""
    return f"{text.size(members[0])}; {cost}{each}".replace("->", "→")


def _pictures(story: Story) -> str:
    """What was traced and what became of it; one picture where that is the same, and what was written out folded."""
    if not story.before:
        return ""
    notes = _notes(story)
    if shape(story.before) == shape(story.after):
        figures = _figure("as traced, and left", story.after, story, notes)
    else:
        left = {name for node in story.after for name in (node.name, *node.aliases)}
        gone = {name: entries for name, entries in notes.items() if name not in left}
        figures = _figure("before", story.before, story, gone) + _figure("after", story.after, story, notes)
    return f"<div class='pair'>{figures}</div>{_written(story)}"


def _notes(story: Story) -> dict[str, list[Entry]]:
    """What was not done, by the node it was about."""
    notes: dict[str, list[Entry]] = defaultdict(list)
    for entry in story.entries:
        if entry.reason:
            notes[entry.nodes[0]].append(entry)
    return notes


def _written(story: Story) -> str:
    if shape(story.written) == shape(story.after):
        return ""
    inside = sum(bool(node.layer) for node in story.written)
    return (
        f"<details><summary>written out for the compiler: {count(inside, 'call')}</summary>"
        f"{draw(story.written, path_of(story.name), {})}</details>"
    )


def _figure(caption: str, nodes: Sequence[NodeView], story: Story, notes: dict[str, list[Entry]]) -> str:
    inside = sum(bool(node.layer) for node in nodes)
    caption = f"<figcaption>{caption}: {count(inside, 'call')}</figcaption>"
    return f"<figure>{caption}{draw(nodes, path_of(story.name), notes)}</figure>"


def _events(members: Sequence[Story]) -> str:
    looks = {"refused": "no", "graph break": "no", "capture hazard": "no", "kept as a call": "kept"}
    items = [
        f"<li class='{looks.get(line.partition(':')[0], 'done')}'>{escape(line)}</li>"
        for line in text.member_lines(members)
        if not line.startswith("estimated")
    ]
    return f"<ul class='events'>{''.join(items)}</ul>" if items else ""


def _breaks(breaks: Sequence[Break]) -> str:
    items = "".join(
        f"<li><b>{escape(headline)}</b>{_user_line(each)}"
        f"{f'<div class=where>in {escape(name_ranges(each.layers))}</div>' if each.layers else ''}"
        f"<details><summary>what torch says</summary><pre>{escape(each.reason.strip())}</pre></details></li>"
        for each, headline in zip(breaks, text.break_headlines(breaks), strict=True)
    )
    return f"<h2>Graph breaks: {len(breaks) or 'none'}</h2><ul class='list'>{items}</ul>"


def _user_line(each: Break) -> str:
    return f"<pre>{escape(each.source)}</pre>" if each.source else ""


def _lines(title: str, lines: Sequence[str], number: int) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{title}: {number or 'none'}</h2><ul class='list'>{items}</ul>"
