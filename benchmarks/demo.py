"""The main job: checkpoints of transformers, generated from by eager, stock torch.compile and ours, side by side.

    python -m benchmarks demo                  two small checkpoints, written on the spot
    python -m benchmarks demo --model PATH     a local checkpoint of a supported family

Every claim is checked: the exit status is 1 when one does not hold, 2 when the checkpoint is not supported.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks import demo_graph
from benchmarks.checkpoints import (
    SMALL_MODELS,
    UnsupportedCheckpoint,
    check_checkpoint,
    load,
    moe_blocks,
    write_small_checkpoint,
)
from benchmarks.demo_run import (
    FURTHER_LENGTHS,
    PROMPT_LENGTH,
    Run,
    Session,
    eager,
    ours,
    stock,
    time_in_turns,
)
from benchmarks.generation import compare, exact_float32, next_token_logits, static_cache
from benchmarks.report import machine, progress, table

FOLDER = Path("build/demo")
WHOLE_LAYERS = ("fused_moe", "fused_experts")


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing the demo promises, whether it held, and what was seen."""

    name: str
    holds: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Demo:
    """All that was seen of one checkpoint.

    runs: eager, stock and ours in float32; timed: the same three in the dtype that is timed.
    """

    name: str
    runs: tuple[Run, Run, Run]
    timed: tuple[Run, Run, Run]
    blocks: int
    report: object
    stock_block: demo_graph.BlockFacts
    our_block: demo_graph.BlockFacts
    html: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks demo`."""
    parser.add_argument("--model", type=Path, help="a local checkpoint instead of the two small ones")
    parser.add_argument("--steps", type=int, default=32, help="tokens to generate and compare (default 32)")
    parser.add_argument("--json", type=Path, help="also write the figures there")


def main(arguments: argparse.Namespace) -> int:
    """Runs the demo and returns the exit status."""
    _fresh_compiler_cache()
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
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
    """Runs one checkpoint the three ways."""
    print(f"\n{name}: {path}", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with exact_float32():
        original, patched = load(path, device, torch.float32), _patched(path, device, torch.float32)
        on_cpu = device == "cpu"
        runs = _three_ways(original, patched, steps, mode=None, timed=on_cpu)
        report, html = _explain(patched, name)
    timed = runs if on_cpu else _time_on_gpu(path)
    with progress("one MoE block: counting operator calls"):
        facts = demo_graph.stock_block(original), demo_graph.our_block(patched)
    return Demo(name, runs, timed, len(moe_blocks(patched)), report, *facts, html)


def check(demo: Demo) -> list[Claim]:
    """The claims of the demo against what was seen."""
    reference, stock_run, our_run = demo.runs
    claims = [_same_tokens(reference, run) for run in (stock_run, our_run)]
    breaks = len(demo.report.graph_breaks)
    fused = len({fusion.layer for fusion in demo.report.fused if fusion.kind in WHOLE_LAYERS})
    more = f"{our_run.further_compiles} more for {len(FURTHER_LENGTHS)} further prompt lengths"
    return [
        *claims,
        Claim("graph breaks", breaks == 0, str(breaks)),
        Claim("recompiles of prefill", our_run.further_compiles <= 1, more),
        Claim("compiles of decode", our_run.decode_compiles <= 1, str(our_run.decode_compiles)),
        Claim("MoE layers fused", fused == demo.blocks, f"{fused}/{demo.blocks}"),
    ]


def summary(demo: Demo, claims: list[Claim]) -> str:
    """The claims and the table of the three ways, as text."""
    verdicts = [(claim.name, claim.seen, "ok" if claim.holds else "FAILED") for claim in claims]
    facts = []
    if demo.our_block.launches is not None:  # on a CPU calls melt into loops, and their number says nothing
        nodes = f"{demo.stock_block.nodes} -> {demo.our_block.nodes}"
        seen = f"{demo.stock_block.launches} -> {demo.our_block.launches}"
        facts.append(("operator calls per MoE layer, torch.compile -> ours", nodes, ""))
        facts.append(("kernel launches per MoE layer, torch.compile -> ours", seen, ""))
    header = ("", *(run.way for run in demo.timed))
    rows = [
        ("prefill tokens/s", *(f"{run.prefill_rate:.0f}" for run in demo.timed)),
        ("decode tokens/s", *(f"{run.decode_rate:.0f}" for run in demo.timed)),
        ("compile, nothing cached", *(_seconds(run.cold_s) for run in demo.timed)),
        ("compile, disk cache", *(_seconds(run.warm_s) for run in demo.timed)),
    ]
    return (
        f"\n{demo.name}\n\n{table(('check', 'seen', ''), [*verdicts, *facts])}\n\n{table(header, rows)}\n\n"
        f"the graph before and after: {demo.html}"
    )


def figures(demo: Demo, claims: list[Claim]) -> dict[str, object]:
    """The same as plain data."""
    numbers = ("way", "cold_s", "warm_s", "prefill_rate", "decode_rate", "first_compiles", "decode_compiles")
    return {
        "model": demo.name,
        "claims": [{"name": claim.name, "holds": claim.holds, "seen": claim.seen} for claim in claims],
        "nodes_per_layer": [demo.stock_block.nodes, demo.our_block.nodes],
        "launches_per_layer": [demo.stock_block.launches, demo.our_block.launches],
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


def _three_ways(
    original: nn.Module, patched: nn.Module, steps: int, mode: str | None, timed: bool
) -> tuple[Run, Run, Run]:
    models = ((original, eager()), (original, stock(mode)), (patched, ours(mode)))
    sessions = [Session(model, way, steps) for model, way in models]
    for session in sessions:  # ours comes last: compiling cold resets what the others have compiled
        session.compile_cold_and_warm()
        session.generate_all()
    if timed:
        with progress("timing the three in turns"):
            time_in_turns(sessions)
    first, second, third = (session.run for session in sessions)
    return first, second, third


def _time_on_gpu(path: Path) -> tuple[Run, Run, Run]:
    """bfloat16 with CUDA graphs: what a user would run."""
    original, patched = load(path, "cuda", torch.bfloat16), _patched(path, "cuda", torch.bfloat16)
    torch.compiler.reset()
    return _three_ways(original, patched, steps=8, mode="reduce-overhead", timed=True)


def _explain(patched: nn.Module, name: str) -> tuple[object, Path]:
    session_cache = static_cache(patched, 2, 64)
    step = next_token_logits(patched, session_cache)
    html = FOLDER / f"{name}.html"
    device = next(patched.parameters()).device
    with progress("explaining the graph"), torch.no_grad():
        report = demo_graph.explain(
            step, torch.zeros(2, PROMPT_LENGTH, dtype=torch.int64, device=device), html
        )
    return report, html


def _same_tokens(reference: Run, run: Run) -> Claim:
    agreements = [compare(reference.first, run.first)]
    agreements += [compare(a, b) for a, b in zip(reference.further, run.further, strict=True)]
    further = f"{sum(a.same for a in agreements[1:])}/{len(agreements) - 1} further prompts"
    same = all(agreement.same for agreement in agreements)
    return Claim(f"tokens of {run.way} against eager, float32", same, f"{agreements[0]}, {further}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _fresh_compiler_cache() -> None:
    """An empty compiler cache of our own, so that a cold compile is cold."""
    cache = (FOLDER / "compiler-cache").resolve()
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
