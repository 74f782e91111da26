"""The experts of one MoE layer on a CPU: fused_experts beside transformers' eager loop and grouped_mm.

Ways are timed in turns, so that a busy moment of the machine falls on all of them; medians are printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.report import machine, table

TOKEN_COUNTS = (1, 16, 256)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WAYS = ("eager", "grouped_mm", "fused_experts")
MAX_RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


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

    dtype: str
    tokens: int
    ms: dict[str, float]

    @property
    def speedup(self) -> float:
        """The better of transformers' two over ours."""
        return min(self.ms["eager"], self.ms["grouped_mm"]) / self.ms["fused_experts"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks cpu`."""
    parser.add_argument("--ts", default=",".join(map(str, TOKEN_COUNTS)), help="comma list of token counts")
    parser.add_argument("--seconds", type=float, default=3.0, help="per cell, all ways together")


def main(arguments: argparse.Namespace) -> int:
    """Prints the table; the status is 1 when ours is slower than the better of transformers' two anywhere."""
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    counts = [int(count) for count in arguments.ts.split(",")]
    results = [measure(dtype, count, arguments.seconds) for dtype in DTYPES for count in counts]
    header = ("dtype", "T", *(f"{way} ms" for way in WAYS), "best other / ours")
    rows = [(r.dtype, r.tokens, *(f"{r.ms[way]:.3f}" for way in WAYS), f"{r.speedup:.2f}") for r in results]
    print(table(header, rows))
    return int(any(result.speedup < 1.0 for result in results))


@torch.inference_mode()
def measure(dtype: str, tokens: int, seconds: float, layer: Layer = Layer()) -> CpuResult:
    """Checks every way against a float64 reference, then times them in turns."""
    torch.manual_seed(0)
    experts = make_experts(layer, DTYPES[dtype])
    hidden = torch.randn(tokens, layer.hidden_size, dtype=DTYPES[dtype])
    topk_weights, topk_ids = torch.randn(tokens, layer.num_experts).softmax(-1).topk(layer.top_k)
    calls = ways(experts, hidden, topk_ids, topk_weights)
    expected = _reference(experts, hidden, topk_ids, topk_weights)
    for way, call in calls.items():
        error = float((call().double() - expected).norm() / expected.norm())
        if not error <= MAX_RELATIVE_ERROR[DTYPES[dtype]]:
            raise AssertionError(f"{way}, {dtype}, T={tokens}: relative error {error:.1e}")
    return CpuResult(dtype, tokens, _time_in_turns(calls, seconds))


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
    import moe_ops

    def stock(implementation: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            experts.config._experts_implementation = implementation
            return experts(hidden, topk_ids, topk_weights)

        return call

    def ours() -> Tensor:
        return moe_ops.fused_experts(hidden, experts.gate_up_proj, experts.down_proj, topk_weights, topk_ids)

    return {"eager": stock("eager"), "grouped_mm": stock("grouped_mm"), "fused_experts": ours}


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
