"""What a run found, for people line by line and for machines as JSON."""

import json
import platform
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import moe_ops
from tests.fuzz.cases import draw
from tests.fuzz.pool import Run
from tests.fuzz.worker import Outcome

COUNTED = ("level", "dtype", "w13_layout", "w2_layout", "hidden_layout", "small_layout")
COUNTED += ("skew", "logits", "emit", "backward", "poisoned", "dropped", "mapped", "odd_sizes")


class Summary:
    """Counts outcomes and prints each finding with the command that runs its case again."""

    def __init__(self, run: Run) -> None:
        self.run, self.start = run, time.monotonic()
        self.counts: dict[str, Counter] = {name: Counter() for name in ("outcome", *COUNTED)}
        self.findings: list[dict[str, Any]] = []
        self.worst: dict[str, dict[str, Any]] = {}
        self.slowest = {"case": "", "seconds": 0.0}
        self.cancelled = 0
        self.busy = 0.0

    def add(self, outcome: Outcome) -> None:
        """Counts an outcome; prints it when it is a finding."""
        case = draw(self.run.seed, outcome.index)
        self.counts["outcome"][outcome.kind] += 1
        for name in COUNTED:
            self.counts[name][str(getattr(case, name))] += 1
        self.cancelled += bool(outcome.cancelled)
        self.busy += outcome.seconds
        if outcome.seconds > self.slowest["seconds"]:
            self.slowest = {"case": case.number, "seconds": round(outcome.seconds, 1)}
        if outcome.kind != "ok":
            self._add_finding(outcome, case.number, str(case))
        elif outcome.shares:
            self._keep_worst(case.dtype, case.number, outcome.shares)

    def _add_finding(self, outcome: Outcome, number: str, case: str) -> None:
        again = f"python -m tests.fuzz --device {self.run.device} --case {number}"
        self.findings.append(
            {"case": number, "kind": outcome.kind, "text": outcome.text, "again": again, "what": case}
        )
        last = outcome.text.strip().splitlines()[-1:] or [""]
        print(f"{outcome.kind} {number}: {last[0][:300]}  |  {again}", flush=True)

    def _keep_worst(self, dtype: str, number: str, shares: dict[str, float]) -> None:
        name = max(shares, key=shares.__getitem__)
        if shares[name] > self.worst.get(dtype, {"share": -1.0})["share"]:
            self.worst[dtype] = {"share": round(shares[name], 4), "of": name, "case": number}

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON. `worst_share_of_bound` is of the cases that passed."""
        is_cuda = self.run.device == "cuda"
        cases = sum(self.counts["outcome"].values())
        return {
            "versions": _versions(),
            "device": torch.cuda.get_device_name() if is_cuda else platform.processor() or platform.machine(),
            "seed": self.run.seed,
            "cases": cases,
            "processes": self.run.processes,
            "seconds": round(time.monotonic() - self.start, 1),
            "seconds_per_case": round(self.busy / max(cases, 1), 3),
            "slowest": self.slowest,
            "counts": {name: dict(sorted(counter.items())) for name, counter in self.counts.items()},
            "held_against_movement": self.cancelled,
            "worst_share_of_bound": dict(sorted(self.worst.items())),
            "findings": sorted(self.findings, key=lambda finding: int(finding["case"].split(":")[1])),
        }

    def write(self, path: str | None) -> None:
        """Prints the totals, and writes all of it as JSON if there is a path."""
        summary = self.as_dict()
        if path:
            Path(path).write_text(json.dumps(summary, indent=1) + "\n")
        outcomes = ", ".join(f"{count} {kind}" for kind, count in summary["counts"]["outcome"].items())
        print(
            f"{summary['cases']} cases, seed {self.run.seed}, {summary['seconds']} s on {summary['device']}: {outcomes}"
        )


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sources": moe_ops.source_hash(),
    }
    try:
        import triton
    except ImportError:
        return found
    return {**found, "triton": triton.__version__}
