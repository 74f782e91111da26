"""docs/features.md: every row names something that exists, and a test that does."""

import ast
import importlib
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?P<feature>[^|]+) \| `(?P<here>[\w.]+)` \| `(?P<path>[\w/.]+)::(?P<test>\w+)` \|$")
LINES = [line for line in (ROOT / "docs/features.md").read_text().splitlines() if line.startswith("|")]
ROWS = [line for line in LINES if not line.startswith(("| feature |", "|---"))]


@lru_cache
def _tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _resolve(name: str) -> object:
    """The object that a dotted name is, modules imported as far as they go."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def test_there_are_rows():
    assert len(ROWS) > 40


@pytest.mark.parametrize("line", ROWS, ids=lambda line: line.split("|")[1].strip())
def test_every_row_holds(line):
    row = ROW.match(line)
    assert row, f"{line!r}: expected feature, one name, one test"
    assert _resolve(row["here"]) is not None
    assert row["test"] in _tests(row["path"])


@pytest.mark.parametrize("name", ["layers.NoSuchThing", "moe_ops.fused_moe.nothing", "nowhere.at_all"])
def test_a_name_that_does_not_exist_is_noticed(name):
    with pytest.raises(AttributeError):
        _resolve(name)
