"""One MoE layer at real sizes on a GPU: fused_moe beside torch.compile over grouped_mm, gated on correctness.

A run can be cut into slices (`--workloads`, `--ts`, `--budget`); `--compare A.csv B.csv` puts slices together.
Every implementation's result is compared with a float32 reference first; no time is taken of a wrong one.
"""

import argparse
import csv
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.arguments import listed, number, one_of, to_read, to_write, whole
from benchmarks.implementations import IMPLEMENTATIONS, Implementation
from benchmarks.report import machine
from benchmarks.timing import capture, time_in_turns
from benchmarks.workloads import (
    TOKEN_COUNTS,
    WORKLOADS,
    Cell,
    Inputs,
    Weights,
    Workload,
    cells_of,
    load_of,
    make_inputs,
    make_weights,
    reference,
    roofline,
)

MAX_RELATIVE_ERROR = 8e-3  # bfloat16; careful implementations reach 2e-3 to 4e-3


class WrongResult(Exception):
    """An implementation's output is too far from the reference to be worth timing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One implementation in one cell."""

    cell: Cell
    impl: str
    us: float
    row: dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks moe`."""
    add_cell_arguments(parser)
    parser.add_argument(
        "--impls",
        type=listed(one_of(IMPLEMENTATIONS)),
        default="fused_moe,gmm_compile",
        help=f"from {', '.join(IMPLEMENTATIONS)}",
    )
    parser.add_argument(
        "--budget", type=number, default=float("inf"), help="seconds after which no cell starts"
    )
    parser.add_argument("--out", type=to_write, default=Path("build/moe.csv"), help="CSV to append to")
    parser.add_argument("--compare", type=to_read, nargs="+", help="measure nothing, put these CSVs together")


def add_cell_arguments(parser: argparse.ArgumentParser) -> None:
    """Which cells to measure, and how long."""
    parser.add_argument(
        "--workloads",
        type=listed(one_of(WORKLOADS)),
        help="comma list, default all five, or none beside --sizes",
    )
    add_sizes_argument(parser)
    parser.add_argument(
        "--ts",
        type=listed(whole),
        default=",".join(map(str, TOKEN_COUNTS)),
        help="comma list of token counts",
    )
    parser.add_argument(
        "--cell-ms", type=number, default=40.0, help="milliseconds of replays per measurement"
    )


def add_sizes_argument(parser: argparse.ArgumentParser) -> None:
    """Layers besides the five."""
    more = "layers besides: 128,8,2048,768"
    parser.add_argument("--sizes", type=_sizes, nargs="*", default=[], metavar="E,K,H,I", help=more)


def _sizes(text: str) -> Workload:
    numbers = text.split(",")
    if len(numbers) != 4 or not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: expected E,K,H,I such as 128,8,2048,768")
    return Workload(text, *map(int, numbers))


def chosen_layers(names: Sequence[str] | None, sizes: Sequence[Workload]) -> list[Workload]:
    """Workloads by name, all where nothing is named, and others by their sizes."""
    asked = [] if names is None and sizes else (names or WORKLOADS)
    return [*(WORKLOADS[name] for name in asked), *sizes]


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    """The cells that these say."""
    counts = tuple(int(count) for count in arguments.ts.split(","))
    names = arguments.workloads and arguments.workloads.split(",")
    return [cell for layer in chosen_layers(names, arguments.sizes) for cell in cells_of(layer, counts)]


def main(arguments: argparse.Namespace) -> int:
    """Measures or compares; the status is 1 when a result was wrong, or a comparison of CSVs misses a win."""
    if arguments.compare:
        text, won_all = peers.verdict(peers.read_rows(arguments.compare))
        print(text)
        return int(not won_all)
    if not torch.cuda.is_available():
        print("python -m benchmarks moe needs a CUDA GPU; on a CPU there is `python -m benchmarks cpu`")
        return 2
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    wrong = run(
        chosen_cells(arguments),
        arguments.impls.split(","),
        arguments.out,
        arguments.budget,
        arguments.cell_ms,
    )
    print("\n" + peers.verdict(peers.read_rows([arguments.out]))[0])
    return int(wrong > 0)


@torch.inference_mode()
def run(cells: Sequence[Cell], impls: Sequence[str], out: Path, budget_s: float, cell_ms: float) -> int:
    """Measures `impls` in every cell, appending to `out`. Returns how many results were wrong or failed."""
    torch.backends.cuda.matmul.allow_tf32 = False
    deadline, failed = time.monotonic() + budget_s, 0
    weights: list[Weights] = []
    for previous, cell in zip([None, *cells], cells):
        if previous is None or previous.workload is not cell.workload:
            weights.clear()
            _release()
            weights += [
                make_weights(cell.workload, 17 * i + 1, "cuda") for i in range(cell.workload.weight_copies)
            ]
        if time.monotonic() > deadline:
            print(f"out of time before {cell.workload.name} T={cell.tokens} {cell.routing}", flush=True)
            break
        failed += _measure_cell(cell, weights, impls, out, cell_ms)
        torch.compiler.reset()  # the next cell's static shapes would count as recompiles of this one's
        _release()
    return failed


def _measure_cell(cell: Cell, weights: list[Weights], impls: Sequence[str], out: Path, cell_ms: float) -> int:
    inputs, replays = make_inputs(cell, "cuda"), {}
    for impl in impls:
        try:
            replays[impl] = prepare(cell, inputs, weights, impl)
        except Exception as error:  # one implementation's failure is a result, the others still run
            where = f"{cell.workload.name} T={cell.tokens} {cell.routing}"
            print(f"FAILED {where} {impl}: {error!r}"[:400], flush=True)
    times = time_in_turns(list(replays.values()), cell_ms) if replays else []
    for impl, milliseconds in zip(replays, times):
        us = milliseconds * 1e3 / len(inputs)
        measured = Measured(cell, impl, us, _row(cell, inputs, impl, us))
        append(out, measured)
        print(
            f"{cell.workload.name} T={cell.tokens:<6}{cell.routing:<8} {impl:<12} {us:10.1f} us "
            f"{measured.row['pct_roof']:>6}% of roof",
            flush=True,
        )
    return len(impls) - len(replays)


def prepare(cell: Cell, inputs: list[Inputs], weights: list[Weights], impl: str) -> Callable[[], object]:
    """Checks the implementation, then captures it over all inputs. Raises WrongResult when the check fails."""
    implementation, top_k = IMPLEMENTATIONS[impl], cell.workload.top_k
    check(implementation, inputs[-1], weights[(len(inputs) - 1) % len(weights)], top_k)
    return capture(
        [partial(implementation, one, copy, top_k) for one, copy in zip(inputs, itertools.cycle(weights))]
    )


def check(implementation: Implementation, inputs: Inputs, weights: Weights, top_k: int) -> float:
    """The relative Frobenius error against float32. Raises WrongResult above 8e-3 or for a non-finite result."""
    expected = reference(inputs, weights, top_k)
    error = float((implementation(inputs, weights, top_k).float() - expected).norm() / expected.norm())
    if not error <= MAX_RELATIVE_ERROR:
        raise WrongResult(f"relative error {error:.2e}: expected at most {MAX_RELATIVE_ERROR:.0e}")
    return error


def append(out: Path, measured: Measured) -> None:
    """Adds one row to the CSV, with the header first in a new file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    is_new = not out.exists()
    with out.open("a", newline="") as lines:
        writer = csv.DictWriter(lines, peers.COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(measured.row)


def _row(cell: Cell, inputs: list[Inputs], impl: str, us: float) -> dict[str, object]:
    load = load_of(cell, inputs)
    roof, floor = roofline(cell, load), peers.practical_floor(cell)
    return {
        "workload": cell.workload.name,
        "E": cell.workload.num_experts,
        "k": cell.workload.top_k,
        "H": cell.workload.hidden_size,
        "I": cell.workload.intermediate_size,
        "T": cell.tokens,
        "routing": cell.routing,
        "impl": impl,
        "kind": "peer" if impl.startswith("gmm") else "ours",
        "us": f"{us:.2f}",
        "runs": 1,
        "run_spread": "1.000",
        "mode": "graph",
        "roof_us": f"{roof.us:.2f}",
        "bound": roof.bound,
        "pct_roof": f"{100 * roof.us / us:.1f}",
        "practical_floor_us": "" if floor is None else f"{floor:.2f}",
        "pct_practical": "" if floor is None else f"{100 * floor / us:.1f}",
        "tflops": f"{roof.flops / us / 1e6:.1f}",
        "tbps": f"{roof.min_bytes / us / 1e6:.3f}",
        "distinct_experts": f"{load.distinct_experts:.1f}",
        "max_load": load.max_load,
        "flops": f"{roof.flops:.4g}",
        "min_bytes": f"{roof.min_bytes:.4g}",
    }


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()
