"""`make mutants`: wrong edits of the source, each of which some test must notice. The status is 1 when one is not."""

import argparse
import re
import sys
import time
from pathlib import Path

from tests.mutants import runner
from tests.mutants.catalogue import mutants

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="mutants whose line this is found in")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [mutant for mutant in mutants() if re.search(arguments.only, f"{mutant} {mutant.tests}")]
    faults = [fault for mutant in chosen if (fault := mutant.fault(ROOT))]
    if faults or not chosen:
        print("\n".join(faults) or f"no mutant matches {arguments.only!r}")
        return 1
    started = time.monotonic()
    results = runner.run(ROOT, chosen, arguments.workers)
    print("\n" + runner.summary(results, time.monotonic() - started))
    return int(any(result.verdict in ("passed", "broken") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
