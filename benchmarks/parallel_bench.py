"""Experts on several GPUs: exchanges beside bare NCCL, layers on W ranks and on one, replays with changed routing.

Starts a process for each GPU it finds, or two on a CPU, where only what needs no GPU is run, small.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import number, to_write, whole
from benchmarks.parallel_killed import in_time, killed
from benchmarks.parallel_parts import PARTS, PARTS_ON_CPU
from benchmarks.ranks import Job, run_parts
from benchmarks.report import machine, table

NAMES = (*PARTS, "killed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks parallel`."""
    parser.add_argument("--only", default="", help=f"from {', '.join(NAMES)}; all that apply")
    parser.add_argument("--ranks", type=whole, default=0, help="processes, one for each GPU unless given")
    parser.add_argument(
        "--replays", type=whole, default=100_000, help="of a captured layer, each routed otherwise"
    )
    parser.add_argument("--problems", type=whole, default=2000, help="random ones, through every dispatcher")
    parser.add_argument("--limit", type=number, default=240.0, help="seconds that a part may take")
    parser.add_argument(
        "--out", type=to_write, default=Path("build/parallel.json"), help="where the figures go"
    )


def main(arguments: argparse.Namespace) -> int:
    """Measures; 1 if a part failed. What was in the file for other parts stays."""
    has_gpus = torch.cuda.is_available()
    names = arguments.only.split(",") if arguments.only else list(NAMES if has_gpus else PARTS_ON_CPU)
    for name in names:
        if name not in NAMES:
            print(f"--only {name}: expected names from {', '.join(NAMES)}")
            return 2
    size = arguments.ranks or (torch.cuda.device_count() if has_gpus else 2)
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    facts = {**machine(), "ranks": size}
    print("  ".join(f"{name} {fact}" for name, fact in facts.items()), flush=True)

    def tell(name: str, result: Any) -> None:
        found["machine"] = facts
        found[name] = result
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")

    options = {"replays": arguments.replays, "problems": arguments.problems}
    together = tuple(name for name in names if name in PARTS)
    failed = run_parts(Job("benchmarks.parallel_parts", together, options, arguments.limit), size, tell)
    if "killed" in names:
        failed += _run_killed(size, tell)
    print(summary(found))
    print(f"failed: {', '.join(failed)}" if failed else f"{len(names)} parts in {arguments.out}", flush=True)
    return 1 if failed else 0


def _run_killed(size: int, tell: Callable[[str, Any], None]) -> list[str]:
    """The part in which no process comes back. Returns its name if it failed."""
    print("killed:", flush=True)
    rows = killed(size)
    tell("killed", rows)
    return [] if all(map(in_time, rows)) else ["killed"]


_TABLES = {
    "exchange": {
        "tokens": "tokens",
        "dispatcher": "dispatcher",
        "there us": "there_us",
        "NCCL": "bare_gather_us",
        "GB/s": "there_wire_GBps",
        "there and back us": "both_us",
    },
    "decode": {
        "tokens": "tokens_per_rank",
        "busiest rank": "busiest",
        "tensor parallel us": "tensor parallel us",
        "allgather us": "allgather us",
        "symmetric us": "symmetric us",
    },
    "layer": {
        "way": "way",
        "tokens": "tokens",
        "us": "us",
        "times faster": "speedup",
        "captured us": "captured_us",
        "captured, times": "captured_speedup",
    },
    "quantised": {
        "format": "format",
        "tokens": "tokens_per_rank",
        "tensor parallel us": "tensor parallel us",
        "allgather us": "allgather us",
        "symmetric us": "symmetric us",
        "bfloat16, symmetric us": "plain symmetric us",
    },
    "rebalancing": {
        "experts": "experts",
        "busiest rank": "busiest",
        "after": "busiest_after",
        "us": "us",
        "us after": "us_after",
        "moved in ms": "moved_ms",
    },
    "killed": {"dispatcher": "dispatcher", "timeout s": "timeout_s", "ended after s": "seconds"},
    "replays": {"dispatcher": "dispatcher", "replays": "replays", "mismatches": "mismatches"},
}


def summary(found: dict[str, Any]) -> str:
    """A table for each part that has rows."""
    parts = [(found[part], columns) for part, columns in _TABLES.items() if part in found]
    return "\n\n".join(
        table(tuple(columns), [[_shown(row.get(key, "")) for key in columns.values()] for row in rows])
        for rows, columns in parts
    )


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
