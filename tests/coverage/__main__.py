"""`python -m tests.coverage`: measures every family, records it, and writes docs/coverage.md from the record."""

import argparse
import re

from tests.coverage.cases import CASES, is_installed
from tests.coverage.measure import Row, measure
from tests.coverage.page import PAGE, page
from tests.coverage.table import recorded, write


def main() -> None:
    """Parses the command line; --only measures a few and keeps the record of the others."""
    parser = argparse.ArgumentParser(prog="python -m tests.coverage", description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression of configurations")
    parser.add_argument("--page", action="store_true", help="write the page from the record, measure nothing")
    chosen = parser.parse_args()
    rows = {row.name: row for row in recorded()}
    for name in CASES:
        if not chosen.page and is_installed(name) and re.search(chosen.only, name):
            rows[name] = measure(name)
            print(_line(rows[name]), flush=True)
            write([rows[each] for each in CASES if each in rows])
    PAGE.write_text(page([rows[each] for each in CASES if each in rows]))


def _line(row: Row) -> str:
    errors = f"{row.eager:.0e} {row.compiled_error:.0e} {row.gradient:.0e} of {row.effect:.1e}"
    return f"{row.name:24} {row.experts} experts {row.routers} routers, {row.compiled or 'stock'}: {errors} {row.left}"


if __name__ == "__main__":
    main()
