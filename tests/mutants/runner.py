"""Runs mutants: each in a copy of the tree, against its nearest tests, in a process of its own."""

import contextlib
import json
import os
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.mutants.mutant import Mutant

TIMEOUT_S = 300
_INTERPRETED = "tests/kernels/"
# Of these, what looks at plans and compiled code instead.
_COMPILED = ("test_addresses", "test_alignment", "test_aot", "test_plan_range", "test_products_are_awaited")
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build", "dist", "results")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of pytest: `verdict` is "passed", "failed", "timed out" or "broken" (nothing ran to an end)."""

    verdict: str
    detail: str
    seconds: float


class Tree:
    """A copy of the working tree, from which everything is imported."""

    def __init__(self, root: Path, source: Path) -> None:
        self.root = root / "tree"
        self.scratch = root
        self.workers: dict[bool, subprocess.Popen[bytes]] = {}
        shutil.copytree(source, self.root, ignore=_NOT_COPIED)

    def expect_own_packages(self, packages: Iterable[str]) -> None:
        """Raises RuntimeError when Python would import a package from elsewhere, such as an editable install."""
        code = (
            "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
        )
        command = [sys.executable, "-P", "-c", code, *packages]
        found = subprocess.run(
            command, cwd=self.root, env=self._environment(), capture_output=True, text=True
        )
        paths = found.stdout.split()
        if found.returncode or not paths or not all(Path(path).is_relative_to(self.root) for path in paths):
            raise RuntimeError(f"expected imports from {self.root}, got {paths} {found.stderr[-500:]}")

    def pytest(self, targets: Iterable[str], timeout_s: float) -> Run:
        """Runs tests of one kind until the first failure."""
        targets = list(targets)
        worker = self._worker(any(map(_is_interpreted, targets)))
        assert worker.stdin is not None
        assert worker.stdout is not None
        log = self.scratch / "log"
        arguments = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", *targets]
        started = time.monotonic()
        worker.stdin.write(json.dumps((arguments, str(log))).encode() + b"\n")
        group = int(worker.stdout.readline())
        is_over = bool(select.select([worker.stdout], [], [], timeout_s)[0])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)  # what is late, and what the tests left running
        status = int(worker.stdout.readline())
        if not is_over:
            return Run("timed out", f"after {timeout_s:.0f} s", timeout_s)
        return _judged(status, log.read_text(errors="replace"), time.monotonic() - started)

    def close(self) -> None:
        """Ends the processes that run tests."""
        for worker in self.workers.values():
            worker.communicate()

    def _worker(self, interpreted: bool) -> subprocess.Popen[bytes]:
        if interpreted not in self.workers:
            command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))]
            environment = self._environment({"TRITON_INTERPRET": "1"} if interpreted else {})
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            # Without a buffer: `select` would not see an answer that has been read ahead.
            self.workers[interpreted] = subprocess.Popen(
                command, cwd=self.root, env=environment, bufsize=0, **pipes
            )
        return self.workers[interpreted]

    @contextlib.contextmanager
    def edited(self, mutant: Mutant) -> Iterator[None]:
        """Within it the tree has the mutant's edit."""
        path = self.root / mutant.path
        pristine = path.read_text()
        path.write_text(mutant.edited(pristine))
        try:
            yield
        finally:
            path.write_text(pristine)

    def _environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",  # an edit of the same size and second would find the old bytecode
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor"),
            "TRITON_CACHE_DIR": str(self.scratch / "triton"),
            **(more or {}),
        }


def _is_interpreted(target: str) -> bool:
    return target.startswith(_INTERPRETED) and not target.removeprefix(_INTERPRETED).startswith(_COMPILED)


def _judged(returncode: int, output: str, seconds: float) -> Run:
    """pytest returns 1 where a test failed; a crash of the interpreter is a failure too."""
    if returncode == 1 or returncode < 0:
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return Run("failed", failed.group(1) if failed else f"status {returncode}", seconds)
    if returncode == 0 and re.search(r"\d+ passed", output):
        return Run("passed", "", seconds)
    return Run("broken", f"status {returncode}\n{output[-2000:]}", seconds)


def run(
    source: Path, mutants: Sequence[Mutant], workers: int, timeout_s: float = TIMEOUT_S
) -> dict[Mutant, Run]:
    """Runs every mutant and prints what becomes of it; "failed" is what should.

    Raises:
        RuntimeError: a test fails without any edit, or the copy is not what is imported.
    """
    with TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        trees: queue.Queue[Tree] = queue.Queue()
        for index in range(workers):
            tree = Tree(Path(scratch) / str(index), source)
            stack.callback(tree.close)
            trees.put(tree)
        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)

        def with_tree(function: Callable[[Tree, Any], Run], item: Any) -> Run:
            tree = trees.get()
            try:
                return function(tree, item)
            finally:
                trees.put(tree)

        def pristine(tree: Tree, targets: list[str]) -> Run:
            return tree.pytest(targets, 10 * timeout_s)

        def mutated(tree: Tree, mutant: Mutant) -> Run:
            with tree.edited(mutant):
                result = tree.pytest(mutant.tests.split(), timeout_s)
            print(_told(mutant, result), flush=True)
            return result

        packages = {Path(mutant.path).parts[0] for mutant in mutants}
        tree.expect_own_packages(name for name in packages if (source / name / "__init__.py").exists())
        targets = _by_file(mutants)
        for name, result in zip(targets, pool.map(lambda each: with_tree(pristine, each), targets.values())):
            print(f"without an edit {name} {result.verdict} in {result.seconds:.0f} s", flush=True)
            if result.verdict != "passed":
                raise RuntimeError(f"{name} without any edit: {result.verdict} {result.detail}")
        return dict(zip(mutants, pool.map(lambda each: with_tree(mutated, each), mutants)))


def _by_file(mutants: Sequence[Mutant]) -> dict[str, list[str]]:
    files: dict[str, dict[str, None]] = defaultdict(dict)
    for target in (target for mutant in mutants for target in mutant.tests.split()):
        files[target.partition("::")[0]][target] = None
    return {name: list(targets) for name, targets in files.items()}


VERDICTS = {"failed": "killed", "timed out": "killed", "passed": "SURVIVED", "broken": "BROKEN"}


def _told(mutant: Mutant, result: Run) -> str:
    return f"{VERDICTS[result.verdict]} in {result.seconds:.0f} s: {mutant}  {result.detail}"


def summary(results: dict[Mutant, Run], seconds: float) -> str:
    """How many there are of each kind, and the mutants that nothing killed."""
    counts = Counter(result.verdict for result in results.values())
    lines = [
        f"{len(results)} mutants in {seconds / 60:.0f} min: {counts['failed']} killed, "
        f"{counts['timed out']} killed by the time limit, {counts['passed']} survived, {counts['broken']} broken"
    ]
    alive = (pair for pair in results.items() if pair[1].verdict in ("passed", "broken"))
    return "\n".join([*lines, *(_told(*pair) for pair in alive)])
