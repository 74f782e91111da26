"""`python -m benchmarks tune` without a GPU: what it times, what it keeps, and when it writes nothing."""

import argparse
import math

import pytest
import torch

import moe_ops
from benchmarks import moe_bench, tune
from benchmarks.tune import Case, Gain
from benchmarks.workloads import WORKLOADS, Workload
from moe_ops.kernels.gemm_config import pick_config
from moe_ops.kernels.gpu import H200
from moe_ops.kernels.tuning import Tuning, nearest_rows
from moe_ops.product_timing import Timed

CASES = [Case(WORKLOADS["W2"], rows, False) for rows in (16, 64)]


def _arguments(*options):
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args(options)


def prefers(block_m):
    def timer(gemm, among):
        return [Timed(way, 50.0 if way.block_m == block_m else 100.0) for way in among]

    return timer


def test_layers_and_rows_asked_for(capsys):
    everything = tune.cases_of(_arguments())
    assert {case.workload for case in everything} == {*WORKLOADS.values()}
    assert {case.rows for case in everything} == {*tune.ROWS} and len(everything) == 30
    layer = Workload("12,3,64,32", 12, 3, 64, 32)
    assert tune.cases_of(_arguments("--sizes", "12,3,64,32", "--rows", "8", "--transposed")) == [
        Case(layer, 8, True)
    ]
    both = tune.cases_of(_arguments("--workloads", "W5", "--sizes", "12,3,64,32", "--rows", "8"))
    assert [case.workload.name for case in both] == ["W5", "12,3,64,32"]
    for options in (["--rows", "48"], ["--sizes", "8,2,64"], ["--sizes", "8,2,64,0"], ["--workloads", "W9"]):
        with pytest.raises(SystemExit):
            _arguments(*options)
    assert "'48': expected a power of two" in capsys.readouterr().err


@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_those_of_the_layers_plan(transposed):
    for name, rows in (("W2", 64), ("W5", 4)):
        workload = WORKLOADS[name]
        case = Case(workload, rows, transposed)
        up, down = case.products(H200)
        assert up.num_slots == case.tokens * workload.top_k == rows * workload.num_experts
        assert nearest_rows(up.rows_per_expert) == rows
        sizes = workload.num_experts, 2 * workload.intermediate_size, workload.hidden_size
        layout = "transposed" if transposed else "rows"
        assert up.product == (*sizes, "bfloat16", layout, True, True)
        assert down.product[1:3] == (workload.hidden_size, workload.intermediate_size)
    assert Case(Workload("few", 64, 2, 64, 64), 1, False).products(H200)
    assert (
        Case(Workload("one", 4, 4, 64, 64), 1, False).products(H200) == ()
    )  # one token: no product of many rows


def test_choices_that_beat_the_one_in_use(capsys):
    choices = tune.tune(CASES, H200, prefers(16))
    assert [(each.rows, each.product.gated, each.config.block_m) for each in choices] == [
        (16, True, 16),
        (16, False, 16),
    ]
    told = capsys.readouterr().out.splitlines()
    assert [line.partition("]")[2].split()[:3] for line in told] == [
        [f"{done}/4", "W2", side] for done, side in enumerate(("up", "down") * 2, 1)
    ]
    assert (
        told[0].startswith("[######......") and "100.0 us by 64x128x128 w4 s2 c2 -> 50.0 us by 16x" in told[0]
    )
    assert told[3].startswith("[########################]") and told[3].endswith(
        "100.0 us by 64x128x64 w4 s4 c2"
    )


def test_a_candidate_that_fails_is_dropped_with_a_line(capsys):
    def timer(gemm, among):
        first, second, *others = among
        return [
            Timed(first, 100.0),
            Timed(second, math.inf, "is wrong: nan"),
            *(Timed(way, 100.0) for way in others),
        ]

    assert not tune.tune(CASES[:1], H200, timer)
    assert capsys.readouterr().out.count("is wrong: nan") == 2


def test_a_wrong_choice_in_use_ends_it():
    def timer(gemm, among):
        return [Timed(among[0], math.inf, "is wrong: nan"), *(Timed(way, 1.0) for way in among[1:])]

    with pytest.raises(RuntimeError, match=r"the choice in use, .* is wrong: nan"):
        tune.tune(CASES, H200, timer)


def _table():
    return Tuning("NVIDIA H200", tuple(tune.tune(CASES, H200, prefers(128))))


def test_choices_are_kept_where_the_layer_is_faster():
    table = _table()
    assert [each.rows for each in table.choices] == [64, 64]
    both = [Gain(CASES[1], "uniform", 100.0, 101.0), Gain(CASES[1], "zipf", 100.0, 98.0)]
    assert tune.kept(CASES, H200, table, both) == table
    assert tune.kept(CASES, H200, table, [both[0], both[1]._replace(after=99.0)]).choices == ()
    text = tune.report(both)
    assert "W2 T=1024 zipf" in text and "geometric mean of 2: 1.005" in text


@pytest.mark.parametrize("error", [None, RuntimeError("the choice in use"), moe_bench.WrongResult("a layer")])
def test_what_is_written(monkeypatch, tmp_path, capsys, error):
    def made(cases, cell_ms):
        if error:
            raise error
        return table, []

    table, path = _table(), tmp_path / "new" / "tuning.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "machine", dict)
    monkeypatch.setattr(tune, "_made", made)
    status = tune.main(_arguments("--out", str(path)))
    told = capsys.readouterr().out
    monkeypatch.undo()
    assert (status, path.exists()) == ((1, False) if error else (0, True))
    assert f"nothing is written: {error}" in told if error else "2 choices" in told
    if not error:
        moe_ops.use_tuning(path)
        assert (
            pick_config(CASES[1].products(moe_ops.kernels.gpu.gpu_of(torch.device("meta")))[0]).block_m == 128
        )
        moe_ops.use_tuning(None)


def test_it_needs_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert tune.main(_arguments()) == 2 and "needs a CUDA GPU" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_small_table_on_a_gpu(tmp_path):
    path = tmp_path / "tuning.json"
    options = "--sizes", "16,4,512,256", "--rows", "4", "64", "--cell-ms", "5", "--out", str(path)
    assert tune.main(_arguments(*options)) == 0
    moe_ops.use_tuning(path)
    moe_ops.use_tuning(None)
