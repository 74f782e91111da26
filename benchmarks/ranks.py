"""Ranks for measurements: one process for each GPU, or a few on a CPU, that run named parts one after another.

Each part's result is written as soon as it is there. Nothing waits for ever: a part has a time limit, after which, or
when a rank ends with an error, all ranks are ended and new ones run the parts that are left.
"""

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WAIT_S = 60  # that a rank waits for another
_GRACE_S = 8.0  # for the other ranks, once one has failed

Part = Callable[[Any], Any]


@dataclass(frozen=True)
class Job:
    """What every rank is to do: parts of `module`, by name, in order.

    Args:
        module: has `PARTS`, functions of what `start(rank, size, options)` of it returns.
        names: of the parts.
        options: for `start`.
        limit_s: seconds that a part may take.
    """

    module: str
    names: tuple[str, ...]
    options: dict[str, Any]
    limit_s: float


def run_parts(job: Job, size: int, tell: Callable[[str, Any], None]) -> list[str]:
    """Runs the parts on `size` ranks and hands each result of rank 0 to `tell`. Returns the names that failed."""
    left, failed = list(job.names), []
    while left:
        with tempfile.TemporaryDirectory() as folder:
            _run(Job(job.module, tuple(left), job.options, job.limit_s), size, Path(folder), tell)
            done = [name for name in left if _result(folder, name).exists()]
        if len(done) < len(left):
            failed.append(left[len(done)])
        left = left[len(done) + 1 :]
    return failed


def process_context() -> Any:
    """What starts ranks. CUDA does not survive a fork; elsewhere what ranks are forked from imports torch for all."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.parallel_state"])
    return context


def _run(job: Job, size: int, folder: Path, tell: Callable[[str, Any], None]) -> None:
    context, told = process_context(), set()
    arguments = [(rank, size, str(folder), job) for rank in range(size)]
    ranks = [context.Process(target=_serve, args=each, daemon=True) for each in arguments]
    for rank in ranks:
        rank.start()
    try:
        _watch(job, ranks, folder, lambda: _tell_new(job, folder, tell, told))
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
        _tell_new(job, folder, tell, told)


def _watch(job: Job, ranks: Sequence[Any], folder: Path, tell_new: Callable[[], bool]) -> None:
    deadline = time.monotonic() + job.limit_s + WAIT_S
    while any(rank.is_alive() for rank in ranks):
        if tell_new():
            deadline = time.monotonic() + job.limit_s
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            print("  ended: a rank failed, or the part took too long", flush=True)
            return
        time.sleep(0.1)


def _tell_new(job: Job, folder: Path, tell: Callable[[str, Any], None], told: set[str]) -> bool:
    """Hands over what is there and was not handed over."""
    before = len(told)
    for name in job.names:
        path = _result(folder, name)
        if name not in told and path.exists():
            told.add(name)
            tell(name, json.loads(path.read_text()))
    return len(told) > before


def _result(folder: Path | str, name: str) -> Path:
    return Path(folder, f"{name}.json")


def _serve(rank: int, size: int, folder: str, job: Job) -> None:
    try:
        join_group(rank, size, folder)
        module = __import__(job.module, fromlist=["PARTS"])
        state = module.start(rank, size, job.options)
        for name in job.names:
            started = time.perf_counter()
            if rank == 0:
                print(f"{name}:", flush=True)
            result = module.PARTS[name](state)
            if rank == 0:
                print(f"  {name}: {time.perf_counter() - started:.1f} s", flush=True)
                path = _result(folder, name)
                path.with_suffix(".part").write_text(json.dumps(result))
                path.with_suffix(".part").rename(path)
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    os._exit(0)  # leaving a group waits for what others left undone


def join_group(rank: int, size: int, folder: str, wait_s: float = WAIT_S) -> None:
    """Makes this process a rank of those that are given the same folder, on a GPU of its own if there are any."""
    store = dist.FileStore(str(Path(folder, "store")), size)
    shared = {"store": store, "rank": rank, "world_size": size, "timeout": timedelta(seconds=wait_s)}
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank), **shared)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **shared)
