"""Ranks for tests: processes that are started once, joined by gloo or NCCL, and run one test after another.

    @on_ranks(2, 4)
    def test_something():  # runs on each of 2 ranks, and again on each of 4
        assert dist.get_world_size() in (2, 4)

    @on_gpu_ranks(2)
    def test_something():  # each of 2 ranks has a GPU; skipped where there are fewer, and marked gpu
        assert torch.cuda.current_device() == dist.get_rank()

An error on any rank is the test's, with that rank's traceback. Ranks that do not come back in time are killed and the
stacks of all of them are the error. Either way the next test gets new ranks; these are forked from a server that has
imported torch already, which takes milliseconds.

A rank that a signal ends runs the test once more: gloo in torch 2.13 corrupts its memory, rarely, when several
collectives are under way (`python -m tests.layers.parallel.gloo_crash` shows it without this library).
"""

import atexit
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch

TIMEOUT = 90.0  # a compiled test on a busy core
_GRACE = 3.0  # for the other ranks, once one has failed
_worlds: dict[tuple[int, str], "World"] = {}


class RankError(AssertionError):
    """What went wrong on the ranks."""


class RankCrashed(RankError):
    """A signal ended a rank."""


class World:
    """`size` processes in one process group."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        # CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn") if backend == "nccl" else fork_server()
        self.folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(size)]
        self.pipes: list[Connection] = [ours for ours, _ in pipes]
        self.ranks = [
            context.Process(target=_serve, args=(rank, size, backend, pipe, self.folder.name), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for rank, (_, pipe) in zip(self.ranks, pipes):
            rank.start()
            pipe.close()

    def run(self, module: str, name: str, arguments: dict[str, Any], timeout: float = TIMEOUT) -> list[Any]:
        """What the function returns on each rank. Raises RankError, after which there is no world."""
        for pipe in self.pipes:
            pipe.send((module, name, arguments))
        answers = self._answers(time.monotonic() + timeout)
        failed = {rank: text for rank, (is_right, text) in answers.items() if not is_right}
        missing = [rank for rank in range(len(self.ranks)) if rank not in answers]
        if not failed and not missing:
            self._end_groups()
            return [answers[rank][1] for rank in range(len(self.ranks))]
        stacks = self._stacks(missing)
        kind = RankCrashed if self._has_crashed() else RankError
        self.kill()
        told = [f"rank {rank} of {len(self.ranks)}:\n{text}" for rank, text in {**failed, **stacks}.items()]
        raise kind("\n\n" + "\n\n".join(told))

    def _end_groups(self) -> None:
        """Has the ranks leave the groups that a test made: not before all are through, or one still in it loses it."""
        for pipe in self.pipes:
            pipe.send(None)

    def _answers(self, deadline: float) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                return answers
            for pipe in ready:
                rank = self.pipes.index(pipe)
                answers[rank] = _received(pipe)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            if self.ranks[rank].is_alive():
                os.kill(self.ranks[rank].pid, signal.SIGUSR1)
        time.sleep(0.5 if ranks else 0)
        return {rank: "no answer\n" + _stack_file(self.folder.name, rank).read_text() for rank in ranks}

    def _has_crashed(self) -> bool:
        for rank in self.ranks:
            rank.join(timeout=0.2)
        return any(rank.exitcode is not None and rank.exitcode < 0 for rank in self.ranks)

    def kill(self) -> None:
        """Ends all ranks."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()
        self.folder.cleanup()
        for kind in [kind for kind, world in _worlds.items() if world is self]:
            del _worlds[kind]


def fork_server() -> Any:
    """What ranks of a CPU are forked from. A process has one, with what whoever starts it lets it import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.layers.parallel.preloaded"])
    forkserver.ensure_running()
    return context


def world(size: int, backend: str = "gloo") -> World:
    """The ranks of this size, started when they are first asked for."""
    if (size, backend) not in _worlds:
        _worlds[size, backend] = World(size, backend)
    return _worlds[size, backend]


def end_worlds() -> None:
    """Ends what is running."""
    for each in list(_worlds.values()):
        each.kill()


atexit.register(end_worlds)


def run_on_ranks(size: int, *given: Any, backend: str = "gloo") -> list[Any]:
    """`World.run`, once more where a signal ended a rank: torch 2.13's gloo does that, and a second time it is us."""
    try:
        return world(size, backend).run(*given)
    except RankCrashed:
        return world(size, backend).run(*given)


def on_gpu_ranks(size: int, timeout: float = 2 * TIMEOUT):
    """Runs a test on every rank of a world in which each has a GPU, where there are so many."""

    def decorated(body):
        test = on_ranks(size, timeout=timeout, backend="nccl")(body)
        few = torch.cuda.device_count() < size
        return pytest.mark.gpu(pytest.mark.skipif(few, reason=f"needs {size} GPUs")(test))

    return decorated


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a call that every rank makes, and what it writes when replayed."""
    import torch.distributed as dist

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    return graph, out


def on_ranks(*sizes: int, timeout: float = TIMEOUT, backend: str = "gloo"):
    """Runs a test on every rank of a world, for each of these sizes. It may be parametrised, with what pickles."""

    def decorated(body):
        @functools.wraps(body)
        def test(world_size: int, **arguments: Any) -> None:
            given = body.__module__, body.__name__, arguments, timeout
            run_on_ranks(world_size, *given, backend=backend)

        parameters = inspect.signature(body).parameters.values()
        size = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([size, *parameters])
        return pytest.mark.parametrize("world_size", sizes)(test)

    return decorated


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return False, "the process ended"


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"stack{rank}")


def _serve(rank: int, size: int, backend: str, pipe: Connection, folder: str) -> None:
    import torch.distributed as dist

    with _stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder, "store")), size)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        device = torch.device("cuda", rank) if backend == "nccl" else None
        joined = {"store": store, "rank": rank, "world_size": size, "device_id": device}
        dist.init_process_group(backend, timeout=timedelta(seconds=60), **joined)
        while True:
            try:
                given = pipe.recv()
            except EOFError:
                os._exit(0)
            if given is None:
                _leave_other_groups()
            else:
                pipe.send(_outcome(*given))


def _leave_other_groups() -> None:
    """Ends what groups a test made. Every gloo group has threads that wake a hundred times a second until then."""
    import torch.distributed as dist
    from torch.distributed.tensor import _redistribute, debug

    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in groups:
        dist.destroy_process_group(group)
    if groups:  # DTensor keeps what it worked out for equal meshes, groups with it
        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        gc.collect()
        gc.freeze()  # what is left is torch's, and the next test's collection need not look at it


def _outcome(module: str, name: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
    try:
        torch.manual_seed(0)
        torch._dynamo.reset()
        function = getattr(importlib.import_module(module), name)
        return True, inspect.unwrap(function)(**arguments)
    except BaseException:
        return False, traceback.format_exc()
