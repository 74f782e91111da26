"""What a call costs on the host: eager operators, patched blocks beside stock ones, and compiled code without graphs.

A call is timed until it returns, from an idle GPU, whose work lies in the queue: the time in which a thread of Python
can do nothing else. All that are compared take turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import inductor_passes
import moe_ops
from benchmarks.arguments import listed, one_of, to_write
from benchmarks.report import machine, table
from benchmarks.stock_bench import (
    BLOCKS,
    MORE_BLOCKS,
    Block,
    expect_close,
    in_float32,
    make_block,
    output,
    set_implementation,
    sharing,
)
from benchmarks.workloads import WORKLOADS, Cell, Workload, make_inputs, make_weights, reference
from layers import huggingface

TOKEN_COUNTS = (1, 64, 2048)
NAMES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
GOALS = {"fused_moe T=1": 60.0, "patched": 100.0, "patched compiled": 60.0}
"""Microseconds."""
_BATCH, _ROUNDS, _WARM = 20, 40, 5  # calls between two waits for the GPU: fewer than its queue takes
_MAX_RELATIVE_ERROR = 2e-2  # bfloat16

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Figure:
    """Median and least microseconds of a call on the host, and what it should take at most."""

    of: str
    way: str
    us: float
    least_us: float
    goal_us: float | None

    @property
    def is_met(self) -> bool | None:
        """Whether it takes no more than that; None without a goal."""
        return None if self.goal_us is None else self.us <= self.goal_us


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks host`."""
    parser.add_argument(
        "--only",
        type=listed(one_of(("operators", *NAMES))),
        default="operators," + ",".join(NAMES),
        help="operators, and names of blocks",
    )
    parser.add_argument("--out", type=to_write, default=Path("build/host.json"), help="where the figures go")


def main(arguments: argparse.Namespace) -> int:
    """Measures; raises ValueError for a wrong result. 1 if a goal is not met."""
    if not torch.cuda.is_available():
        print("python -m benchmarks host needs a CUDA GPU")
        return 2
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    figures: list[Figure] = []
    for name in arguments.only.split(","):
        with torch.no_grad():
            for figure in _figures_of(name, "cuda"):
                figures.append(figure)
                print(asdict(figure), flush=True)
        torch.compiler.reset()
        torch.cuda.empty_cache()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([asdict(each) for each in figures], indent=1) + "\n")
    print(summary(figures))
    return int(any(figure.is_met is False for figure in figures))


def summary(figures: list[Figure]) -> str:
    """A line for each figure."""
    rows = [
        [each.of, each.way, f"{each.us:.1f}", f"{each.least_us:.1f}", *_verdict(each)] for each in figures
    ]
    return table(("of", "way", "median us", "least us", "goal us", ""), rows)


def _verdict(figure: Figure) -> tuple[str, str]:
    if figure.goal_us is None:
        return "", ""
    return f"{figure.goal_us:.0f}", "met" if figure.is_met else "missed"


def host_us(calls: Mapping[str, Call], wait: Call, rounds: int = _ROUNDS) -> dict[str, tuple[float, float]]:
    """Median and least microseconds of each call until it returns; they take turns, each in a batch after `wait`."""
    for call in calls.values():
        for _ in range(_WARM):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wait()
            start = time.perf_counter_ns()
            for _ in range(_BATCH):
                call()
            times[name].append((time.perf_counter_ns() - start) / (1000 * _BATCH))
    wait()
    return {name: (statistics.median(each), min(each)) for name, each in times.items()}


def _figures_of(name: str, device: str) -> Iterator[Figure]:
    if name == "operators":
        return _operators(WORKLOADS["W2"], device)
    return _block(name, (BLOCKS | MORE_BLOCKS)[name], device)


def _figures(of: str, calls: Mapping[str, Call]) -> Iterator[Figure]:
    for way, (us, least_us) in host_us(calls, torch.cuda.synchronize).items():
        yield Figure(of, way, us, least_us, GOALS.get(way))


def _operators(workload: Workload, device: str) -> Iterator[Figure]:
    """Of the sizes of Qwen3-30B-A3B; and what PyTorch's own product takes, which has no check of ours.

    Compiled it is what any call of compiled code takes besides its kernels.
    """
    weights = make_weights(workload, 0, device)
    routing = moe_ops.RoutingConfig(top_k=workload.top_k)
    router = torch.randn(workload.num_experts, workload.hidden_size, device=device).bfloat16()
    calls: dict[str, Call] = {}
    for tokens in TOKEN_COUNTS:
        inputs = make_inputs(Cell(workload, tokens, "uniform"), device)[0]
        x, logits = inputs.hidden_states, inputs.router_logits
        layer = partial(moe_ops.fused_moe, x, logits, weights.w13, weights.w2, routing)
        _expect_right(layer(), reference(inputs, weights, workload.top_k))
        chosen = moe_ops.topk_routing(logits, routing)
        calls[f"fused_moe T={tokens}"] = layer
        calls[f"topk_routing T={tokens}"] = partial(moe_ops.topk_routing, logits, routing)
        calls[f"fused_experts T={tokens}"] = partial(
            moe_ops.fused_experts, x, weights.w13, weights.w2, *chosen
        )
        calls[f"dense_gemm T={tokens}"] = partial(moe_ops.dense_gemm, x, router)
        calls[f"F.linear T={tokens}"] = partial(nn.functional.linear, x, router)
        if tokens == 1:
            compiled = torch.compile(_product, fullgraph=True, dynamic=False)
            calls["F.linear T=1 compiled"] = partial(compiled, x, router)
    yield from _figures("operators", calls)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x, weight)


def _expect_right(found: Tensor, expected: Tensor) -> None:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error <= _MAX_RELATIVE_ERROR:
        raise ValueError(f"fused_moe: relative error {error:.2e}, expected at most {_MAX_RELATIVE_ERROR:.0e}")


def _block(name: str, stock: Block, device: str) -> Iterator[Figure]:
    """A block of transformers with one token, as users have it and patched, eager and compiled without graphs."""
    block = make_block(stock, device)
    x = torch.randn(1, 1, next(block.parameters()).shape[-1], device=device).bfloat16()
    ways = dict(_ways(block))
    expected = in_float32(block, x)
    torch.cuda.empty_cache()
    errors = {
        way: ((output(call(x)).double() - expected).norm() / expected.norm()).item()
        for way, call in ways.items()
    }
    expect_close(errors)
    yield from _figures(name, {way: partial(call, x) for way, call in ways.items()})


def _ways(block: nn.Module) -> Iterator[tuple[str, Callable[[Tensor], object]]]:
    for implementation in ("grouped_mm", "batched_mm"):
        stock = sharing(block)
        set_implementation(stock, implementation)
        yield f"stock {implementation}", stock
    yield "stock compiled", torch.compile(stock, fullgraph=True, dynamic=False)
    patched = sharing(block)
    huggingface.patch(patched)
    yield "patched", patched
    options = inductor_passes.options()
    yield "patched compiled", torch.compile(patched, options=options, fullgraph=True, dynamic=False)
