"""`python -m tests.fuzz.raising`: random MoE layers in plain PyTorch, rewritten by our passes, against eager."""

import argparse
import sys
import time

import torch

from tests.fuzz.raising.check import Verdict, check
from tests.fuzz.raising.grammar import draw
from tests.fuzz.raising.shrink import shrunk
from tests.fuzz.raising.source import source
from tests.fuzz.raising.summary import Summary


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.raising", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the index to begin with")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no case after so long")
    parser.add_argument("--case", metavar="SEED:INDEX", help="shrink this case alone, and print it as Python")
    return parser.parse_args(arguments)


def run_one(number: str) -> Verdict:
    """Says everything about a case; of one that fails, about the simplest that fails alike."""
    case = draw(*map(int, number.split(":")))
    verdict = check(case)
    print(case, "\n", verdict, sep="")
    if verdict.kind in ("wrong", "refused"):
        case = shrunk(case, verdict.kind)
        print("shrunk:", case, "\n", check(case), sep="")
    print(source(case))
    return verdict


def main() -> int:
    """Exit status 1 when anything was found."""
    options = parse(sys.argv[1:])
    torch.set_num_threads(1)
    if options.case:
        return int(run_one(options.case).kind in ("wrong", "refused"))
    summary, end = Summary(), time.monotonic() + 60 * options.minutes
    for index in range(options.first, options.first + options.cases):
        if time.monotonic() > end:
            break
        case = draw(options.seed, index)
        summary.add(case, check(case))
    print(summary)
    return int(bool(summary.findings))


if __name__ == "__main__":
    sys.exit(main())
