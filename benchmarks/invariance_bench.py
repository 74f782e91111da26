"""What batch invariance costs: one layer and one router, `emit="batch_invariant"` beside the usual way.

On a GPU Mixtral's, Qwen3's and OLMoE's layers as CUDA graphs, on a CPU a small one. Before anything is timed, rows of
the largest batch are compared, to the bit, with the same rows in every smaller one, and values with the usual way.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import moe_ops
from benchmarks.arguments import known_device, number, to_write
from benchmarks.report import machine, table
from benchmarks.timing import capture, time_in_turns
from benchmarks.workloads import WORKLOADS, Weights, Workload, make_weights
from moe_ops import RoutingConfig

Call = Callable[[], object]
GPU_TOKENS, CPU_TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 16384), (1, 4, 16, 64, 256)
CPU_LAYER = Workload("small", 32, 4, 512, 256)
MAX_RELATIVE_ERROR = 2e-2  # bfloat16
CPU_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Batch:
    """A layer, its router's weight, and the most tokens that there are of."""

    workload: Workload
    weights: Weights
    router: Tensor
    hidden_states: Tensor
    logits: Tensor

    def layer(self, tokens: int, emit: str) -> Tensor:
        """Its first `tokens` tokens."""
        given = self.hidden_states[:tokens], self.logits[:tokens], self.weights.w13, self.weights.w2
        return moe_ops.fused_moe(*given, RoutingConfig(self.workload.top_k), emit=emit)  # type: ignore[arg-type]

    def product(self, tokens: int, emit: str) -> Tensor:
        """Their logits."""
        emit = "batch_invariant" if emit == "batch_invariant" else "auto"
        return moe_ops.dense_gemm(self.hidden_states[:tokens], self.router, emit=emit)  # type: ignore[arg-type]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks invariance`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=known_device, metavar="cpu|cuda", default=device)
    parser.add_argument("--cell-ms", type=number, default=60.0, help="milliseconds of replays on a GPU")
    parser.add_argument(
        "--out", type=to_write, default=Path("build/invariance.json"), help="where the figures go"
    )


def main(arguments: argparse.Namespace) -> int:
    """Measures; raises ValueError where a row's bits depend on the batch."""
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    is_cpu = arguments.device == "cpu"
    tokens = CPU_TOKENS if is_cpu else GPU_TOKENS
    times_of = _cpu_times if is_cpu else partial(_gpu_times, arguments.cell_ms)
    rows: list[dict[str, object]] = []
    for workload in (CPU_LAYER,) if is_cpu else (WORKLOADS["W1"], WORKLOADS["W2"], WORKLOADS["W5"]):
        with torch.no_grad():
            rows += _measured(_batch(workload, max(tokens), arguments.device), tokens, times_of)
    print("\nMicroseconds of the usual way and of the invariant one, and their ratio.\n")
    shown = [
        [f"{value:.2f}" if isinstance(value, float) else value for value in row.values()] for row in rows
    ]
    print(table([*rows[0]], shown))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 0


def _batch(workload: Workload, tokens: int, device: str) -> Batch:
    generator = torch.Generator(device).manual_seed(0)
    experts, size = workload.num_experts, workload.hidden_size
    shapes = (experts, size), (tokens, size), (tokens, experts)
    router, hidden, logits = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    router = router * size**-0.5
    return Batch(workload, make_weights(workload, 0, device), router.bfloat16(), hidden.bfloat16(), logits)


def _measured(
    batch: Batch, token_counts: tuple[int, ...], times_of: Callable[[list[Call]], list[float]]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name in ("layer", "product"):
        run = getattr(batch, name)
        _expect_invariance(run, token_counts)
        for tokens in token_counts:
            usual, invariant = times_of([partial(run, tokens, emit) for emit in ("fused", "batch_invariant")])
            rows.append({"workload": batch.workload.name, "what": name, "tokens": tokens, "usual": usual})
            rows[-1] |= {"invariant": invariant, "ratio": invariant / usual}
    return rows


def _expect_invariance(run: Callable[[int, str], Tensor], token_counts: tuple[int, ...]) -> None:
    whole, usual = run(max(token_counts), "batch_invariant"), run(max(token_counts), "fused").double()
    error = ((whole.double() - usual).norm() / usual.norm()).item()
    if not error <= MAX_RELATIVE_ERROR:
        raise ValueError(f"relative error {error:.2e}: expected at most {MAX_RELATIVE_ERROR}")
    for tokens in token_counts:
        if not torch.equal(run(tokens, "batch_invariant"), whole[:tokens]):
            raise ValueError(
                f"rows of {tokens} tokens differ from those of {max(token_counts)}: expected equal bits"
            )


def _gpu_times(budget_ms: float, calls: list[Call]) -> list[float]:
    return [1000 * ms for ms in time_in_turns([capture([call]) for call in calls], budget_ms)]


def _cpu_times(calls: list[Call]) -> list[float]:
    """Medians in microseconds; calls take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(CPU_ROUNDS):
        for call, mine in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            mine.append(1e6 * (time.perf_counter() - start))
    return [statistics.median(mine) for mine in times]
