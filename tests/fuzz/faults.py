"""Breaks operators on purpose, to see that it shows: `python -m tests.fuzz --hook tests.fuzz.faults:install`."""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import moe_ops
from tests.fuzz import worker

WRONG, RAISED, CRASHED, HUNG = 4, 2, 3, 5  # the indices of the cases that go wrong, and how
LAST_OPERATOR = {"halves": "act_gemm_combine"}  # of levels that are several


def spoilt(level: str) -> mock._patch:
    """The operator of a level with the last number of its first result off by one."""
    name = LAST_OPERATOR.get(level, level)
    original = getattr(moe_ops, name)

    def broken(*args, **kwargs):
        out = original(*args, **kwargs)
        if not isinstance(out, tuple):
            return off_by_one(out)
        first, *rest = out
        return type(out)(off_by_one(first), *rest) if hasattr(out, "_fields") else (off_by_one(first), *rest)

    return mock.patch.object(moe_ops, name, broken)


def off_by_one(tensor):
    """Its last number."""
    tensor = tensor.clone()
    tensor.view(-1)[-1] += 1
    return tensor


def _replaced(level: str, act: Callable[..., object] | Exception) -> mock._patch:
    return mock.patch.object(moe_ops, level, side_effect=act)


FAULTS = {
    WRONG: spoilt,
    RAISED: lambda level: _replaced(level, ValueError("hidden_states: not today")),
    CRASHED: lambda level: _replaced(level, lambda *_, **__: os._exit(7)),
    HUNG: lambda level: _replaced(level, lambda *_, **__: time.sleep(3600)),
}


def install() -> None:
    """In this process, the operators of four cases fail, each in a way of its own."""
    original = worker.check

    def check(case, device):
        with FAULTS.get(case.index, nullcontext)(case.level):
            return original(case, device)

    worker.check = check
