"""fused_moe at real sizes beside the best recorded implementation and the floor of the GPU, and a plot of all three.

The floor of a cell is the longer of two times: that of reading both projections of the experts which its routing hits,
as a plain read does, and that of the products of its routed rows: at 4.59 TB/s and 700 TFLOP/s on an H200; of another
GPU both are measured first. Other implementations were recorded on an H200; elsewhere only those of `--peers` count.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import moe_bench, peers, speeds
from benchmarks.arguments import number, to_read, to_write
from benchmarks.report import machine, table
from benchmarks.speeds import Speed

FARTHEST, BEHIND = 1.30, 0.99  # ours over the floor; the best peer over ours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks kernels`."""
    moe_bench.add_cell_arguments(parser)
    parser.add_argument(
        "--peers", action="store_true", help="torch.compile over grouped_mm too, in the same turns"
    )
    parser.add_argument("--out", type=to_write, default=Path("build/kernels.csv"), help="CSV to append to")
    parser.add_argument("--png", type=to_write, default=Path("build/kernels.png"), help="where the plot goes")
    parser.add_argument(
        "--draw", type=to_read, nargs="+", help="measure nothing, take the figures of these CSVs"
    )
    parser.add_argument(
        "--speed",
        type=number,
        nargs=2,
        metavar=("TB", "TFLOP"),
        help="a second, of the GPU, instead of measuring",
    )


def main(arguments: argparse.Namespace) -> int:
    """Measures, or reads CSVs; the status is 1 when a result was wrong."""
    if not arguments.draw and not torch.cuda.is_available():
        print("python -m benchmarks kernels needs a CUDA GPU")
        return 2
    wrong, speed = 0, _speed(arguments)
    if not arguments.draw:
        print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
        impls = ["fused_moe", *([peers.BASELINE] if arguments.peers else [])]
        cells = moe_bench.chosen_cells(arguments)
        wrong = moe_bench.run(cells, impls, arguments.out, math.inf, arguments.cell_ms)
    standings = compare(peers.read_rows(arguments.draw or [arguments.out]), speed)
    print(f"\nfloor at {speed}\n\n{report(standings)}")
    draw(standings, arguments.png)
    return int(wrong > 0)


def _speed(arguments: argparse.Namespace) -> Speed:
    if arguments.speed:
        return Speed(arguments.speed[0] * 1e12, arguments.speed[1] * 1e12)
    return speeds.H200 if arguments.draw else speeds.here()


@dataclass(frozen=True, slots=True)
class Standing:
    """Microseconds of a cell: ours, the best that was recorded or measured beside us, and the floor."""

    key: peers.Key
    ours: float
    peer: float | None
    floor: float


def compare(rows: Sequence[peers.Row], speed: Speed = speeds.H200) -> list[Standing]:
    """The cells of which `rows` have a time of ours, the best of several, in the order of the workloads."""
    ours, beside = peers.times_of(rows, "fused_moe"), peers.times_of(rows, peers.BASELINE)
    recorded = peers.best_peers() if speed == speeds.H200 else {}
    floors = {key_of(row): floor_us(row, speed) for row in rows}
    standings = []
    for key in dict.fromkeys([*peers.all_keys(), *floors]):
        if key in ours:
            others = [us for us in (recorded.get(key), beside.get(key)) if us is not None]
            standings.append(Standing(key, ours[key], min(others, default=None), floors[key]))
    return standings


def key_of(row: peers.Row) -> peers.Key:
    """Workload, tokens and routing of a row."""
    return row["workload"], int(row["T"]), row["routing"]


def floor_us(row: peers.Row, speed: Speed) -> float:
    """Microseconds that a GPU needs for the cell of a row at least, see above."""
    tokens, top_k, hidden_size, intermediate_size = (int(row[name]) for name in ("T", "k", "H", "I"))
    of_expert = 3 * hidden_size * intermediate_size  # weights, and products of a row
    read, multiplied = float(row["distinct_experts"]) * of_expert, tokens * top_k * of_expert
    return speed.floor_us(2 * read, 2 * multiplied)


def report(standings: Sequence[Standing]) -> str:
    """The cells as a table, and what they say together."""
    header = ("cell", "ours us", "best peer us", "floor us", "ours / floor", "best peer / ours")
    lines = [
        (
            f"{each.key[0]} T={each.key[1]} {each.key[2]}",
            *(f"{each.ours:.1f}", "-" if each.peer is None else f"{each.peer:.1f}", f"{each.floor:.1f}"),
            *(f"{each.ours / each.floor:.2f}", "-" if each.peer is None else f"{each.peer / each.ours:.2f}"),
        )
        for each in standings
    ]
    over = [each.ours / each.floor for each in standings]
    ahead = [each.peer / each.ours for each in standings if each.peer is not None]
    closing = (
        f"geometric means: {_mean(over):.3f} x the floor, best peer {_mean(ahead):.3f} x ours; of {len(over)} cells"
        f" {sum(ratio > FARTHEST for ratio in over)} above {FARTHEST:.2f} x the floor,"
        f" {sum(ratio < BEHIND for ratio in ahead)} more than 1 % behind a peer"
    )
    return f"{table(header, lines)}\n\n{closing}"


def _mean(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def draw(standings: Sequence[Standing], path: Path) -> bool:
    """Time against tokens, a panel to a workload; False, and nothing drawn, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install moe-inductor[bench], then python -m benchmarks kernels --draw FILE.csv")
        return False
    names = list(dict.fromkeys(each.key[0] for each in standings))
    figure = Figure(figsize=(3.4 * max(len(names), 1), 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, max(len(names), 1), squeeze=False)[0], names):
        _panel(axes, [each for each in standings if each.key[0] == name and each.key[2] == "uniform"])
        axes.set(title=name, xlabel="tokens", xscale="log", yscale="log")
        axes.grid(visible=True, alpha=0.25)
    figure.axes[0].set_ylabel("microseconds of a layer")
    figure.axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def _panel(axes: Any, standings: Sequence[Standing]) -> None:
    tokens = [each.key[1] for each in standings]
    axes.plot(tokens, [each.floor for each in standings], ":", color="#444444", label="floor")
    known = [(each.key[1], each.peer) for each in standings if each.peer is not None]
    axes.plot(*(zip(*known) if known else ([], [])), "s", color="#8a8a8a", label="best peer", markersize=4)
    axes.plot(tokens, [each.ours for each in standings], "-o", color="#0b6e4f", label="ours", markersize=3)
