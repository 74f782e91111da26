"""Figures of other implementations, recorded earlier (see data/README.md), and the comparison with them."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import table
from benchmarks.workloads import TOKEN_COUNTS, WORKLOADS, Cell, cells_of

RECORDED = Path(__file__).parent / "data" / "peers_h200.csv"
COLUMNS = (
    *("workload", "E", "k", "H", "I", "T", "routing", "impl", "kind", "us", "runs", "run_spread", "mode"),
    *("roof_us", "bound", "pct_roof", "practical_floor_us", "pct_practical", "tflops", "tbps"),
    *("distinct_experts", "max_load", "flops", "min_bytes"),
)
BASELINE = "gmm_compile"

Row = dict[str, str]
Key = tuple[str, int, str]


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """The rows of CSV files with the columns above."""
    rows: list[Row] = []
    for path in paths:
        with path.open(newline="") as lines:
            rows += csv.DictReader(lines)
    return rows


def times_of(rows: Iterable[Row], impl: str) -> dict[Key, float]:
    """Microseconds of one implementation by (workload, T, routing); the best where there are several."""
    times: dict[Key, float] = {}
    for row in rows:
        if row["impl"] == impl:
            key = (row["workload"], int(row["T"]), row["routing"])
            times[key] = min(float(row["us"]), times.get(key, float("inf")))
    return times


def practical_floor(cell: Cell) -> float | None:
    """Microseconds that one perfect weight pass or two dense products take on this cell's card, where recorded."""
    key = (cell.workload.name, cell.tokens, cell.routing)
    for row in read_rows([RECORDED]):
        if (row["workload"], int(row["T"]), row["routing"]) == key and row["practical_floor_us"]:
            return float(row["practical_floor_us"])
    return None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours against torch.compile over grouped_mm in one cell: as recorded on such a card, and beside us in one run."""

    key: Key
    ours: float
    recorded: float | None
    beside: float | None

    @property
    def ratio(self) -> float:
        """How many times faster ours is than the faster of the two."""
        return min(us for us in (self.recorded, self.beside) if us is not None) / self.ours


def compare(rows: list[Row], impl: str = "fused_moe") -> list[Comparison]:
    """One comparison per measured cell that has a baseline to compare with."""
    recorded, beside = times_of(read_rows([RECORDED]), BASELINE), times_of(rows, BASELINE)
    return [
        Comparison(key, ours, recorded.get(key), beside.get(key))
        for key, ours in times_of(rows, impl).items()
        if key in recorded or key in beside
    ]


def all_keys() -> list[Key]:
    """The 45 cells: five workloads at eight token counts, and zipf routing at 4096."""
    cells = [cell for workload in WORKLOADS.values() for cell in cells_of(workload, TOKEN_COUNTS)]
    return [(cell.workload.name, cell.tokens, cell.routing) for cell in cells]


def verdict(rows: list[Row]) -> tuple[str, bool]:
    """The comparison as a table with a closing sentence, and whether ours wins every one of the 45 cells."""
    comparisons = {comparison.key: comparison for comparison in compare(rows)}
    best_peer = best_peers()
    lines = []
    for key in dict.fromkeys([*all_keys(), *comparisons]):
        if key not in comparisons:
            continue
        c = comparisons[key]
        peer = best_peer.get(key)
        figures = (c.ours, c.beside, c.recorded, c.ratio, peer and peer / c.ours)
        formats = (".1f", ".1f", ".1f", ".2f", ".2f")
        cells = ("-" if figure is None else format(figure, spec) for figure, spec in zip(figures, formats))
        lines.append((f"{key[0]} T={key[1]} {key[2]}", *cells))
    won = sum(comparison.ratio > 1 for comparison in comparisons.values())
    header = ("cell", "fused_moe us", f"{BASELINE} us", "recorded us", "times faster", "best peer / ours")
    closing = (
        f"faster than {BASELINE} in {won} of {len(comparisons)} measured cells ({len(all_keys())} in all)"
    )
    return f"{table(header, lines)}\n\n{closing}", won == len(all_keys())


def best_peers() -> dict[Key, float]:
    """Microseconds of the fastest recorded implementation of others, by cell."""
    best: dict[Key, float] = {}
    for row in read_rows([RECORDED]):
        if row["kind"] == "peer":
            key = (row["workload"], int(row["T"]), row["routing"])
            best[key] = min(float(row["us"]), best.get(key, float("inf")))
    return best
