"""The benchmark harness itself: what it compares with, what it refuses to time, and the demo's verdicts."""

import argparse
import json
import subprocess

import pytest
import torch

from benchmarks import (
    cpu_bench,
    host_bench,
    invariance_bench,
    kernels_bench,
    loading,
    moe_bench,
    options_bench,
    peers,
    quantised_bench,
    training_bench,
)
from benchmarks.implementations import gmm
from benchmarks.speeds import Speed
from benchmarks.workloads import (
    TOKEN_COUNTS,
    WORKLOADS,
    Cell,
    Load,
    Workload,
    cells_of,
    make_inputs,
    make_weights,
    reference,
    roofline,
)

SMALL = Workload("small", num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)


def test_recorded_baseline_covers_25_of_the_45_cells() -> None:
    recorded = peers.times_of(peers.read_rows([peers.RECORDED]), peers.BASELINE)
    assert len(peers.all_keys()) == 45
    assert len(recorded) == 25
    assert set(recorded) <= set(peers.all_keys())


def test_rooflines_agree_with_the_recorded_ones() -> None:
    for row in peers.read_rows([peers.RECORDED]):
        cell = Cell(WORKLOADS[row["workload"]], int(row["T"]), row["routing"])
        roof = roofline(cell, Load(float(row["distinct_experts"]), int(row["max_load"])))
        assert roof.us == pytest.approx(float(row["roof_us"]), rel=5e-3)


def test_floors_means_and_those_behind(tmp_path) -> None:
    """An expert of W2 has 4.7 M weights: 8 of them are read in 16.4 us, 32768 rows multiplied in 441.7 us."""
    first = {"workload": "W2", "T": "1", "routing": "uniform", "impl": "fused_moe", "us": "32.9"}
    first |= {"k": "8", "H": "2048", "I": "768"}
    rows = [{**first, "distinct_experts": "8.0"}]
    rows.append({**rows[0], "T": "4096", "us": "530.0", "distinct_experts": "128.0"})
    rows.append({**rows[1], "impl": peers.BASELINE, "us": "477.0"})
    one, many = kernels_bench.compare(rows)
    assert (one.ours, many.peer) == (32.9, 477.0)
    assert one.floor == pytest.approx(16.447, rel=1e-3) and many.floor == pytest.approx(441.7, rel=1e-3)
    slow_one, slow_many = kernels_bench.compare(rows, Speed(4.59e12 / 2, 350e12))
    assert slow_one.floor == pytest.approx(2 * one.floor) and slow_many.floor == pytest.approx(2 * many.floor)
    assert one.peer is not None and slow_one.peer is None  # what was recorded is an H200's
    text = kernels_bench.report([one, many])
    assert "geometric means: 1.549 x the floor" in text
    assert "of 2 cells 1 above 1.30 x the floor, 1 more than 1 % behind a peer" in text
    drawn = kernels_bench.draw([one, many], tmp_path / "plot.png")
    assert drawn == (tmp_path / "plot.png").exists()


def test_a_floor_of_ones_own(tmp_path, capsys) -> None:
    """Of figures that were taken before; one token of W2 reads 75.5 MB."""
    row = dict.fromkeys(peers.COLUMNS, "") | {
        "workload": "W2",
        "T": "1",
        "routing": "uniform",
        "impl": "fused_moe",
        "k": "8",
        "H": "2048",
        "I": "768",
    }
    table = tmp_path / "moe.csv"
    table.write_text(
        f"{','.join(row)}\n{','.join((row | {'us': '50.0', 'distinct_experts': '8.0'}).values())}\n"
    )
    parser = argparse.ArgumentParser()
    kernels_bench.add_arguments(parser)
    given = ["--draw", str(table), "--speed", "3.0", "600", "--png", str(tmp_path / "plot.png")]
    assert kernels_bench.main(parser.parse_args(given)) == 0
    printed = capsys.readouterr().out
    assert "floor at 3.00 TB/s read, 600 TFLOP/s" in printed
    assert printed.splitlines()[5].split()[3:] == ["50.0", "-", "25.2", "1.99", "-"]


def test_layers_of_ones_own() -> None:
    """By their sizes, instead of the five or behind them, and in what is told of them."""
    parser = argparse.ArgumentParser()
    kernels_bench.add_arguments(parser)
    one, *others = moe_bench.chosen_cells(parser.parse_args(["--sizes", "12,3,64,32", "--ts", "1,4096"]))
    own = Workload("12,3,64,32", 12, 3, 64, 32)
    assert [one, *others] == [Cell(own, 1, "uniform"), Cell(own, 4096, "uniform"), Cell(own, 4096, "zipf")]
    given = ["--workloads", "W5", "--sizes", "12,3,64,32", "--ts", "1"]
    both = moe_bench.chosen_cells(parser.parse_args(given))
    assert [cell.workload for cell in both] == [WORKLOADS["W5"], own]
    row = {
        name: str(value)
        for name, value in moe_bench._row(one, make_inputs(one, "cpu"), "fused_moe", 4.0).items()
    }
    (standing,) = kernels_bench.compare([row])
    assert (standing.key, standing.ours, standing.peer) == (("12,3,64,32", 1, "uniform"), 4.0, None)
    assert standing.floor == pytest.approx(3 * 3 * 64 * 32 * 2 / 4.59e6, rel=1e-3)
    text, _ = peers.verdict([row, {**row, "impl": peers.BASELINE, "us": "6.0"}])
    assert "12,3,64,32 T=1 uniform" in text and "1.50" in text


def test_comparison_takes_the_faster_baseline_and_counts_wins() -> None:
    ours = {"workload": "W1", "T": "4", "routing": "uniform", "impl": "fused_moe", "us": "500.0"}
    beside = {**ours, "impl": "gmm_compile", "us": "900.0"}
    elsewhere = [{**ours, "T": "1"}, {**beside, "T": "1", "us": "400.0"}]
    won, lost = peers.compare([ours, beside, *elsewhere])
    assert (won.recorded, won.beside) == (788.95, 900.0) and won.ratio == 788.95 / 500
    assert (lost.recorded, lost.beside) == (None, 400.0) and lost.ratio < 1
    text, won_all = peers.verdict([ours, beside, *elsewhere])
    assert "in 1 of 2 measured cells (45 in all)" in text
    assert not won_all


def test_cells_add_zipf_at_4096_only() -> None:
    assert [cell.routing for cell in cells_of(SMALL, (1, 4096))] == ["uniform", "uniform", "zipf"]
    assert [cell.routing for cell in cells_of(SMALL, (1,))] == ["uniform"]
    assert len(TOKEN_COUNTS) == 8


@pytest.mark.parametrize("routing", ["uniform", "zipf", "balanced"])
@pytest.mark.parametrize("name", ["gmm", "fused_moe"])
def test_what_is_timed_passes_the_gate(name: str, routing: str) -> None:
    import moe_ops

    inputs, weights = make_inputs(Cell(SMALL, 16, routing), "cpu")[0], make_weights(SMALL, 1, "cpu")

    def fused(one, copy, top_k):
        config = moe_ops.RoutingConfig(top_k=top_k)
        return moe_ops.fused_moe(one.hidden_states, one.router_logits, copy.w13, copy.w2, config)

    def grouped(one, copy, top_k):
        return gmm(one.hidden_states, one.router_logits, copy.w13, copy.w2, top_k)

    implementation = {"gmm": grouped, "fused_moe": fused}[name]
    assert moe_bench.check(implementation, inputs, weights, 2) < moe_bench.MAX_RELATIVE_ERROR


def test_a_wrong_implementation_is_not_timed() -> None:
    inputs, weights = make_inputs(Cell(SMALL, 4, "uniform"), "cpu")[0], make_weights(SMALL, 1, "cpu")
    for wrong in (
        lambda one, copy, top_k: reference(one, copy, top_k) * 1.02,
        lambda one, copy, top_k: torch.full_like(one.hidden_states, float("nan")),
    ):
        with pytest.raises(moe_bench.WrongResult, match="expected at most"):
            moe_bench.check(wrong, inputs, weights, 2)


def test_loading_is_compared_with_reading(monkeypatch, capsys) -> None:
    for name, size in (("HIDDEN", 16), ("INTERMEDIATE", 8), ("EXPERTS", 8)):
        monkeypatch.setattr(loading, name, size)
    threads = torch.get_num_threads()
    try:
        assert loading.main(argparse.Namespace(layers=2, rounds=1)) in (0, 1)
    finally:
        torch.set_num_threads(threads)
    assert "load / read" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [1.02, 3.0, float("nan")])
def test_a_wrong_option_is_not_timed(factor: float) -> None:
    expected = torch.randn(8, 16)
    options_bench._expect_close(expected * 1.001, expected)
    with pytest.raises(ValueError, match="relative error"):
        options_bench._expect_close(expected * factor, expected)


@torch.no_grad()
def test_the_gates_that_are_timed_are_inlined_and_right() -> None:
    weights, hidden = make_weights(SMALL, 0, "cpu"), torch.randn(24, 64).bfloat16()
    inputs = options_bench.Inputs(hidden, torch.randn(24, 8))
    layers = {name: options_bench.gate_layer(gate, weights, 2) for name, gate in options_bench.GATES.items()}
    expected = layers["silu by name"](hidden, inputs.router_logits)
    for name in ("swiglu", "scale per expert"):
        options_bench._expect_close(layers[name](hidden, inputs.router_logits), expected)
    options_bench._inlined(layers["clamped"], inputs)
    options_bench.GATES["of a row"] = lambda gate, up: gate.softmax(-1) * up
    with pytest.raises(ValueError, match="the gate is not inlined"):
        options_bench._inlined(
            options_bench.gate_layer(options_bench.GATES.pop("of a row"), weights, 2), inputs
        )


@torch.no_grad()
def test_the_pairs_that_are_timed_are_one_layer() -> None:
    weights, hidden = make_weights(SMALL, 0, "cpu"), torch.randn(24, 64).bfloat16()
    inputs = options_bench.Inputs(hidden, torch.randn(24, 8))
    layers = options_bench.pair_layers(weights, 2)
    expected = layers.pop("packed")(hidden, inputs.router_logits)
    for layer in layers.values():
        options_bench._expect_close(layer(hidden, inputs.router_logits), expected)
    options_bench._inlined(layers["raised"], inputs)


TINY = cpu_bench.Layer(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)


def test_the_cpu_bench_times_every_way_once_for_each_load() -> None:
    alone, beside = cpu_bench.measure("float32", 3, ["idle", "loaded"], 0.01, TINY)
    assert (alone.load, beside.load) == cpu_bench.LOADS
    for result in (alone, beside):
        assert set(result.ms) == {*cpu_bench.EAGER, *cpu_bench.COMPILED}
        assert all(ms > 0 for ms in result.ms.values())
        for ways in cpu_bench.CAPTIONS:
            assert len(result.row(ways)) == len(cpu_bench.header(ways))


def test_a_wrong_cpu_way_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(experts, hidden, topk_ids, topk_weights):
        return {"ours": lambda: experts(hidden, topk_ids, topk_weights) * 1.001}

    monkeypatch.setattr(cpu_bench, "ways", wrong)
    monkeypatch.setattr(cpu_bench, "_time_in_turns", lambda *_: pytest.fail("timed"))
    with pytest.raises(AssertionError, match=r"ours, float32, T=3: relative error 1\.0e-03"):
        cpu_bench.measure("float32", 3, ["idle"], 0.01, TINY)


def test_the_cpu_bench_compares_with_the_best_of_the_others() -> None:
    ms = dict(zip((*cpu_bench.EAGER, *cpu_bench.COMPILED), (9.0, 4.0, 2.0, 3.0, 6.0, 4.0), strict=True))
    result = cpu_bench.CpuResult(1, "idle", "float32", 16, ms)
    assert result.speedup(cpu_bench.EAGER) == 2.0 and result.speedup(cpu_bench.COMPILED) == 0.75


def test_the_tables_of_the_cpu_bench_are_those_of_what_it_wrote(monkeypatch, tmp_path, capsys) -> None:
    ms = dict(zip((*cpu_bench.EAGER, *cpu_bench.COMPILED), (9.0, 4.0, 2.0, 3.0, 6.0, 1.5), strict=True))

    def measure(dtype, tokens, loads, seconds):
        return [cpu_bench.CpuResult(torch.get_num_threads(), load, dtype, tokens, ms) for load in loads]

    monkeypatch.setattr(cpu_bench, "measure", measure)
    parser, file = argparse.ArgumentParser(), tmp_path / "cpu.json"
    cpu_bench.add_arguments(parser)
    given = ["--json", str(file), "--ts", "1,16", "--threads", str(torch.get_num_threads())]
    assert cpu_bench.main(parser.parse_args(given)) == 0
    results = cpu_bench.read_results(file)
    assert len(results) == 2 * 2 * 2 and {result.load for result in results} == set(cpu_bench.LOADS)
    text = cpu_bench.tables(results)
    assert text in capsys.readouterr().out and max(map(len, text.splitlines())) <= 120
    rows = [line.split() for line in text.splitlines() if line.startswith("float32")]
    assert rows[0][4:] == ["9.000", "4.000", "2.000", "2.00"] and rows[4][4:] == [
        "3.000",
        "6.000",
        "1.500",
        "2.00",
    ]


def test_the_other_process_is_there_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(ValueError, match="load 'half': expected one of idle, loaded"):
        cpu_bench.other_process("half").__enter__()
    with cpu_bench.other_process("idle"):
        assert not started
    with cpu_bench.other_process("loaded"):
        assert started[0].poll() is None
    assert started[0].returncode is not None


def test_training_times_no_layer_whose_gradients_are_wrong(monkeypatch, capsys) -> None:
    def right(*args):
        return gmm(*args, SMALL.top_k)

    ways = {"right": right, "wrong": lambda hidden, *rest: right(hidden, *rest) + hidden}
    monkeypatch.setattr(training_bench, "ways", lambda top_k: ways)
    cell = Cell(training_bench.SMALL, 16, "uniform")
    assert training_bench.measure(cell, "cpu", 1.0) == 1
    told = capsys.readouterr().out
    assert "WRONG small wrong" in told and "small T=16 right" in told and "T=16 wrong" not in told


def test_training_counts_what_is_kept_beside_weights() -> None:
    hidden, weight = (
        torch.randn(4, 8),
        torch.randn(8, 8),
    )  # as `measure` has them: steps make their own leaves
    args = [hidden, torch.zeros(4, 2), weight, weight]
    assert training_bench.kept_bytes(lambda x, _, w, __: (x @ w).sin(), args) == 2 * 4 * 8 * 4


def test_invariance_is_checked_before_it_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(invariance_bench, "CPU_TOKENS", (1, 5))
    monkeypatch.setattr(invariance_bench, "CPU_LAYER", invariance_bench.Workload("tiny", 4, 2, 24, 20))
    out = tmp_path / "invariance.json"
    assert invariance_bench.main(argparse.Namespace(device="cpu", out=out)) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["what"], row["tokens"]) for row in rows] == [
        ("layer", 1),
        ("layer", 5),
        ("product", 1),
        ("product", 5),
    ]
    assert all(row["ratio"] == row["invariant"] / row["usual"] > 0 for row in rows)
    rows_of_the_batch = lambda tokens, emit: torch.arange(1.0, tokens + 1) + tokens * 1e-4  # noqa: E731
    with pytest.raises(ValueError, match="rows of 1 tokens differ from those of 5: expected equal bits"):
        invariance_bench._expect_invariance(rows_of_the_batch, (1, 5))
    with pytest.raises(ValueError, match="relative error"):
        invariance_bench._expect_invariance(lambda tokens, emit: torch.ones(tokens) * len(emit), (1, 5))


def test_quantised_layers_are_compared_before_they_are_timed():
    workload = quantised_bench.Workload("tiny", 4, 2, 256, 160)
    layers = quantised_bench.layers_of(workload, "cpu")
    assert list(layers) == ["bfloat16", *quantised_bench.WAYS]
    for at in quantised_bench.inputs_of(quantised_bench.Cell(workload, 33, "uniform"), "cpu"):
        errors = quantised_bench.errors_of(layers, at)
        assert len(errors) == len(quantised_bench.WAYS) and min(errors) > 1e-4
    with pytest.raises(ValueError, match=r"int8 rows: relative error 1.000: expected at most 0.04"):
        quantised_bench.errors_of({**layers, "int8 rows": lambda _: torch.zeros(33, 256)}, at)


def test_host_times_are_taken_in_turns_from_an_idle_device() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = host_bench.host_us(calls, lambda: order.append("wait"), rounds=2)
    batch = host_bench._BATCH
    turn = ["wait", *["a"] * batch, "wait", *["b"] * batch]
    assert order[2 * host_bench._WARM :] == [*turn, *turn, "wait"]
    assert all(0 < least <= median for median, least in times.values())


def test_a_goal_of_host_time_is_met_by_the_median() -> None:
    met = host_bench.Figure("operators", "fused_moe T=1", 60.0, 50.0, 60.0)
    missed = host_bench.Figure("qwen3_moe", "patched", 100.1, 90.0, 100.0)
    free = host_bench.Figure("qwen3_moe", "stock grouped_mm", 900.0, 800.0, None)
    lines = host_bench.summary([met, missed, free]).splitlines()[2:]
    assert [line.split()[-1] for line in lines] == ["met", "missed", "800.0"]
