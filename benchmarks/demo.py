"""The main job: checkpoints of transformers, generated from four ways: eager, stock torch.compile, and ours twice.

    python -m benchmarks demo                  two small checkpoints, written on the spot
    python -m benchmarks demo --model PATH     a local checkpoint of a supported family

Every claim is checked: the exit status is 1 when one does not hold, 2 when the checkpoint is not supported.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import demo_graph
from benchmarks.arguments import to_write, whole
from benchmarks.checkpoints import (
    SMALL_MODELS,
    UnsupportedCheckpoint,
    check_checkpoint,
    load,
    moe_blocks,
    write_small_checkpoint,
)
from benchmarks.demo_run import (
    BATCH,
    PROMPT_LENGTH,
    Run,
    Session,
    eager,
    ours,
    ours_patched,
    stock,
    time_in_turns,
)
from benchmarks.generation import compare, exact_float32, next_token_logits, static_cache
from benchmarks.report import machine, progress, table

FOLDER = Path("build/demo")
WHOLE_LAYERS = ("fused_moe", "fused_experts")
LEGEND = """
four ways to run one model:
  eager          as transformers runs it
  torch.compile  torch.compile(model)
  ours, backend  torch.compile(model, backend="moe_inductor"), and nothing else changed
  ours, patched  the same after layers.huggingface.patch(model), trusting this library's own code
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing the demo promises of one way, whether it held, and what was seen."""

    name: str
    way: str
    holds: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Demo:
    """All that was seen of one checkpoint.

    runs: eager, stock, ours with the backend alone and ours patched, in float32; timed: the same in the dtype that is
    timed; reports: explain() of the last two; blocks: of all but eager what one MoE block is compiled to, on a GPU.
    """

    name: str
    runs: tuple[Run, ...]
    timed: tuple[Run, ...]
    num_layers: int
    reports: tuple[Any, ...]
    blocks: tuple[demo_graph.BlockFacts, ...]
    html: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks demo`."""
    parser.add_argument("--model", type=Path, help="a local checkpoint instead of the two small ones")
    parser.add_argument("--steps", type=whole, default=32, help="tokens to generate and compare (default 32)")
    parser.add_argument("--json", type=to_write, help="also write the figures there")


def main(arguments: argparse.Namespace) -> int:
    """Runs the demo and returns the exit status."""
    _fresh_compiler_cache()
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()))
    print(LEGEND, flush=True)
    results, failed = [], False
    try:
        for name, path in _checkpoints(arguments.model):
            demo = run_demo(name, path, arguments.steps)
            claims = check(demo)
            print(summary(demo, claims), flush=True)
            results.append(figures(demo, claims))
            failed |= not all(claim.holds for claim in claims)
    except UnsupportedCheckpoint as error:
        print(f"\nnot supported: {error}")
        return 2
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "models": results}, indent=1) + "\n")
    return int(failed)


def run_demo(name: str, path: Path, steps: int) -> Demo:
    """Runs one checkpoint the four ways."""
    print(f"\n{name}: {path}", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with exact_float32():
        original, patched = load(path, device, torch.float32), _patched(path, device, torch.float32)
        on_cpu = device == "cpu"
        runs = _four_ways(original, patched, steps, mode=None, timed=on_cpu)
        with progress("explaining the graphs"):
            reports = tuple(map(_explain, (original, patched)))
    html = _draw(reports[0], name)
    if on_cpu:
        return Demo(name, runs, runs, len(moe_blocks(patched)), reports, (), html)
    timed = _time_on_gpu(path)
    with progress("one MoE block: counting operator calls"):
        blocks = (demo_graph.stock_block(original), *map(demo_graph.our_block, (original, patched)))
    return Demo(name, runs, timed, len(moe_blocks(patched)), reports, blocks, html)


def check(demo: Demo) -> list[Claim]:
    """The claims of the demo against what was seen."""
    reference, *compiled = demo.runs
    claims = [claim for run in compiled for claim in _same_tokens(reference, run)]
    for run, report in zip(demo.runs[-len(demo.reports) :], demo.reports, strict=True):
        claims += _one_graph(run, report, demo.num_layers)
    return claims


def summary(demo: Demo, claims: list[Claim]) -> str:
    """The claims and the figures of all ways, as text."""
    dtype = "float32" if demo.timed is demo.runs else "bfloat16 in CUDA graphs"
    return (
        f"\n{demo.name}: what must hold, in float32. Greedy; a comparison of tokens ends at a near-tie.\n\n"
        f"{table(*_verdicts(demo, claims))}\n\n"
        f"{demo.name}: how fast, in {dtype}, {BATCH} sequences. Rates: medians of calls in turns, more is better.\n"
        "First compiles share a disk cache: C++ that one way has compiled, those to its right find there.\n\n"
        f"{table(*rates(figures(demo, claims)))}\n\n"
        f"the graph before and after: {demo.html}"
    )


def _verdicts(demo: Demo, claims: list[Claim]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one for each claim, a column for each way that makes it."""
    ways = [run.way for run in demo.runs[1:]]
    cells = {(claim.name, claim.way): claim.seen + ("" if claim.holds else " FAILED") for claim in claims}
    names = dict.fromkeys(claim.name for claim in claims)
    return ["", *ways], [[name, *(cells.get((name, way), "-") for way in ways)] for name in names]


def rates(model: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the figures of one model, with its rates over those of torch.compile."""
    runs, rows = model["runs"], []
    for kind in ("prefill", "decode"):
        seen = [run[f"{kind}_rate"] for run in runs]
        rows.append([f"{kind} tokens/s", *(f"{rate:.0f}" for rate in seen)])
        rows.append(["  over torch.compile", *(f"{rate / seen[1]:.2f}" for rate in seen)])
    rows.append(["first compile", *(_seconds(run["cold_s"]) for run in runs)])
    rows.append(["again, disk cache", *(_seconds(run["warm_s"]) for run in runs)])
    if model["launches_per_layer"]:  # on a CPU calls melt into loops, and their number says nothing
        rows.append(["calls per MoE layer", "-", *map(str, model["nodes_per_layer"])])
        rows.append(["kernels per MoE layer", "-", *map(str, model["launches_per_layer"])])
    return ["", *(run["way"] for run in runs)], rows


def figures(demo: Demo, claims: list[Claim]) -> dict[str, object]:
    """The same as plain data."""
    numbers = ("way", "cold_s", "warm_s", "prefill_rate", "decode_rate", "first_compiles", "decode_compiles")
    return {
        "model": demo.name,
        "claims": [asdict(claim) for claim in claims],
        "nodes_per_layer": [block.nodes for block in demo.blocks],
        "launches_per_layer": [block.launches for block in demo.blocks],
        "runs": [{number: getattr(run, number) for number in numbers} for run in demo.timed],
    }


def _checkpoints(model: Path | None) -> Iterator[tuple[str, Path]]:
    if model is not None:
        yield check_checkpoint(model), model
        return
    for family in SMALL_MODELS:
        yield family, write_small_checkpoint(family, FOLDER / "checkpoints")


def _patched(path: Path, device: str, dtype: torch.dtype) -> nn.Module:
    import layers.huggingface

    model = load(path, device, dtype)
    report = layers.huggingface.patch(model)
    if report.left:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in report.left)
        raise UnsupportedCheckpoint(f"model type {model.config.model_type!r}: {reasons}")
    return model


def _four_ways(
    original: nn.Module, patched: nn.Module, steps: int, mode: str | None, timed: bool
) -> tuple[Run, ...]:
    ways = (
        (original, eager()),
        (original, stock(mode)),
        (original, ours(mode)),
        (patched, ours_patched(mode)),
    )
    sessions = [Session(model, way, steps) for model, way in ways]
    for session in sessions:
        session.compile_cold()
        session.generate_all()
    torch.compiler.reset()  # from here on all are compiled for the lengths that are timed, none for those between
    for session in sessions:
        session.compile_again()
    if timed:
        with progress("timing the four in turns"):
            time_in_turns(sessions)
    return tuple(session.run for session in sessions)


def _time_on_gpu(path: Path) -> tuple[Run, ...]:
    """bfloat16 with CUDA graphs: what a user would run."""
    original, patched = load(path, "cuda", torch.bfloat16), _patched(path, "cuda", torch.bfloat16)
    torch.compiler.reset()
    return _four_ways(original, patched, steps=8, mode="reduce-overhead", timed=True)


@torch.no_grad()
def _explain(model: nn.Module) -> Any:
    import inductor_passes

    step = next_token_logits(model, static_cache(model, BATCH, 64))
    device = next(model.parameters()).device
    return inductor_passes.explain(step, torch.zeros(BATCH, PROMPT_LENGTH, dtype=torch.int64, device=device))


def _draw(report: Any, name: str) -> Path:
    html = FOLDER / f"{name}.html"
    html.parent.mkdir(parents=True, exist_ok=True)
    return report.to_html(html)


def _same_tokens(reference: Run, run: Run) -> list[Claim]:
    first = compare(reference.first, run.first)
    claim = Claim("same tokens as eager", run.way, first.same, f"{first.compared} of {first.steps}")
    if not run.further:
        return [claim]
    further = [compare(a, b) for a, b in zip(reference.further, run.further, strict=True)]
    same = sum(agreement.same for agreement in further)
    return [
        claim,
        Claim("further prompts the same", run.way, same == len(further), f"{same} of {len(further)}"),
    ]


def _one_graph(run: Run, report: Any, num_layers: int) -> list[Claim]:
    breaks = len(report.graph_breaks)
    fused = len({fusion.layer for fusion in report.fused if fusion.kind in WHOLE_LAYERS})
    return [
        Claim("graph breaks", run.way, breaks == 0, str(breaks)),
        Claim("compiles of further lengths", run.way, run.further_compiles <= 1, str(run.further_compiles)),
        Claim("compiles of decode", run.way, run.decode_compiles <= 1, str(run.decode_compiles)),
        Claim("MoE layers fused", run.way, fused == num_layers, f"{fused} of {num_layers}"),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _fresh_compiler_cache() -> None:
    """An empty compiler cache of our own, so that a cold compile is cold."""
    cache = (FOLDER / "compiler-cache").resolve()
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
