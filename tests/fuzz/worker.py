"""A worker process: takes a case's index, runs the case, answers with its outcome, until there are no more.

It answers nothing when a case kills it; whoever asked knows which one that was.
"""

import importlib
import os
import sys
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from tests.fuzz.cases import Case, draw
from tests.fuzz.check import check

READY = "ready"
DEAD = ("CUDA error", "Triton Error [CUDA]")  # the context is lost, or not to be trusted
TEXT = 2000  # characters of an exception that are worth keeping
HELD_BYTES = 2 * 2**30  # of cached GPU memory; several workers share a device


@dataclass
class Outcome:
    """What became of a case: "ok", "wrong", "raised", "crashed" or "hung", and the figures of `check.Verdict`."""

    index: int
    kind: str
    text: str = ""
    shares: dict[str, float] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    seconds: float = 0.0


def outcome_of(case: Case, device: str) -> Outcome:
    """Runs a case. A CUDA error counts as a crash: nothing runs in this process any more."""
    try:
        verdict = check(case, device)
    except Exception as error:
        is_dead = any(sign in str(error) for sign in DEAD)
        text = "".join(traceback.format_exception(error))[-TEXT:]
        return Outcome(case.index, "crashed" if is_dead else "raised", text)
    kind = "wrong" if verdict.wrong else "ok"
    return Outcome(case.index, kind, "; ".join(verdict.wrong), verdict.shares, verdict.cancelled)


def call_hook(hook: str | None) -> None:
    """Calls "module:function" once: how the fuzzer's own tests break an operator in the workers."""
    if hook:
        module, _, function = hook.partition(":")
        getattr(importlib.import_module(module), function)()


def tidy(case: Case, device: str) -> None:
    """Gives back what a case leaves behind."""
    if case.is_compiled:
        torch._dynamo.reset()
    if device == "cuda" and torch.cuda.memory_reserved() > HELD_BYTES:
        torch.cuda.empty_cache()


def serve(connection: Connection, seed: int, device: str, hook: str | None, log: str) -> None:
    """The loop. The process's output goes to the file `log`, whose end is quoted when the process dies."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    call_hook(hook)
    connection.send(READY)
    while (index := connection.recv()) is not None:
        case = draw(seed, index)
        outcome = outcome_of(case, device)
        connection.send(outcome)
        if outcome.kind == "crashed":
            os._exit(1)
        tidy(case, device)
