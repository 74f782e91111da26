"""House rules that a linter does not check: short files, few arguments, nothing that belongs to one machine."""

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("moe_ops", "layers", "inductor_passes")
MAX_LINES = 350
MAX_ARGUMENTS = 8
# Paths of a machine or of someone's home; absolute, so that `work` or `home` as words are fine.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|home|root|tmp)/\w|\.\./shared")
# Their signatures are the operators' and fixed.
PUBLIC_OPS = {"act_gemm_combine", "fused_experts", "fused_experts_with_shared", "fused_moe"}


def _python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def _functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:  # not a checkout, an unpacked sdist
        return [
            path
            for path in ROOT.rglob("*")
            if path.is_file() and not path.relative_to(ROOT).parts[0].startswith(".")
        ]
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_files_are_short() -> None:
    lengths = {
        path: len(path.read_text().splitlines()) for path in _python_files(*SOURCES, "benchmarks", "tests")
    }
    long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert not long, f"split these: {long}"


def _arguments(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _called_by_an_operator(function: ast.FunctionDef) -> bool:
    """Implementations, fakes and checks take exactly their operator's arguments, weights and all."""
    return {"hidden_states", "w13"} <= set(_arguments(function)) or {"x", "w2"} <= set(_arguments(function))


def test_functions_take_few_arguments() -> None:
    many = []
    for path in _python_files(*SOURCES, "benchmarks"):
        if "kernels" in path.relative_to(ROOT).parts:
            continue
        for function in _functions(path):
            names = [name for name in _arguments(function) if name not in ("self", "cls", "ctx")]
            if (
                len(names) > MAX_ARGUMENTS
                and function.name not in PUBLIC_OPS
                and not _called_by_an_operator(function)
            ):
                many.append(f"{path.relative_to(ROOT)}:{function.lineno} {function.name} takes {len(names)}")
    assert not many, "\n".join(many)


def test_functions_are_short() -> None:
    files = (path for path in _python_files(*SOURCES) if "kernels" not in path.relative_to(ROOT).parts)
    lengths = [f.end_lineno - f.lineno + 1 for path in files for f in _functions(path)]
    assert statistics.median(lengths) <= 15


def test_nothing_names_a_machine() -> None:
    for path in _tracked():
        if (
            path.suffix in {".py", ".md", ".toml", ".sh", ".lock", ""}
            and path.is_file()
            and path != Path(__file__)
        ):
            match = MACHINE_PATHS.search(path.read_text(errors="ignore"))
            assert match is None, f"{path.relative_to(ROOT)} contains {match.group()!r}"
