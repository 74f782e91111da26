"""The list of mutants: `edits/*.txt`, area by area. It grows with each operator and each pass.

    == moe_ops/permute.py
    @ tests/ops/test_stage_values.py::test_permute_is_exact
    - sorted_slots // top_k
    + sorted_slots % top_k

`==` names the file of the edits below it, `@` the tests of one edit, `-` the lines of its old text and `+` those of
the new one, which may be none. They need not be whole lines of the source.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import Mutant

_EDITS = Path(__file__).parent / "edits"


def mutants(folder: Path = _EDITS) -> list[Mutant]:
    """Every mutant of a folder of lists. Raises ValueError for a line that begins as none of them should."""
    return [mutant for path in sorted(folder.glob("*.txt")) for mutant in parsed(path.read_text())]


def parsed(text: str) -> Iterator[Mutant]:
    """The mutants of one list."""
    path = ""
    edits: list[tuple[str, str, dict[str, list[str]]]] = []
    for line in filter(None, text.splitlines()):
        kind, _, rest = line.partition(" ")
        if kind == "==":
            path = rest
        elif kind == "@":
            edits.append((path, rest, {"-": [], "+": []}))
        elif kind in ("-", "+"):
            edits[-1][2][kind].append(rest)
        else:
            raise ValueError(f"{line!r}: expected a line that begins with ==, @, - or +")
    return (Mutant(path, "\n".join(of["-"]), "\n".join(of["+"]), tests) for path, tests, of in edits)
