"""The ranks that other tests run on: what fails there fails here, and what hangs ends."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.layers.parallel.world import RankCrashed, RankError, on_ranks, world


@on_ranks(2, 4)
@pytest.mark.parametrize("start", [3, 5])
def test_every_rank_runs_the_test(start):
    total = torch.tensor([float(start)])
    dist.all_reduce(total)
    assert total == start * dist.get_world_size()


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def make_a_group() -> None:
    dist.new_group([0, 1])
    assert groups() == 2


def test_ranks_leave_the_groups_that_a_test_made():
    on_ranks(2)(make_a_group)(2)
    assert world(2).run(__name__, "groups", {}) == [1, 1]


def ask_in_a_group_that_rank_1_is_done_with() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        time.sleep(0.5)
        dist.irecv(torch.empty(1), src=1, group=group)


def test_no_rank_leaves_a_group_that_another_is_in():
    on_ranks(2)(ask_in_a_group_that_rank_1_is_done_with)(2)


def rank_of_process() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("of rank 1")
    dist.barrier()


def sleep_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)
    dist.barrier()


def crash(folder: Path, times: int) -> None:
    runs = folder / "runs"
    if dist.get_rank() == 1:
        number = int(runs.read_text()) if runs.exists() else 0
        runs.write_text(str(number + 1))
        if number < times:
            os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_a_crash_is_run_once_more(tmp_path):
    run = on_ranks(2)(crash)
    run(2, folder=tmp_path, times=1)
    assert (tmp_path / "runs").read_text() == "2"
    with pytest.raises(RankCrashed, match="rank 1 of 2:\nthe process ended"):
        run(2, folder=tmp_path, times=4)
    assert (tmp_path / "runs").read_text() == "4"


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def run(function, **options):
    return world(2).run(__name__, function.__name__, {}, **options)


def test_processes_serve_many_tests():
    first, second = run(rank_of_process), run(rank_of_process)
    assert first == second
    assert [rank for rank, _ in first] == [0, 1]


def test_the_error_of_a_rank_is_the_error():
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*fail_on_rank_1.*ZeroDivisionError: of rank 1"):
        run(fail_on_rank_1)
    run(rank_of_process)


def test_a_hang_ends_with_the_stacks_of_all_ranks():
    before = [pid for _, pid in run(rank_of_process)]
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2.*in sleep_on_rank_0.*rank 1 of 2.*in barrier"):
        run(sleep_on_rank_0, timeout=2)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_ends_is_named():
    with pytest.raises(RankError, match=r"rank 1 of 2:\nthe process ended"):
        run(die_on_rank_1)
