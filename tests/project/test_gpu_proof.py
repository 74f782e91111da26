"""What makes the proof on a GPU fail, shown without one: each step on something that is wrong."""

import argparse
import csv
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import demo, gpu_proof, moe_bench, peers
from benchmarks.capture import CaptureResult
from benchmarks.demo import Claim
from benchmarks.workloads import Cell, Workload, make_inputs, make_weights, reference

SMALL = Workload("small", num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)
CELL = Cell(SMALL, 4, "uniform")


def _arguments(folder: Path, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gpu_proof.add_arguments(parser)
    return parser.parse_args(["--results", str(folder), "--name", "proof", *given])


@pytest.fixture
def _on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_proof, "machine", lambda: {"commit": "none"})


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("failing", [*gpu_proof.STEPS, None])
def test_one_failed_step_fails_the_proof(failing, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_proof, "_run_step", lambda step, folder, arguments: step != failing)
    assert gpu_proof.main(_arguments(tmp_path)) == (failing is not None)
    assert (f"FAILED: {failing}" in capsys.readouterr().out) is (failing is not None)


@pytest.mark.parametrize(
    ("body", "passes"),
    [
        ("assert True", True),
        ("assert False", False),
        ("import pytest; pytest.skip('no GPU after all')", False),
        (None, False),
    ],
    ids=["passed", "failed", "all skipped", "none found"],
)
def test_tests_that_fail_or_do_not_run(body, passes, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "tests").mkdir()
    if body is not None:
        (tmp_path / "tests" / "test_one.py").write_text(f"def test_one():\n    {body}\n")
    monkeypatch.chdir(tmp_path)
    run = gpu_proof._run_logged
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    monkeypatch.setattr(gpu_proof, "_run_logged", lambda _, log: run(command, log))
    assert gpu_proof._run_step("tests", tmp_path, _arguments(tmp_path)) is passes


@pytest.mark.parametrize(("error", "passes"), [(1e-3, True), (2.0, False), (float("nan"), False)])
def test_a_wrong_replay(error: float, passes: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "benchmarks.capture.capture_and_replay", lambda tokens: CaptureResult(tokens, 1e-3, 1e-3, error)
    )
    assert gpu_proof._run_step("capture", tmp_path, _arguments(tmp_path)) is passes


@pytest.mark.parametrize("holds", [True, False])
def test_a_claim_of_the_demo_that_does_not_hold(holds: bool, tmp_path: Path, monkeypatch) -> None:
    for name, value in {
        "_fresh_compiler_cache": lambda: None,
        "_checkpoints": lambda model: [("tiny", tmp_path)],
        "run_demo": lambda name, path, steps: None,
        "check": lambda result: [Claim("tokens", "ours", holds, "")],
        "summary": lambda result, claims: "",
        "figures": lambda result, claims: {},
    }.items():
        monkeypatch.setattr(demo, name, value)
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert demo.main(parser.parse_args([])) == (not holds)


@pytest.fixture
def _bench_on_the_cpu(monkeypatch) -> None:
    weights = make_weights(SMALL, 0, "cpu")  # of which an L2 cache holds thousands
    monkeypatch.setattr(moe_bench, "make_inputs", lambda cell, device: make_inputs(cell, "cpu"))
    monkeypatch.setattr(moe_bench, "make_weights", lambda workload, seed, device: weights)
    monkeypatch.setattr(moe_bench, "capture", lambda calls: calls)
    monkeypatch.setattr(moe_bench, "time_in_turns", lambda replays, milliseconds: [1.0] * len(replays))


@pytest.mark.usefixtures("_bench_on_the_cpu")
@pytest.mark.parametrize(("factor", "wrong"), [(1, 0), (3, 1)])
def test_a_threefold_product_is_told_and_not_timed(
    factor, wrong, tmp_path: Path, monkeypatch, capsys
) -> None:
    def ours(inputs, weights, top_k):
        return factor * reference(inputs, weights, top_k)

    monkeypatch.setattr(moe_bench, "IMPLEMENTATIONS", {"fused_moe": ours, "gmm_compile": reference})
    out = tmp_path / "moe.csv"
    assert moe_bench.run([CELL], ["fused_moe", "gmm_compile"], out, 1e9, 1.0) == wrong
    timed = [row["impl"] for row in csv.DictReader(out.open())]
    assert ("fused_moe" in timed) is (wrong == 0) and "gmm_compile" in timed
    assert ("FAILED small T=4 uniform fused_moe: WrongResult" in capsys.readouterr().out) is (wrong == 1)


def _row(tokens: int, impl: str, us: float) -> dict[str, object]:
    known = {"workload": "W1", "T": tokens, "routing": "uniform", "impl": impl, "us": us, "kind": "ours"}
    return {**dict.fromkeys(peers.COLUMNS, ""), **known}


@pytest.mark.parametrize(
    ("rows", "passes"),
    [
        ([_row(1, "fused_moe", 1.0), _row(2, "fused_moe", 1.0)], True),
        ([_row(1, "fused_moe", 1.0), _row(2, "fused_moe", 1e9)], False),
        ([_row(1, "fused_moe", 1.0)], False),
        ([], False),
    ],
    ids=["won", "one lost", "one not measured", "ours not measured"],
)
def test_cells_that_are_not_won(rows, passes, tmp_path: Path, monkeypatch) -> None:
    def run(command, log) -> bool:
        with (tmp_path / "moe.csv").open("w", newline="") as lines:
            writer = csv.DictWriter(lines, peers.COLUMNS)
            writer.writeheader()
            writer.writerows([*rows, *(_row(tokens, "gmm_compile", 2.0) for tokens in (1, 2))])
        return True

    monkeypatch.setattr(gpu_proof, "_run_logged", run)
    arguments = _arguments(tmp_path, "--workloads", "W1", "--ts", "1,2")
    assert gpu_proof._run_step("moe", tmp_path, arguments) is passes


def test_a_command_that_fails_is_seen_and_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert not gpu_proof._run_logged([sys.executable, "-c", "print('told'); raise SystemExit(3)"], log)
    assert log.read_text() == "told\n"
