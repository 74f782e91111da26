"""Throughput against latency of a serving benchmark, as a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PANELS = (("between", "between two tokens, ms"), ("first", "to the first token, ms"))
_COLOURS = {"stock": "#8a8a8a", "ours": "#0b6e4f"}


def draw(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> bool:
    """Draws rows of `python -m benchmarks serving`; False, and nothing drawn, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install moe-inductor[bench], then python -m benchmarks serving --draw FILE.json")
        return False
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, (what, label) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        for way in dict.fromkeys(row["way"] for row in rows):
            mine = [row for row in rows if row["way"] == way]
            _curve(axes, mine, what, way)
        axes.set(xlabel="tokens a second", ylabel=label, yscale="log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis("{x:g}")
        axes.grid(visible=True, which="both", alpha=0.25)
    figure.axes[0].legend()
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def _curve(axes: Any, rows: Sequence[Mapping[str, Any]], what: str, way: str) -> None:
    tokens = [row["tokens/s"] for row in rows]
    for percent, style in (("p50", "-o"), ("p99", "--s")):
        values = [row[f"{what} {percent}"] for row in rows]
        axes.plot(tokens, values, style, color=_COLOURS[way], label=f"{way}, {percent}", markersize=4)
    for row in rows:
        at = row["tokens/s"], row[f"{what} p99"]
        axes.annotate(row["load"], at, fontsize=7, xytext=(3, 4), textcoords="offset points")
