"""The experts of one MoE layer on a CPU: ours beside transformers' ways, eager and under torch.compile.

On one core and on all, alone and beside a process that loads one core. Ways are timed in turns, so that a busy moment
of the machine falls on all of them; medians are printed. Nothing is timed before its result is checked.
"""

import argparse
import contextlib
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.arguments import listed, number, one_of, to_write, whole
from benchmarks.report import machine, table

TOKEN_COUNTS = (1, 16, 256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EAGER = ("eager", "grouped_mm", "fused_experts")
COMPILED = ("compiled grouped_mm", "compiled batched_mm", "compiled fused_experts")
CAPTIONS = {
    EAGER: "Called eagerly: transformers' two ways and ours. Median milliseconds; ratio: the best other over ours.",
    COMPILED: "Compiled: transformers' two ways by stock torch.compile, and ours with our passes.",
}
MAX_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LOADS = ("idle", "loaded")


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of the layer."""

    hidden_size: int = 512
    intermediate_size: int = 256
    num_experts: int = 32
    top_k: int = 4


@dataclass(frozen=True, slots=True)
class CpuResult:
    """Median milliseconds of each way in one dtype at one token count."""

    threads: int
    load: str
    dtype: str
    tokens: int
    ms: dict[str, float]

    def speedup(self, ways: tuple[str, ...]) -> float:
        """The best of the others over ours, which is the last."""
        *others, ours = (self.ms[way] for way in ways)
        return min(others) / ours

    def row(self, ways: tuple[str, ...]) -> tuple[object, ...]:
        """Of the table of these ways."""
        times = (f"{self.ms[way]:.3f}" for way in ways)
        return (self.dtype, self.tokens, self.threads, self.load, *times, f"{self.speedup(ways):.2f}")


def tables(results: Sequence[CpuResult]) -> str:
    """One table of the eager ways and one of the compiled, each under a line that says what it shows."""
    return "\n\n".join(
        f"{caption}\n\n{table(header(ways), [result.row(ways) for result in results])}"
        for ways, caption in CAPTIONS.items()
    )


def header(ways: tuple[str, ...]) -> tuple[str, ...]:
    """Of the table of these ways."""
    return ("dtype", "T", "cores", "machine", *(way.removeprefix("compiled ") for way in ways), "ratio")


def read_results(path: Path) -> list[CpuResult]:
    """What `--json` wrote."""
    return [CpuResult(**cell) for cell in json.loads(path.read_text())["cells"]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks cpu`."""
    parser.add_argument(
        "--ts",
        type=listed(whole),
        default=",".join(map(str, TOKEN_COUNTS)),
        help="comma list of token counts",
    )
    parser.add_argument("--seconds", type=number, default=3.0, help="per cell, all ways together")
    all_cores = torch.get_num_threads()
    threads = ",".join(map(str, dict.fromkeys((1, all_cores))))
    parser.add_argument(
        "--threads", type=listed(whole), default=threads, help=f"comma list, default {threads}"
    )
    parser.add_argument(
        "--loads", type=listed(one_of(LOADS)), default=",".join(LOADS), help="idle, loaded or both"
    )
    parser.add_argument("--json", type=to_write, help="also write the figures there")


def main(arguments: argparse.Namespace) -> int:
    """Prints the tables; the status is 1 when ours is slower than the best of the others anywhere."""
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    results: list[CpuResult] = []
    for threads in map(int, arguments.threads.split(",")):
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            for tokens in map(int, arguments.ts.split(",")):
                results += measure(dtype, tokens, arguments.loads.split(","), arguments.seconds)
    print(f"\n{tables(results)}")
    if arguments.json:
        cells = [asdict(result) for result in results]
        arguments.json.write_text(json.dumps({"machine": machine(), "cells": cells}, indent=1) + "\n")
    return int(any(result.speedup(ways) < 1.0 for result in results for ways in (EAGER, COMPILED)))


@torch.no_grad()
def measure(
    dtype: str, tokens: int, loads: list[str], seconds: float, layer: Layer = Layer()
) -> list[CpuResult]:
    """Checks every way against a float64 reference, then times them in turns, once for each load."""
    torch.manual_seed(0)
    torch.compiler.reset()
    experts = make_experts(layer, DTYPES[dtype])
    hidden = torch.randn(tokens, layer.hidden_size, dtype=DTYPES[dtype])
    topk_weights, topk_ids = torch.randn(tokens, layer.num_experts).softmax(-1).topk(layer.top_k)
    calls = ways(experts, hidden, topk_ids, topk_weights)
    expected = _reference(experts, hidden, topk_ids, topk_weights)
    for way, call in calls.items():
        error = float((call().double() - expected).norm() / expected.norm())
        if not error <= MAX_RELATIVE_ERROR[DTYPES[dtype]]:
            raise AssertionError(f"{way}, {dtype}, T={tokens}: relative error {error:.1e}")
    results = []
    for load in loads:
        with other_process(load):
            times = _time_in_turns(calls, seconds)
        results.append(CpuResult(torch.get_num_threads(), load, dtype, tokens, times))
    return results


@contextlib.contextmanager
def other_process(load: str) -> Iterator[None]:
    """Beside a process that keeps one core busy when `load` is "loaded". Raises ValueError for an unknown one."""
    if load not in LOADS:
        raise ValueError(f"load {load!r}: expected one of {', '.join(LOADS)}")
    if load == "idle":
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def make_experts(layer: Layer, dtype: torch.dtype) -> nn.Module:
    """The experts module of transformers' Mixtral with normal weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_local_experts=layer.num_experts,
        num_experts_per_tok=layer.top_k,
    )
    experts = MixtralExperts(config).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return experts.requires_grad_(False)


def ways(
    experts: nn.Module, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """The calls that are timed, by name."""
    import inductor_passes
    import moe_ops

    def ours(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return moe_ops.fused_experts(hidden, experts.gate_up_proj, experts.down_proj, topk_weights, topk_ids)

    stock = {way: _with_implementation(experts, way) for way in ("eager", "grouped_mm", "batched_mm")}
    fixed = {"fullgraph": True, "dynamic": False}
    functions = {
        "eager": stock["eager"],
        "grouped_mm": stock["grouped_mm"],
        "fused_experts": ours,
        "compiled grouped_mm": torch.compile(stock["grouped_mm"], **fixed),
        "compiled batched_mm": torch.compile(stock["batched_mm"], **fixed),
        "compiled fused_experts": torch.compile(ours, options=inductor_passes.options(), **fixed),
    }
    inputs = (hidden, topk_ids, topk_weights)
    return {way: lambda function=function: function(*inputs) for way, function in functions.items()}


def _with_implementation(experts: nn.Module, implementation: str) -> nn.Module:
    """The same weights, run another way."""
    twin = copy.copy(experts)
    twin.config = copy.copy(experts.config)
    twin.config._experts_implementation = implementation
    return twin


def _reference(experts: nn.Module, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    output = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights.double())):
        for expert, weight in zip(ids, weights):
            gate, up = (experts.gate_up_proj[expert].double() @ hidden[token].double()).chunk(2)
            output[token] += weight * (experts.down_proj[expert].double() @ (nn.functional.silu(gate) * up))
    return output


def _time_in_turns(calls: dict[str, Callable[[], Tensor]], seconds: float) -> dict[str, float]:
    times: dict[str, list[float]] = {way: [] for way in calls}
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times["eager"]) < 5:
        for way, call in calls.items():
            started = time.perf_counter()
            call()
            times[way].append(time.perf_counter() - started)
    return {way: statistics.median(seen) * 1e3 for way, seen in times.items()}
