"""Workers side by side, each fed by a thread: when one dies or hangs, its case is known and the next gets a new one."""

import multiprocessing
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.cases import COMPILED_EVERY, draw
from tests.fuzz.worker import TEXT, Outcome, serve

START_SECONDS = 300
HANG_SECONDS = {"compiled": 900}  # a compile on a busy machine takes minutes
DEFAULT_HANG_SECONDS = 120
_TOGETHER = 4000  # cases


@dataclass(frozen=True)
class Run:
    """What to run: `cases` from index 0, or until `minutes` are over."""

    seed: int
    cases: int
    minutes: float
    device: str
    processes: int
    hook: str | None = None
    hang_seconds: float = DEFAULT_HANG_SECONDS
    levels: str = ""  # those whose whole name this expression is; all where it is empty


class Worker:
    """A process and its end of the pipe."""

    def __init__(self, run: Run, log: Path) -> None:
        context = _context(run.device)
        self._run, self._log = run, log
        self._connection, theirs = context.Pipe()
        arguments = (theirs, run.seed, run.device, run.hook, str(log))
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self._started = False

    def ask(self, index: int) -> Outcome:
        """The outcome of a case, whatever it does to the process."""
        limit = max(HANG_SECONDS.get(draw(self._run.seed, index).level, 0.0), self._run.hang_seconds)
        start = time.monotonic()
        try:
            if not self._started and not self._hears(START_SECONDS):
                return self._gone(index, "hung", f"no worker within {START_SECONDS} s")
            self._started = True
            start = time.monotonic()
            self._connection.send(index)
            if not self._connection.poll(limit):
                return self._gone(index, "hung", f"no answer within {limit} s")
            outcome = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(10)
            return self._gone(index, "crashed", f"the worker ended with exit code {self._process.exitcode}")
        outcome.seconds = time.monotonic() - start
        return outcome

    def _hears(self, seconds: float) -> bool:
        return self._connection.poll(seconds) and bool(self._connection.recv())

    def _gone(self, index: int, kind: str, text: str) -> Outcome:
        said = self._log.read_text(errors="replace")[-TEXT:].strip() if self._log.exists() else ""
        return Outcome(index, kind, f"{text}. {said}")

    def close(self) -> None:
        """Ends the process, politely if it listens."""
        try:
            self._connection.send(None)
            self._process.join(5)
        except OSError:
            pass
        self.kill()

    def kill(self) -> None:
        """Ends the process, which hears nothing."""
        self._process.kill()
        self._process.join()


def _context(device: str) -> Any:
    """How workers start: CUDA does not survive a fork, and on a CPU to import torch takes longer than many cases."""
    if torch.device(device).type != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([serve.__module__])
    return context


def outcomes(run: Run, tell: Callable[[Outcome], None]) -> None:
    """Runs all cases and tells of each as it ends; never from two threads at once."""
    end = time.monotonic() + 60 * run.minutes
    # A single process goes through all kinds alike, for as long as it may.
    indices = iter(range(run.cases)) if run.processes == 1 else _in_order(run.cases)
    if run.levels:
        indices = _of_levels(run)
    lock = threading.Lock()

    def next_index() -> int | None:
        with lock:
            return next(indices, None) if time.monotonic() < end else None

    def tell_alone(outcome: Outcome) -> None:
        with lock:
            tell(outcome)

    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"worker{number}.log" for number in range(run.processes)]
        threads = [threading.Thread(target=_feed, args=(run, log, next_index, tell_alone)) for log in logs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _in_order(cases: int) -> Iterator[int]:
    """Every index once. Of each so many the compiled cases first: one left to the end would keep all others waiting."""
    for first in range(0, cases, _TOGETHER):
        block = range(first, min(first + _TOGETHER, cases))
        yield from sorted(block, key=lambda index: index % COMPILED_EVERY != COMPILED_EVERY - 1)


def _of_levels(run: Run) -> Iterator[int]:
    """The first so many cases of these levels."""
    found = (index for index in count() if re.fullmatch(run.levels, draw(run.seed, index).level))
    return islice(found, run.cases)


def _feed(run: Run, log: Path, next_index: Callable[[], int | None], tell: Callable[[Outcome], None]) -> None:
    worker = None
    while (index := next_index()) is not None:
        worker = worker or Worker(run, log)
        outcome = worker.ask(index)
        if outcome.kind in ("crashed", "hung"):
            worker.kill()
            worker = None
        tell(outcome)
    if worker is not None:
        worker.close()
