"""What a run found."""

from collections import Counter
from dataclasses import replace

from tests.fuzz.raising.check import Verdict
from tests.fuzz.raising.grammar import Case
from tests.fuzz.raising.source import source


class Summary:
    """Counts verdicts and what was raised, and prints each finding."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.raised: Counter[tuple[str, str]] = Counter()
        self.layers: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.findings: list[str] = []

    def add(self, case: Case, verdict: Verdict) -> None:
        """Counts a verdict; prints it when it is a finding."""
        self.kinds[verdict.kind] += 1
        if verdict.kind == "void":
            return
        is_mutated = bool(case.mutations) and source(case) != source(replace(case, mutations=()))
        what = "mutated" if is_mutated else "as meant"
        self.layers[what] += 1
        for part in ("experts", "routing"):
            self.raised[what, part] += any(part in each for each in verdict.raised)
        if not is_mutated and not any("experts" in each for each in verdict.raised):
            self.left[(verdict.reasons or ["nothing was said"])[0][:100]] += 1
        if verdict.kind in ("wrong", "refused"):
            self.findings.append(case.number)
            last = verdict.text.strip().splitlines()[-1][:300]
            print(f"{verdict.kind} {case.number}: {last} | {verdict.raised} {case}", flush=True)

    def __str__(self) -> str:
        shares = [
            f"{what}, {part}: {count} of {self.layers[what]}" for (what, part), count in self.raised.items()
        ]
        return "\n".join(
            [str(dict(self.kinds)), "raised: " + "; ".join(shares), f"findings: {self.findings}"]
        )
