"""A rank of `python -m benchmarks parallel` that is killed between two exchanges, and when the others end for it.

Processes of their own, since none of them comes back: NCCL's watchdog ends a process, our kernels end it with an error
of the device, gloo raises.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import ranks
from benchmarks.parallel_exchange import exchanges, there_and_back
from benchmarks.parallel_state import Row, State, routed, start, synchronize
from layers.parallel import ExpertRanks

TIMEOUT_S = 20  # of the group and of the exchange; the first collective has to come about within it, too
SLACK_S = 5  # by which an error may be later than that
_MOST_S = 120.0  # for a process to start, and to find others
_BEFORE, _TOKENS = 20, 32  # exchanges that all ranks take part in, and tokens of each


def killed(size: int, limit_s: float = TIMEOUT_S) -> list[Row]:
    """For each exchange: how long after the last rank's death the slowest of the others had ended with an error.

    Infinite if one went on or ended without an error.
    """
    names = ("allgather", "padded", "variable", *(("symmetric",) if torch.cuda.is_available() else ()))
    return [_killed_in(name, size, limit_s) for name in names]


def in_time(row: Row) -> bool:
    """Whether the others ended no later than they may."""
    return row["seconds"] <= row["timeout_s"] + SLACK_S


def _killed_in(name: str, size: int, limit_s: float) -> Row:
    context = ranks.process_context()
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, size, folder, name, limit_s) for rank in range(size)]
        processes = [context.Process(target=_serve, args=each, daemon=True) for each in given]
        for process in processes:
            process.start()
        *others, victim = processes
        victim.join(_MOST_S)
        since = time.monotonic()
        ends = [_seconds_until_end(process, since, limit_s + 2 * SLACK_S) for process in others]
        reached = Path(folder, "reached").exists()
        for process in processes:
            process.kill()
            process.join()
    died_there = reached and victim.exitcode == -signal.SIGKILL
    seconds = max(ends) if died_there else float("inf")
    row = {"dispatcher": name, "timeout_s": limit_s, "seconds": seconds, "others": len(others)}
    print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def _seconds_until_end(process: Any, since: float, most: float) -> float:
    """Infinite for one that did not end, or not with an error."""
    process.join(max(since + most - time.monotonic(), 0.0))
    return time.monotonic() - since if process.exitcode else float("inf")


def _serve(rank: int, size: int, folder: str, name: str, limit_s: float) -> None:
    # PyTorch ends a process only four times this long after it has seen the timeout: by default a minute.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500")
    ranks.join_group(rank, size, folder, limit_s)
    state = start(rank, size, {})
    once = _exchange(state, name, limit_s)
    for _ in range(_BEFORE):
        once()
    synchronize(state)
    if rank == size - 1:
        Path(folder, "reached").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        once()
        once()  # the first may have had all it needed
        synchronize(state)
    except BaseException as error:
        print(f"  rank {rank}: {type(error).__name__}: {str(error).splitlines()[0][:90]}", flush=True)
        os._exit(1)
    os._exit(0)


def _exchange(state: State, name: str, limit_s: float) -> Callable[[], object]:
    workload = state.scale.workload
    owners = ExpertRanks(workload.num_experts, state.size)
    sizes = _TOKENS, workload.hidden_size, workload.top_k
    each = exchanges(state, owners, *sizes, timeout=limit_s)[name]
    given = routed(state, _TOKENS, workload, 3)
    return lambda: there_and_back(each, given, workload.num_experts)
