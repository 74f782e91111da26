"""How long torch.compile takes for a tiny model of many layers: stock, and ours with and without patching it.

Each figure comes from a process of its own with an empty cache, the next from another that finds what this one left.
Ways take turns. What a machine pays once (probing the compiler, its headers) is paid before, by compiling one line.
Beside seconds stand CPU seconds of the process and its compilers, which other load changes less.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import known_device, listed, one_of, to_write, whole
from benchmarks.compile_run import WAYS
from benchmarks.report import machine, table

Row = dict[str, Any]
COLUMNS = (
    "cold_s",
    "cold_cpu_s",
    "before_inductor_s",
    "passes_s",
    "kernels",
    "files",
    "layers_written",
    "warm_s",
    "warm_cpu_s",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks compile-time`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--layers", type=listed(whole), default="16,48", help="comma list of layer counts")
    parser.add_argument(
        "--ways", type=listed(one_of(WAYS)), default=",".join(WAYS), help=f"from {', '.join(WAYS)}"
    )
    parser.add_argument("--tokens", type=whole, default=64, help="length of the one prompt")
    parser.add_argument("--device", type=known_device, metavar="cpu|cuda", default=device)
    parser.add_argument(
        "--rounds", type=whole, default=1, help="how often each way has its turn; the least counts"
    )
    parser.add_argument(
        "--out", type=to_write, default=Path("build/compile-time.json"), help="where the figures go"
    )


def main(arguments: argparse.Namespace) -> int:
    """Prints a table; the status is 1 when ours takes longer than stock anywhere."""
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    runs: list[Row] = []
    for layers in map(int, arguments.layers.split(",")):
        for _ in range(arguments.rounds):
            for way in arguments.ways.split(","):
                runs.append(measure(way, layers, arguments.tokens, arguments.device))
                print("  ".join(f"{key} {value}" for key, value in runs[-1].items()), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(runs, indent=1) + "\n")
    rows = compared(runs)
    header = ("way", "layers", *COLUMNS, "over stock", "CPU over stock")
    print(table(header, [[row.get(name, "-") for name in header] for row in rows]))
    return int(any(row.get("over stock", 0) > 1 for row in rows))


def measure(way: str, layers: int, tokens: int, device: str) -> Row:
    """One cold and one warm compile, each in a new process. Raises RuntimeError when one fails."""
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (_run(Path(folder), way, layers, tokens, device) for _ in range(2))
    names = ("seconds", "cpu_s")
    rest = {name: value for name, value in cold.items() if name not in names}
    first = {"way": way, "layers": layers, "cold_s": cold["seconds"], "cold_cpu_s": cold["cpu_s"]}
    again = {"warm_s": warm["seconds"], "warm_cpu_s": warm["cpu_s"]}
    return {**first, **rest, **again, "warm_passes_runs": warm["passes_runs"]}


def _run(folder: Path, way: str, layers: int, tokens: int, device: str) -> Row:
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    command = [sys.executable, "-m", "benchmarks.compile_run", way, str(layers), str(tokens), device]
    done = subprocess.run(command, check=False, env={**os.environ, **caches}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way}, {layers} layers: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compared(runs: list[Row]) -> list[Row]:
    """The quickest run of each way and number of layers, with its times over those of stock."""
    best: dict[tuple[int, str], Row] = {}
    for run in sorted(runs, key=lambda run: -run["cold_s"]):
        best[run["layers"], run["way"]] = run
    rows = []
    for (layers, _), run in sorted(best.items(), key=lambda item: (item[0][0], WAYS.index(item[0][1]))):
        stock = best.get((layers, "stock"))
        ratios = {
            label: round(run[name] / stock[name], 2)
            for label, name in (("over stock", "cold_s"), ("CPU over stock", "cold_cpu_s"))
            if stock is not None
        }
        rows.append({**run, **ratios})
    return rows
