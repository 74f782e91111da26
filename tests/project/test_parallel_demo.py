"""The demo on several ranks: what it generates, counts, shows and claims."""

import argparse
import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import parallel_demo
from benchmarks.checkpoints import write_small_checkpoint
from benchmarks.generation import Agreement
from benchmarks.parallel_demo import Outcome, Run
from benchmarks.wire import Wire
from layers.parallel import Group
from layers.parallel.collectives import (
    start_all_gather,
    start_all_gathers,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from tests.layers.parallel.world import on_ranks, run_on_ranks

WAYS = ["TP, all-reduce", "EP, all-reduce", "EP, all-gather", "EP, all-to-all"]
MOVING = ["EP, experts moving", "EP, rebalanced"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_small_checkpoint("qwen3_moe", tmp_path_factory.mktemp("checkpoints"))


def run_on_this_rank(path: str) -> int:
    return parallel_demo.main(argparse.Namespace(model=Path(path), steps=3))


def run_demo(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with torch.no_grad():
        outcome = parallel_demo.run_demo(Path(path), mesh, steps=3)
    assert list(outcome.runs) == WAYS + MOVING
    assert all(holds for _, holds in parallel_demo.claims(outcome)), parallel_demo.summary(outcome)
    for way, runs in outcome.runs.items():
        assert len(runs) == 2 and all(run.way == way for run in runs)
        assert all(run.agreement.same and run.agreement.compared == 3 for run in runs)
        assert all(run.sent > 0 and run.seconds > 0 for run in runs)
    slots = 2 * 2 * (24 + 2) * 4  # ranks, sequences, tokens that are read, experts of each
    assert outcome.before.sum(1).tolist() == outcome.after.sum(1).tolist() == [slots, slots]


def test_every_way_generates_the_tokens_of_one_process(checkpoint: Path) -> None:
    run_on_ranks(2, __name__, "run_demo", {"path": str(checkpoint)})
    assert run_on_ranks(2, __name__, "run_on_this_rank", {"path": str(checkpoint)}) == [0, 0]


@on_ranks(4)
def test_bytes_that_are_sent() -> None:
    """[12, 2] float32, 96 bytes; all-to-all: one row to oneself, three to one other."""
    group, x = Group.of(dist.group.WORLD), torch.randn(12, 2)
    splits = [0, 0, 0, 0]
    splits[group.rank], splits[group.rank ^ 1] = 9, 3
    for start, expected in (
        (lambda: start_all_gather(x, group), 3 * 96),
        (lambda: start_all_gathers([x, x[:, 0].half()], group)[0], 3 * (96 + 24)),
        (lambda: start_reduce_scatter(x, group), 72),
        (lambda: start_all_reduce(x, group), 144),
        (lambda: start_all_to_all(x, splits, splits, group), 24),
    ):
        with Wire(group.rank, group.size) as wire:
            start()()
        assert (wire.sent, wire.calls) == (expected, 1) and wire.seconds > 0


def outcome(same: bool = True, after: tuple[int, int] = (5, 5)) -> Outcome:
    runs = [
        Run("EP", Agreement(each, 3, 3), 2e6 * (rank + 1), 0.003) for rank, each in enumerate((True, same))
    ]
    return Outcome({"EP": runs}, torch.tensor([[8, 2]]), torch.tensor([after]), steps=3)


def failed(seen: Outcome) -> list[str]:
    return [claim for claim, holds in parallel_demo.claims(seen) if not holds]


def test_claims_hold_only_when_they_do() -> None:
    assert failed(outcome()) == []
    assert failed(outcome(same=False)) == ["EP: the tokens of one process"]
    assert failed(outcome(after=(8, 2))) == ["rebalanced ranks have more even loads"]


def test_the_tables() -> None:
    text = parallel_demo.summary(dataclasses.replace(outcome(same=False)))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[2].split() == ["EP", "3", "of", "3", "FAILED", "4.00", "1.00"]
    rows = [line.split() for line in lines if line.startswith("layer")]
    assert rows == [["layer", "0", "before", "8", "2", "1.60"], ["layer", "0", "after", "5", "5", "1.00"]]
    assert lines[-1] == "FAILED: EP: the tokens of one process"


def test_one_process_alone_is_told_how_to_start_more(capsys, tmp_path) -> None:
    assert parallel_demo.main(argparse.Namespace(model=tmp_path, steps=3)) == 2
    assert "make demo-parallel" in capsys.readouterr().out


def test_the_exit_status_says_whether_claims_hold(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(parallel_demo, "_joined", lambda: contextlib.nullcontext("cpu"))
    monkeypatch.setattr(parallel_demo, "init_device_mesh", lambda *_, **__: {"ep": None})
    monkeypatch.setattr(parallel_demo, "_checkpoint", lambda model: model)
    monkeypatch.setattr(parallel_demo.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel_demo.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(parallel_demo.dist, "get_rank", lambda: 1)
    for seen, status in ((outcome(), 0), (outcome(same=False), 1)):
        monkeypatch.setattr(parallel_demo, "run_demo", lambda *_, seen=seen: seen)
        assert parallel_demo.main(argparse.Namespace(model=tmp_path, steps=3)) == status
