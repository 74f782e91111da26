"""`python -m tests.fuzz`: random layers and stages against a float64 oracle, in processes that may crash."""

import argparse
import os
import sys

from tests.fuzz import pool, worker
from tests.fuzz.cases import draw
from tests.fuzz.summary import Summary


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no case after so long")
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 1) - 1, 1))
    parser.add_argument(
        "--patience",
        type=float,
        default=pool.DEFAULT_HANG_SECONDS,
        help="seconds until a case counts as hung; more on a machine that others use",
    )
    parser.add_argument("--out", metavar="FILE.json", help="where the summary goes")
    parser.add_argument(
        "--case", metavar="SEED:INDEX", help="run this case alone and say everything about it"
    )
    parser.add_argument(
        "--levels",
        default="",
        metavar="REGEX",
        help="only cases of these levels, of which there must be some",
    )
    parser.add_argument(
        "--hook", metavar="MODULE:FUNCTION", help="called in every worker before its first case"
    )
    return parser.parse_args(arguments)


def run_one(number: str, device: str, hook: str | None) -> int:
    """Runs a case in this process, so that a debugger or compute-sanitizer sees it."""
    seed, index = map(int, number.split(":"))
    case = draw(seed, index)
    print(case, flush=True)
    worker.call_hook(hook)
    outcome = worker.outcome_of(case, device)
    for name, share in outcome.shares.items():
        held = " (held against movement)" if name in outcome.cancelled else ""
        print(f"{name}: {share:.4f} of what is allowed{held}")
    print(f"{outcome.kind} {outcome.text}")
    return int(outcome.kind != "ok")


def main() -> int:
    """Exit status 1 when anything was found."""
    options = parse(sys.argv[1:])
    if options.case:
        return run_one(options.case, options.device, options.hook)
    run = pool.Run(
        options.seed,
        options.cases,
        options.minutes,
        options.device,
        options.processes,
        options.hook,
        options.patience,
        options.levels,
    )
    summary = Summary(run)
    pool.outcomes(run, summary.add)
    summary.write(options.out)
    return int(bool(summary.findings))


if __name__ == "__main__":
    sys.exit(main())
