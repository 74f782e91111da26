"""What the documents claim of speed is what the recorded results say."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks import (
    compile_bench,
    cpu_bench,
    demo,
    kernels_bench,
    parallel_bench,
    parallel_killed,
    peers,
    serving_bench,
    stock_bench,
)
from benchmarks.report import table
from benchmarks.speeds import Speed

ROOT = Path(__file__).parents[2]
H200 = ROOT / "benchmarks" / "results" / "h200-2026-11-21"
SERVED = ROOT / "benchmarks" / "results" / "h200-2026-11-23"
STOCK = ROOT / "benchmarks" / "results" / "h200-2026-11-26" / "stock.json"
RESULTS = ROOT / "benchmarks" / "results"
OPTIONS = ROOT / "benchmarks" / "results" / "h200-2026-11-22" / "options.json"
RECORDED = sorted((ROOT / "benchmarks" / "results").glob("cpu-*/*.json"))
"""Of `python -m benchmarks cpu --json .../cpu.json` and `python -m benchmarks demo --json .../demo.json`."""
PAGE = (ROOT / "docs" / "PERFORMANCE.md").read_text()


def test_the_page_shows_the_recorded_comparison() -> None:
    text, won_all = peers.verdict(peers.read_rows([H200 / "moe.csv"]))
    assert won_all
    assert text in PAGE


def test_the_page_shows_columns_that_lie_together_beside_rows() -> None:
    impls = ("fused_moe", "fused_moe_transposed", "fused_moe_as_gpt_oss", "gmm_compile_transposed")
    with (H200.parent / "h200-2026-11-26" / "transposed-few.csv").open() as recorded:
        times = {
            (row["workload"], row["T"], row["impl"]): float(row["us"]) for row in csv.DictReader(recorded)
        }
    lines = []
    for workload, tokens in sorted({key[:2] for key in times}):
        rows, halves, turns, theirs = (times[workload, tokens, impl] for impl in impls)
        over = (f"{each:.1f} {round(100 * (each / rows - 1))} %" for each in (halves, turns))
        lines.append(f"{workload} T={tokens} {rows:.1f} {' '.join(over)} {theirs / halves:.2f}")
    assert len(lines) == 20
    assert set(lines) <= {" ".join(line.split()) for line in PAGE.splitlines()}


def test_the_page_shows_other_layers() -> None:
    standings = kernels_bench.compare(peers.read_rows([H200.parent / "h200-2026-11-26" / "other-shapes.csv"]))
    layers: dict[str, list[str]] = {}
    for each in standings:
        assert each.peer is not None
        seen = f"{each.ours:.1f} ({each.ours / each.floor:.2f}, {each.peer / each.ours:.2f})"
        layers.setdefault(each.key[0], []).append(seen)
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert len(layers) == 14
    for layer, cells in layers.items():
        experts, *sizes = layer.replace(",", " x ", 1).rsplit(",", 2)
        start, end = f"| {', '.join((experts, *sizes))} (", f") | {' | '.join(cells)} |"
        assert any(line.startswith(start) and line.endswith(end) for line in lines), layer


def test_the_page_shows_which_cells_of_an_h100_are_far_from_its_floor() -> None:
    rows = peers.read_rows([H200.parent / "h100-2026-11-25" / "moe.csv"])
    standings = kernels_bench.compare(rows, Speed(3.10e12, 670e12))
    ratios = [each.peer / each.ours for each in standings if each.peer is not None]
    assert len(ratios) == 45 and f"takes {min(ratios):.2f} to {max(ratios):.2f} times ours" in PAGE
    far = [each for each in standings if each.ours > kernels_bench.FARTHEST * each.floor]
    lines = [
        (
            f"{each.key[0]} T={each.key[1]} {each.key[2]}",
            *(f"{us:.1f}" for us in (each.ours, each.peer or 0.0, each.floor)),
            f"{each.ours / each.floor:.2f}",
        )
        for each in far
    ]
    header = ("cell", "ours us", "grouped_mm us", "floor us", "ours / floor")
    assert table(header, lines) in PAGE


@pytest.mark.parametrize("path", [path for path in RECORDED if path.stem == "cpu"], ids=str)
def test_the_page_shows_what_the_cpu_bench_recorded(path: Path) -> None:
    results = cpu_bench.read_results(path)
    assert cpu_bench.tables(results) in PAGE
    assert all(result.speedup(cpu_bench.COMPILED) >= 1 for result in results)


@pytest.mark.parametrize("path", [path for path in RECORDED if path.stem == "demo"], ids=str)
def test_the_page_shows_what_the_demo_recorded(path: Path) -> None:
    models = json.loads(path.read_text())["models"]
    assert models and all(claim["holds"] for model in models for claim in model["claims"])
    for model in models:
        assert table(*demo.rates(model)) in PAGE
        _, stock, *ours = model["runs"]
        assert all(
            run[f"{kind}_rate"] > stock[f"{kind}_rate"] for run in ours for kind in ("prefill", "decode")
        )


def test_the_readme_table_holds_the_recorded_times() -> None:
    readme = (ROOT / "README.md").read_text()
    with (H200 / "moe.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["routing"] == "uniform"]
    times = {(row["workload"], row["T"], row["impl"]): float(row["us"]) for row in rows}
    cells = {(workload, tokens) for workload, tokens, _ in times}
    assert len(cells) == 40
    for cell in cells:
        assert f"{times[*cell, 'fused_moe']:.0f} / {times[*cell, 'gmm_compile']:.0f}" in readme


def test_the_range_of_ratios_is_the_recorded_one() -> None:
    ratios = [comparison.ratio for comparison in peers.compare(peers.read_rows([H200 / "moe.csv"]))]
    assert f"by {min(ratios):.2f} to {max(ratios):.1f} times" in (ROOT / "README.md").read_text()


def test_the_page_shows_what_stock_blocks_take() -> None:
    rows = json.loads(STOCK.read_text())
    assert {row["block"] for row in rows} == set(stock_bench.BLOCKS)
    assert stock_bench.summary(rows) in PAGE


def test_a_summary_takes_the_faster_implementation() -> None:
    ways = {"stock eager grouped_mm": 9, "stock compile grouped_mm": 7, "stock compile batched_mm": 6,
            "backend grouped_mm": 3, "backend batched_mm": 4, "patched": 2}  # fmt: skip
    rows = [{"block": "some", "tokens": 1, "way": way, "us": us} for way, us in ways.items()]
    assert stock_bench.summary(rows).split()[-7:] == ["some", "1", "9.0", "6.0", "3.0", "2.0", "2.00"]


@pytest.mark.parametrize("wrong", ["backend", "patched"])
def test_stock_blocks_are_not_timed_when_ours_is_wrong(wrong: str) -> None:
    errors = {"stock eager": 2e-3, "stock compile": 1e-3, "backend": 2e-3, "patched": 2e-3}
    stock_bench.expect_close(errors)
    for error in (2.1e-3, float("nan")):
        with pytest.raises(ValueError, match=wrong):
            stock_bench.expect_close(errors | {wrong: error})


@pytest.mark.parametrize(("name", "threads"), [("compile-time-16", 2), ("compile-time-16-one-thread", 1)])
def test_the_page_shows_how_long_compiling_takes(name: str, threads: int) -> None:
    runs = json.loads((ROOT / f"benchmarks/results/cpu-2026-11-26/{name}.json").read_text())
    names = {"stock": "stock", "backend": "backend only", "patched": "patched"}
    keys = (("cold_s", "over stock"), ("cold_cpu_s", "CPU over stock"))
    for row in compile_bench.compared(runs):
        shown = [f"{row[key]:.1f} | {row[ratio]:.2f}" for key, ratio in keys]
        shown += [f"{row[key]:.1f}" if row[key] else "-" for key in ("before_inductor_s", "passes_s")]
        shown += [str(row["kernels"]), str(row["files"]), f"{row['warm_s']:.1f}"]
        assert f"| {threads} | {names[row['way']]} | {' | '.join(shown)} |" in PAGE


def test_the_page_shows_what_a_patched_block_takes_the_host() -> None:
    text = (STOCK.parent / "whole-blocks.txt").read_text()
    names = {"qwen3_moe": "Qwen3-MoE", "mixtral": "Mixtral", "gpt_oss": "gpt-oss"}
    found = [line.split() for line in text.splitlines() if line.startswith(tuple(names))]
    shown = [line for line in found if line[1] in ("T=1", "T=64")]
    assert len(shown) == 6
    for line in shown:
        ways = (f"{float(line[at]):.0f} ({float(line[at + 1]):.0f})" for at in (3, 7, 11))
        first = names[line[0]] if line[1] == "T=1" else ""
        assert " ".join(f"| {first} | {line[1][2:]} | {' | '.join(ways)} |".split()) in PAGE


def test_the_page_shows_what_training_of_small_experts_takes() -> None:
    text = (ROOT / "benchmarks/results/cpu-2026-11-26/training-few-tokens.txt").read_text()
    cells: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for block in text.split("\n== ")[1:]:
        sizes = block.splitlines()[0].replace(",", ", ")
        for line in filter(lambda each: each.startswith(("float32", "bfloat16")), block.splitlines()):
            least = [float(way.split()[1]) for way in line.split("|")[1:4]]
            dtype, tokens = line.split()[0], line.split("T=")[1].split()[0]
            cells.setdefault((sizes, dtype, tokens), []).append((min(least[:2]), least[2]))
    whole = {key: times for key, times in cells.items() if len(times) == 2 and key[0].startswith("128")}
    assert len(whole) == 16
    for key, ((stock_before, before), (stock, ours)) in whole.items():
        ratios = f"{stock_before / before:.2f} | {stock / ours:.2f}"
        assert f"| {' | '.join(key)} | {stock:.3f} | {ours:.3f} | {ratios} |" in PAGE


def test_the_page_shows_what_options_cost() -> None:
    """The recorded figures, in the order of the columns."""
    found = json.loads(OPTIONS.read_text())
    columns = {
        "overlap": ("tokens", "routed", "shared", "sequential", "overlapped"),
        "balancing": ("tokens", "routing", "with_balancing", "added"),
        "chunks": ("chunk_size", "ms"),
    }
    lines = [line.split() for line in PAGE.splitlines()]
    for name, keys in columns.items():
        rows = [row for row in found[name] if keys[0] in row]
        assert len(rows) >= 5
        for row in rows:
            first, *others = (row[key] for key in keys)
            expected = [str(first), *(f"{value:.1f}" for value in others)]
            assert any(line[: len(expected)] == expected for line in lines), expected


@pytest.mark.parametrize(("name", "ranks"), [("parallel.json", 2), ("parallel-of-four.json", 4)])
def test_the_page_shows_what_several_gpus_take(name: str, ranks: int) -> None:
    found = json.loads((SERVED.parent / "h200-2026-11-26" / name).read_text())
    assert found["machine"]["ranks"] == ranks
    assert parallel_bench.summary(found) in (ROOT / "docs" / "parallel.md").read_text()
    assert all(row["mismatches"] == 0 for row in found["replays"])
    wrong = [count for name, count in found["problems"].items() if name.endswith("wrong")]
    assert wrong == [0, 0, 0, 0]
    assert all(row["busiest_after"] <= 1.05 for row in found["rebalancing"])
    assert all(map(parallel_killed.in_time, found["killed"])) and len(found["killed"]) == 4


@pytest.mark.parametrize("name", ["serving.json", "serving-sdpa.json", "../h100-2026-11-25/serving-256.json"])
def test_the_page_shows_what_a_served_model_did(name: str) -> None:
    assert serving_bench.summary(json.loads((SERVED / name).read_text())["rows"]) in PAGE


def test_a_busy_server_of_ours_is_faster_and_none_is_later() -> None:
    found = json.loads((SERVED / "serving.json").read_text())["rows"]
    rows = {(row["load"], row["way"]): row for row in found}
    assert rows["inf", "ours"]["tokens/s"] >= 1.295 * rows["inf", "stock"]["tokens/s"]
    for load, _ in rows:
        stock, ours = rows[load, "stock"], rows[load, "ours"]
        assert all(ours[name] < stock[name] for name in stock if name.startswith(("first", "between")))
        assert ours["tokens/s"] > stock["tokens/s"]


def test_the_page_shows_what_batch_invariance_costs() -> None:
    rows = json.loads((SERVED / "invariance.json").read_text())["rows"]
    for row in rows:
        if row["tokens"] not in (2, 8):
            assert f" {row['invariant']:.0f} ({row['ratio']:.2f}) |" in PAGE
