"""`python -m benchmarks parallel` in its smallest form: two processes of a CPU, and what a failure costs."""

import argparse
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import parallel_bench, parallel_killed, parallel_state, ranks
from benchmarks.ranks import Job, run_parts
from tests.layers.parallel.world import fork_server


@pytest.fixture(autouse=True, scope="module")
def ranks_of_other_tests_start_as_fast():
    """The server that ranks are forked from is one for all, and the benchmark's has not imported the compiler."""
    fork_server()


def arguments(*given):
    parser = argparse.ArgumentParser()
    parallel_bench.add_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_parts_on_a_cpu(tmp_path, capfd, monkeypatch):
    """Ranks that are spawned, as where there are GPUs: forked ones print to where their server does."""
    monkeypatch.setattr(ranks, "process_context", lambda: multiprocessing.get_context("spawn"))
    out = tmp_path / "parallel.json"
    out.write_text(json.dumps({"layer": [{"way": "of another run"}]}))
    given = "--only", "problems,backward,exchange,quantised,rebalancing", "--problems", "3", "--out", str(out)
    assert parallel_bench.main(arguments(*given)) == 0
    found = json.loads(out.read_text())
    assert found["layer"] == [{"way": "of another run"}] and found["machine"]["ranks"] == 2
    assert found["problems"]["problems"] == 3
    assert [found["problems"][f"{name} wrong"] for name in ("allgather", "padded", "variable")] == [0, 0, 0]
    assert len(found["backward"]) == len(found["exchange"]) == 3
    assert [row["tokens_per_rank"] for row in found["quantised"]] == [2, 8] * 3
    (moved,) = found["rebalancing"]
    assert 1 <= moved["busiest_after"] < moved["busiest"]
    told = capfd.readouterr().out
    assert "dispatcher padded" in told and "of another run" in told


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_ranks_end_behind_one_that_is_killed(tmp_path):
    out = tmp_path / "parallel.json"
    assert parallel_bench.main(arguments("--only", "killed", "--ranks", "3", "--out", str(out))) == 0
    rows = json.loads(out.read_text())["killed"]
    assert [row["dispatcher"] for row in rows] == ["allgather", "padded", "variable"]
    assert all(row["others"] == 2 and row["seconds"] < 25 for row in rows)


@pytest.mark.parametrize(("seconds", "status"), [(25.0, 0), (25.1, 1), (float("inf"), 1)])
def test_a_rank_that_goes_on_behind_a_death_is_a_failure(seconds, status, tmp_path, monkeypatch):
    row = {"dispatcher": "allgather", "timeout_s": 20, "seconds": seconds, "others": 1}
    monkeypatch.setattr(parallel_bench, "killed", lambda size: [row])
    assert parallel_bench.main(arguments("--only", "killed", "--out", str(tmp_path / "out"))) == status


@pytest.mark.slow
@pytest.mark.parametrize("serve", ["_nobody_dies", "_one_goes_on"])
def test_a_rank_that_ends_without_an_error_has_not_noticed(serve, monkeypatch):
    monkeypatch.setattr(parallel_killed, "_serve", globals()[serve])
    row = parallel_killed._killed_in("padded", 3, 0.1)
    assert row["seconds"] == float("inf")


def _nobody_dies(rank, *_):
    sys.exit(1)


def _one_goes_on(rank, size, folder, *_):
    if rank == size - 1:
        Path(folder, "reached").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(rank)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_ways_of_a_layer_are_as_fast_as_their_times_say(tmp_path):
    out = tmp_path / "parallel.json"
    assert parallel_bench.main(arguments("--only", "layer", "--out", str(out))) == 0
    whole, *ways = json.loads(out.read_text())["layer"]
    assert whole["way"] == "one rank" and "speedup" not in whole and len(ways) == 2
    for way in ways:
        assert way["speedup"] == pytest.approx(whole["us"] / way["us"])
        assert way["captured_speedup"] == pytest.approx(whole["captured_us"] / way["captured_us"])


@pytest.mark.parametrize("waits", [(), (20.0,)])
def test_how_long_a_rank_waits_for_another(waits, tmp_path, monkeypatch):
    told = {}
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda backend, **options: told.update(options))
    monkeypatch.setattr(ranks.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: False)
    ranks.join_group(0, 1, str(tmp_path), *waits)
    assert told["timeout"].total_seconds() == (waits or (ranks.WAIT_S,))[0]


def test_a_part_that_there_is_not(tmp_path, capsys):
    assert parallel_bench.main(arguments("--only", "nothing", "--out", str(tmp_path / "out"))) == 2
    assert "expected names from exchange" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_a_part_that_fails_loses_no_other(monkeypatch):
    monkeypatch.setattr(ranks, "_GRACE_S", 0.5)
    told = {}
    job = Job("tests.project.failing_parts", ("first", "broken", "last"), {}, 60.0)
    assert run_parts(job, 2, told.__setitem__) == ["broken"]
    assert told == {"first": 3.0, "last": 3.0}


@pytest.mark.parametrize("measure", [parallel_state.in_graph_us, parallel_state.eager_us])
def test_times_are_of_one_call(measure, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(parallel_state.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(parallel_state, "synchronize", lambda _: None)
    monkeypatch.setattr(parallel_state, "slowest", lambda _, value: value)
    state = SimpleNamespace(has_gpu=False, scale=SimpleNamespace(rounds=3, calls=4))
    took = measure(state, lambda: now.__setitem__(0, now[0] + 5e-6))
    assert took == pytest.approx(5)
