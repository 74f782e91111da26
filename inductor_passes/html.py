"""Draws a report: one self-contained page, plain SVG, nothing loaded from elsewhere."""

from collections import defaultdict
from collections.abc import Sequence
from html import escape

from inductor_passes.records import GraphView, NodeView

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 40, 18, 34, 12
_HUES = (210, 145, 35, 275, 0, 180, 320, 95)

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem; color: #1c2530; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
pre { background: #f4f6f8; padding: 1rem; overflow-x: auto }
.pair { display: flex; gap: 2rem; align-items: flex-start; overflow-x: auto }
figure { margin: 0 } figcaption { font-weight: 600; margin-bottom: .5rem }
text { font: 11px ui-monospace, monospace; text-anchor: middle } .detail { font-size: 9px; fill: #56616d }
path { fill: none; stroke: #8a96a3 } .outside { fill: #f4f6f8; stroke: #c3cad1; stroke-dasharray: 3 2 }
"""


def page(report: str, views: Sequence[GraphView]) -> str:
    """The whole page: a report in words and its graphs drawn."""
    graphs = "\n".join(_pair(index, view) for index, view in enumerate(views) if view.before)
    return (
        f"<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>MoE passes</title><style>{_STYLE}</style>\n"
        f"<h1>What the passes did</h1>\n<pre>{escape(report)}</pre>\n"
        f"{graphs or '<p>No MoE layer found.</p>'}\n</html>\n"
    )


def _pair(index: int, view: GraphView) -> str:
    figures = (("before", view.before), ("after", view.after))
    drawn = "".join(
        f"<figure><figcaption>{name}: {_count(nodes)} calls</figcaption>{draw(nodes)}</figure>"
        for name, nodes in figures
    )
    where = f", {escape(view.where)}" if view.where else ""
    return f"<h2>Graph {index}{where}</h2>\n<div class='pair'>{drawn}</div>"


def _count(nodes: Sequence[NodeView]) -> int:
    return sum(bool(node.layer) for node in nodes)


def draw(nodes: Sequence[NodeView]) -> str:
    """The graph top to bottom: each node one row below the lowest of its inputs, colours by layer."""
    places = _places(nodes)
    hues = {
        name: _HUES[i % len(_HUES)]
        for i, name in enumerate(dict.fromkeys(node.layer for node in nodes if node.layer))
    }
    edges = [_edge(places[source], places[node.name]) for node in nodes for source in node.inputs]
    boxes = [_box(node, places[node.name], hues) for node in nodes]
    width = max((x for x, _ in places.values()), default=0) + _WIDTH + _MARGIN
    height = max((y for _, y in places.values()), default=0) + _HEIGHT + _MARGIN
    return f"<svg width='{width}' height='{height}' role='img'>{''.join(edges)}{''.join(boxes)}</svg>"


def _places(nodes: Sequence[NodeView]) -> dict[str, tuple[int, int]]:
    rows: dict[str, int] = {}
    for node in nodes:
        rows[node.name] = max((rows[source] + 1 for source in node.inputs), default=0)
    _lower_inputs(nodes, rows)
    filled: dict[int, int] = defaultdict(int)
    places = {}
    for node in nodes:
        row = rows[node.name]
        places[node.name] = (_MARGIN + filled[row] * (_WIDTH + _GAP_X), _MARGIN + row * (_HEIGHT + _GAP_Y))
        filled[row] += 1
    return places


def _lower_inputs(nodes: Sequence[NodeView], rows: dict[str, int]) -> None:
    """Puts what only feeds the graph (weights, logits) just above its first reader."""
    for node in nodes:
        if not node.inputs:
            readers = [rows[other.name] for other in nodes if node.name in other.inputs]
            rows[node.name] = max(min(readers, default=1) - 1, 0)


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    x0, y0, x1, y1 = start[0] + _WIDTH // 2, start[1] + _HEIGHT, end[0] + _WIDTH // 2, end[1]
    middle = (y0 + y1) // 2
    return f"<path d='M{x0} {y0} C{x0} {middle} {x1} {middle} {x1} {y1}'/>"


def _box(node: NodeView, place: tuple[int, int], hues: dict[str, int]) -> str:
    x, y = place
    hue = hues.get(node.layer)
    look = "class='outside'" if hue is None else f"fill='hsl({hue} 70% 93%)' stroke='hsl({hue} 55% 45%)'"
    title = escape(f"{node.name}\n{node.detail}\n{node.layer}")
    return (
        f"<g><title>{title}</title><rect x='{x}' y='{y}' width='{_WIDTH}' height='{_HEIGHT}' rx='5' {look}/>"
        f"<text x='{x + _WIDTH // 2}' y='{y + 17}'>{escape(_fit(node.label, 29))}</text>"
        f"<text class='detail' x='{x + _WIDTH // 2}' y='{y + 31}'>{escape(_fit(node.detail, 36))}</text></g>"
    )


def _fit(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
