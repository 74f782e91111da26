"""The list of mutants fits the source and leaves no guard out; the runner tells the killed from those that survive."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants import catalogue, runner
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
MUTANTS = catalogue.mutants()
NAMES_ONLY = "inductor_passes/records.py"


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 70
    assert len(set(MUTANTS)) == len(MUTANTS)


def test_every_edit_can_still_be_made() -> None:
    assert not [fault for mutant in MUTANTS if (fault := mutant.fault(ROOT))]


def test_every_source_file_has_a_mutant() -> None:
    sources = [
        path for name in ("moe_ops", "inductor_passes", "layers") for path in (ROOT / name).rglob("*.py")
    ]
    names = {str(path.relative_to(ROOT)) for path in sources if path.name != "__init__.py"}
    assert names - {mutant.path for mutant in MUTANTS} == {NAMES_ONLY}


def _guards(path: Path) -> Iterator[tuple[int, int]]:
    """First and last line of every `if`, `except` or function that ends in `raise Refusal`: what decides about it."""
    parents = {
        child: node for node in ast.walk(ast.parse(path.read_text())) for child in ast.iter_child_nodes(node)
    }
    for node in parents:
        if isinstance(node, ast.Raise) and "Refusal(" in ast.unparse(node):
            holder = parents[node]
            yield getattr(holder, "lineno", node.lineno), node.end_lineno or node.lineno


@pytest.mark.parametrize("path", sorted((ROOT / "inductor_passes").rglob("*.py")), ids=lambda path: path.stem)
def test_every_refusal_has_a_mutant(path: Path) -> None:
    source = path.read_text()
    edited = [
        range(first := source[: source.index(mutant.old)].count("\n") + 1, first + mutant.old.count("\n") + 1)
        for mutant in MUTANTS
        if ROOT / mutant.path == path
    ]
    for first, last in _guards(path):
        touched = any(set(lines) & set(range(first, last + 1)) for lines in edited)
        assert touched, f"{path.name}:{first}: no mutant of what refuses there"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package with a function, and a test that looks at half of it."""
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-ra --import-mode=importlib'",
        "toy/__init__.py": "def clamp(x):\n    return max(0, min(x, 9))\n",
        "tests/test_toy.py": "import toy\n\n\ndef test_low():\n    assert toy.clamp(-1) == 0\n",
        "tests/test_broken.py": "def test_wrong():\n    assert False\n",
        # What runs tests imports it; there is nothing here for which it would have to be torch.
        "torch/__init__.py": "",
        "torch/_dynamo.py": "",
        "tests/test_slow.py": "import toy\n\n\ndef test_ends():\n    while toy.clamp(1) != 1: pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _toy(old: str, new: str, tests: str = "tests/test_toy.py::test_low") -> Mutant:
    return Mutant("toy/__init__.py", old, new, tests)


def test_killed_survived_broken_and_timed_out(tree: Path, capsys) -> None:
    cases = {
        "failed": _toy("max(0,", "max(-5,"),
        "passed": _toy("min(x, 9)", "min(x, 8)"),
        "broken": _toy("def clamp", "import no_such_module\ndef clamp"),
    }
    results = runner.run(tree, list(cases.values()), workers=2, timeout_s=20)
    cases["timed out"] = slow = _toy("min(x, 9)", "min(x, -9)", "tests/test_slow.py")
    results |= runner.run(tree, [slow], workers=1, timeout_s=2)  # without the edit it has ten times as long
    assert {mutant: result.verdict for mutant, result in results.items()} == {m: v for v, m in cases.items()}
    assert "max(0, min(x, 9))" in (tree / "toy/__init__.py").read_text()
    told = runner.summary(results, 60)
    assert told.startswith("4 mutants in 1 min: 1 killed, 1 killed by the time limit, 1 survived, 1 broken\n")
    assert "SURVIVED" in told and "min(x, 9)  ->  min(x, 8)" in told and "max(-5" not in told
    assert "tests/test_toy.py::test_low" in capsys.readouterr().out


def test_a_test_that_fails_anyway_kills_nothing(tree: Path) -> None:
    with pytest.raises(RuntimeError, match=r"tests/test_broken.py without any edit: failed"):
        runner.run(tree, [_toy("max(0,", "max(-5,", "tests/test_broken.py")], workers=1)


def test_the_copy_is_what_is_imported(tree: Path) -> None:
    (tree / "os").mkdir()
    (tree / "os" / "__init__.py").write_text("a = 1\n")  # Python has imported another `os` by then
    with pytest.raises(RuntimeError, match="expected imports from"):
        runner.run(tree, [Mutant("os/__init__.py", "a", "b", "tests/test_toy.py")], workers=1)


def test_faults_of_the_list(tree: Path) -> None:
    assert not _toy("max(0,", "max(-5,").fault(tree)
    faults = {
        "there 0 times": _toy("maximum", "x"),
        "there 3 times": _toy("x", "y"),
        "text that differs": _toy("max", "max"),
        "invalid syntax": _toy("max(0,", "max(,"),
        "no tests/test_gone.py": _toy("max(0,", "max(1,", "tests/test_gone.py"),
        "no tests/test_toy.py::test_high": _toy("max(0,", "max(1,", "tests/test_toy.py::test_high"),
        "No such file": Mutant("toy/gone.py", "a", "b", "tests/test_toy.py"),
    }
    for text, mutant in faults.items():
        assert text in mutant.fault(tree)


def test_a_line_of_no_kind_is_refused() -> None:
    text = "== a.py\n@ tests/t.py\n- one\n-   two\n+\n"
    assert list(catalogue.parsed(text)) == [Mutant("a.py", "one\n  two", "", "tests/t.py")]
    with pytest.raises(ValueError, match="expected a line that begins with"):
        catalogue.parsed("== a.py\n* b")
