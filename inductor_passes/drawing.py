"""Draws the operators of one MoE layer as SVG: one below the other in the order they run, and who reads whom.

What an operator reads from the one above it is an arrow between the two. Everything else runs in lanes beside them, one
for each tensor. Weights are written in the box that reads them.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from inductor_passes.records import Entry, NodeView

WIDTH = 640
_EDGE, _GAP, _LANE, _PAD = 2, 15, 13, 12
_LINE, _CHARACTER, _SMALL = 16, 7.3, 6.7

# What our operators, and torch's by a part of the name, do. The first that fits counts.
_OURS = {
    **dict.fromkeys(("routing_dispatch", "gather_gemm_act", "gather_gemm_formula", "gemm_combine"), "fused"),
    **dict.fromkeys(("fused_experts", "fused_experts_formula", "fused_moe", "fused_moe_formula"), "fused"),
    "fused_experts_with_shared": "fused",
    **dict.fromkeys(
        ("gather_gemm", "act_gemm_combine", "batch_invariant_experts", "scaled_fused_experts"), "fused"
    ),
    **dict.fromkeys(("topk_routing", "build_dispatch", "map_replicas", "map_and_record"), "routing"),
    "batch_invariant_routing": "routing",
    "batch_invariant_gemm": "product",
    **dict.fromkeys(("grouped_gemm", "batched_gemm", "dense_gemm", "scaled_grouped_gemm"), "product"),
    **dict.fromkeys(("permute", "combine"), "move"),
}
_TORCH = (
    ("routing", ("topk", "sort", "softmax", "histc", "cumsum", "bincount", "one_hot")),
    ("product", ("grouped_mm", "addmm", ".mm.", ".bmm.", "linear", "matmul", "einsum")),
    ("move", ("index", "gather", "scatter", "embedding", "permute", "cat.", "clone", "copy")),
)
KINDS = {
    "routing": "routing",
    "move": "gathers, scatters, sums over experts",
    "product": "matrix products",
    "pointwise": "elementwise and the rest",
    "fused": "a fused operator or kernel of ours",
    "outside": "outside the layer",
}
"""What each colour stands for."""


def kind_of(node: NodeView) -> str:
    """The colour of a node."""
    if not node.layer:
        return "outside"
    namespace, dot, name = node.label.partition(".")
    if not dot:
        return "fused"  # a Triton kernel
    if namespace == "moe":
        return _OURS.get(name, "pointwise")
    dotted = f".{name}."
    return next((kind for kind, parts in _TORCH if any(part in dotted for part in parts)), "pointwise")


@dataclass(slots=True)
class _Row:
    node: NodeView
    weights: list[str]
    notes: list[Entry]
    lines: list[tuple[str, str]] = field(default_factory=list)
    """Class and text of each line under the label."""
    top: int = 0
    arrivals: int = 0

    @property
    def height(self) -> int:
        return 27 + _LINE * len(self.lines)

    @property
    def bottom(self) -> int:
        return self.top + self.height


@dataclass(slots=True)
class _Lane:
    source: int
    readers: list[int]
    column: int = 0


def draw(nodes: Sequence[NodeView], layer: str, notes: Mapping[str, Sequence[Entry]]) -> str:
    """The picture. `layer` is a name that weights are told relative to; `notes` are put under nodes by name."""
    rows = _rows(nodes, layer, notes)
    lanes = _lanes(rows)
    right = WIDTH - _EDGE - (_LANE * (1 + max(lane.column for lane in lanes)) + 6 if lanes else 0)
    _place(rows, right)
    height = (rows[-1].bottom if rows else 0) + _EDGE
    drawn = [
        *(
            _arrow(rows[index], rows[index + 1])
            for index in range(len(rows) - 1)
            if _reads_above(rows, index + 1)
        ),
        *(_draw_lane(rows, lane, right) for lane in lanes),
        *(_box(row, right) for row in rows),
    ]
    return f"<svg viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' role='img'>{''.join(drawn)}</svg>"


def _rows(nodes: Sequence[NodeView], layer: str, notes: Mapping[str, Sequence[Entry]]) -> list[_Row]:
    inputs = {node.name: node for node in nodes if node.is_input}
    return [
        _Row(
            node,
            [_weight(inputs[name], layer) for name in node.inputs if name in inputs],
            [note for name in (node.name, *node.aliases) for note in notes.get(name, ())],
        )
        for node in nodes
        if not node.is_input
    ]


def _weight(node: NodeView, layer: str) -> str:
    return f"{node.label.removeprefix(f'{layer}.')}  {node.detail}"


def _lanes(rows: Sequence[_Row]) -> list[_Lane]:
    """One for each node that a row further down reads, side by side where they overlap."""
    places = {row.node.name: index for index, row in enumerate(rows)}
    readers: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        for source in (places[name] for name in row.node.inputs if name in places):
            if source < index - 1:
                readers.setdefault(source, []).append(index)
    lanes: list[_Lane] = []
    for source, reading in sorted(readers.items(), key=lambda item: item[1][-1] - item[0]):
        taken = {lane.column for lane in lanes if lane.source <= reading[-1] and source <= lane.readers[-1]}
        lanes.append(
            _Lane(source, reading, next(column for column in range(len(lanes) + 1) if column not in taken))
        )
    return lanes


def _reads_above(rows: Sequence[_Row], index: int) -> bool:
    return rows[index - 1].node.name in rows[index].node.inputs


def _place(rows: Sequence[_Row], right: int) -> None:
    top = _EDGE
    for row in rows:
        row.lines = _lines(row, right - _EDGE - 2 * _PAD)
        row.top = top
        top = row.bottom + _GAP


def _lines(row: _Row, width: int) -> list[tuple[str, str]]:
    small = int(width / _SMALL)
    lines = []
    if not _fits_beside(row.node, width):
        lines.append(("detail", _fit(row.node.detail, small)))
    lines += [("chip", _fit(f"⊏ {weight}", small)) for weight in row.weights]
    for note in row.notes:
        kind, sign = ("no", "✕") if note.action == "refused" else ("kept", "•")
        text = f"{sign} {'refused' if kind == 'no' else 'kept as a call'}: {note.reason}"
        lines += [(kind, line) for line in textwrap.wrap(text, small - 2, subsequent_indent="  ")]
    return lines


def _fits_beside(node: NodeView, width: int) -> bool:
    return len(node.label) * _CHARACTER + (len(node.detail) + 2) * _SMALL <= width


def _fit(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _arrow(above: _Row, below: _Row) -> str:
    x, tip = _EDGE + 26, below.top
    return f"<path d='M{x} {above.bottom} V{tip - 5}'/><path class='head' d='M{x - 4} {tip - 7} h8 l-4 7 z'/>"


def _draw_lane(rows: Sequence[_Row], lane: _Lane, right: int) -> str:
    x, start = right + 8 + lane.column * _LANE, rows[lane.source].bottom - 8
    parts, last = [], start
    for reader in lane.readers:
        row = rows[reader]
        y = row.top + min(8 + 7 * row.arrivals, row.height - 8)
        row.arrivals += 1
        last = max(last, y)
        parts.append(
            f"<path d='M{x} {y} H{right + 6}'/><path class='head' d='M{right + 7} {y - 4} v8 l-7 -4 z'/>"
        )
    return f"<path d='M{right} {start} H{x} V{last}'/>{''.join(parts)}"


def _box(row: _Row, right: int) -> str:
    node, width = row.node, right - _EDGE
    refused = " is-refused" if any(note.action == "refused" for note in row.notes) else ""
    texts = [
        _text("label", _EDGE + _PAD, row.top + 18, _fit(node.label, int((width - 2 * _PAD) / _CHARACTER)))
    ]
    if _fits_beside(node, width - 2 * _PAD):
        texts.append(_text("detail", right - _PAD, row.top + 18, node.detail, " text-anchor='end'"))
    texts += [
        _text(kind, _EDGE + _PAD, row.top + 18 + _LINE * (index + 1), line)
        for index, (kind, line) in enumerate(row.lines)
    ]
    title = escape("\n".join(filter(None, (node.name, node.detail, node.layer))))
    place = f"x='{_EDGE}' y='{row.top}' width='{width}' height='{row.height}' rx='6'"
    look = f"class='{kind_of(node)}{refused}'"
    return f"<g><title>{title}</title><rect {place} {look}/>{''.join(texts)}</g>"


def _text(kind: str, x: int, y: int, text: str, more: str = "") -> str:
    return f"<text class='{kind}' x='{x}' y='{y}'{more}>{escape(text)}</text>"
