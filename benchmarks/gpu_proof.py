"""The whole proof on a GPU machine: tests marked gpu, the capture check, the demo, and the five workloads.

Everything is written to benchmarks/results/NAME/: machine.json, a log per step, demo.json, capture.json, moe.csv and
verdict.txt. Steps and workloads can be chosen, so that a long proof can be taken in pieces.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.arguments import listed, number, one_of, whole
from benchmarks.report import machine
from benchmarks.workloads import TOKEN_COUNTS, WORKLOADS, cells_of

STEPS = ("tests", "capture", "demo", "moe")
CAPTURED_TOKEN_COUNTS = (1, 8, 64, 1024)
MAX_CAPTURE_ERROR = 8e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks gpu`."""
    parser.add_argument(
        "--name", default=time.strftime("%Y-%m-%d"), help="folder of this proof, default today"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), help="where that folder goes"
    )
    parser.add_argument(
        "--steps",
        type=listed(one_of(STEPS)),
        default=",".join(STEPS),
        help=f"comma list from {', '.join(STEPS)}",
    )
    parser.add_argument(
        "--workloads", type=listed(one_of(WORKLOADS)), default=",".join(WORKLOADS), help="of the moe step"
    )
    parser.add_argument(
        "--ts", type=listed(whole), default=",".join(map(str, TOKEN_COUNTS)), help="of the moe step"
    )
    parser.add_argument("--budget", type=number, default=3600, help="seconds for the moe step")
    parser.add_argument("--commit", help="what to record where the tree has no git history to ask")


def main(arguments: argparse.Namespace) -> int:
    """Runs the chosen steps one after the other; the status is 1 when any failed."""
    if not torch.cuda.is_available():
        print("python -m benchmarks gpu needs a CUDA GPU")
        return 2
    folder = arguments.results / arguments.name
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine() | ({"commit": arguments.commit} if arguments.commit else {})
    (folder / "machine.json").write_text(json.dumps(facts, indent=1) + "\n")
    failed = [step for step in arguments.steps.split(",") if not _run_step(step, folder, arguments)]
    print(f"\nGPU proof in {folder}: " + (f"FAILED: {', '.join(failed)}" if failed else "all steps passed"))
    return int(bool(failed))


def _run_step(step: str, folder: Path, arguments: argparse.Namespace) -> bool:
    print(f"\n=== {step}", flush=True)
    if step == "capture":
        return _capture(folder)
    commands = {
        "tests": ["pytest", "-m", "gpu", "-n", "8", "--durations=10", "tests"],
        "demo": ["benchmarks", "demo", "--json", str(folder / "demo.json")],
        "moe": [
            *("benchmarks", "moe", "--out", str(folder / "moe.csv"), "--workloads", arguments.workloads),
            *("--ts", arguments.ts, "--budget", str(arguments.budget)),
        ],
    }
    log = folder / f"{step}.log"
    if not _run_logged([sys.executable, "-m", *commands[step]], log):
        return False
    if step == "tests":
        return _some_passed(log)
    return step != "moe" or _verdict(folder, arguments)


def _run_logged(command: list[str], log: Path) -> bool:
    """Runs a command with its output on the terminal and in `log`."""
    with log.open("w") as lines:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.write(line)
        return process.wait() == 0


def _capture(folder: Path) -> bool:
    from benchmarks.capture import capture_and_replay

    results = [capture_and_replay(tokens) for tokens in CAPTURED_TOKEN_COUNTS]
    for result in results:
        print(result, flush=True)
    (folder / "capture.json").write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return all(result.worst <= MAX_CAPTURE_ERROR for result in results)


def _some_passed(log: Path) -> bool:
    """Tests that were skipped, every one of them, are a success to pytest."""
    return re.search(r"\b[1-9]\d* passed", log.read_text()) is not None


def _verdict(folder: Path, arguments: argparse.Namespace) -> bool:
    """Whether ours won every cell asked for, measured now or in an earlier piece; the table is kept beside."""
    rows = peers.read_rows([folder / "moe.csv"])
    text, _ = peers.verdict(rows)
    (folder / "verdict.txt").write_text(text + "\n")
    counts = tuple(map(int, arguments.ts.split(",")))
    asked = {
        (cell.workload.name, cell.tokens, cell.routing)
        for name in arguments.workloads.split(",")
        for cell in cells_of(WORKLOADS[name], counts)
    }
    won = {comparison.key for comparison in peers.compare(rows) if comparison.ratio > 1}
    for name, tokens, routing in sorted(asked - won):
        print(f"not measured or not won: {name} T={tokens} {routing}", flush=True)
    return asked <= won
