"""Experts in 8 and 4 bits beside experts in bfloat16: whole layers from expert ids, as CUDA graphs, taken in turns.

Before anything is timed, each result is compared with that of bfloat16: what quantising costs is in the table too.
"""

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

import moe_ops
from benchmarks.arguments import number, to_write, whole
from benchmarks.report import machine, table
from benchmarks.timing import capture, time_in_turns
from benchmarks.workloads import TOKEN_COUNTS, WORKLOADS, Cell, Weights, Workload, make_inputs, make_weights
from moe_ops import InputScales, RoutingConfig, ScaledWeight
from moe_ops.int4 import INTEGERS
from moe_ops.nvfp4 import NUMBERS
from moe_ops.scaled_experts import Rows
from moe_ops.weight_formats import quantised_weight


class Way(NamedTuple):
    """How experts are quantised. `block`: None for one scale for each row. `bound`: of the relative error.

    rows: "given" are quantised ones whose scales are known before.
    """

    dtype: torch.dtype
    block: tuple[int, int] | None
    rows: Literal["quantised", "given", "exact"]
    bound: float


WAYS = {
    "float8 blocks": Way(torch.float8_e4m3fn, (128, 128), "quantised", 0.08),
    "float8 rows": Way(torch.float8_e4m3fn, None, "quantised", 0.08),
    "float8 rows, given": Way(torch.float8_e4m3fn, None, "given", 0.08),
    "int8 rows": Way(torch.int8, None, "quantised", 0.04),
    "float8 rows, exact": Way(torch.float8_e4m3fn, None, "exact", 0.06),
    "MXFP4": Way(torch.uint8, (1, 32), "exact", 0.22),
    "NVFP4": Way(NUMBERS, (1, 16), "exact", 0.18),
    "int4": Way(INTEGERS, (1, 128), "exact", 0.22),
}


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens [T, H] with the experts of each."""

    hidden_states: Tensor
    topk_weights: Tensor
    topk_ids: Tensor


Layer = Callable[[Routed], Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks quantised`."""
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--tokens", nargs="+", type=whole, default=list(TOKEN_COUNTS))
    parser.add_argument("--cell-ms", type=number, default=60.0, help="milliseconds of replays on a GPU")
    parser.add_argument(
        "--out", type=to_write, default=Path("build/quantised.csv"), help="where the figures go"
    )


@torch.no_grad()
def main(arguments: argparse.Namespace) -> int:
    """Measures; raises ValueError where a result is farther from bfloat16's than rounding explains."""
    if not torch.cuda.is_available():
        print("python -m benchmarks quantised needs a CUDA GPU")
        return 2
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    rows: list[list[object]] = []
    for name in arguments.workloads:
        layers = layers_of(WORKLOADS[name], "cuda")
        for tokens in arguments.tokens:
            inputs = inputs_of(Cell(WORKLOADS[name], tokens, "uniform"), "cuda")
            errors = errors_of(layers, inputs[0])
            replays = [capture([partial(layer, each) for each in inputs]) for layer in layers.values()]
            times = [1000 * ms / len(inputs) for ms in time_in_turns(replays, arguments.cell_ms)]
            rows.append([name, tokens, *times, *errors])
            print(f"{name} T={tokens}: " + "  ".join(f"{us:.1f}" for us in times), flush=True)
        del layers
        torch.cuda.empty_cache()
    header = ["workload", "tokens", "bfloat16", *WAYS, *(f"error of {way}" for way in WAYS)]
    print("\nMicroseconds of a layer, and relative errors.\n")
    print(
        table(
            header,
            [[f"{each:.4g}" if isinstance(each, float) else str(each) for each in row] for row in rows],
        )
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return 0


def layers_of(workload: Workload, device: str) -> dict[str, Layer]:
    """The layer in bfloat16, then one for each of `WAYS`."""
    weights = make_weights(workload, 0, device)
    made = {way[:2]: _quantised(weights, *way[:2]) for way in WAYS.values()}
    rows: dict[str, Rows] = {"quantised": "quantised", "exact": "exact", "given": _calibrated(weights)}
    ours = {name: partial(_scaled, made[way[:2]], rows[way.rows]) for name, way in WAYS.items()}
    return {"bfloat16": partial(_usual, weights), **ours}


def _quantised(
    weights: Weights, dtype: torch.dtype, block: tuple[int, int] | None
) -> tuple[ScaledWeight, ScaledWeight]:
    sizes = (block or (1, weight.shape[2]) for weight in (weights.w13, weights.w2))
    w13, w2 = (quantised_weight(w, size, dtype) for w, size in zip((weights.w13, weights.w2), sizes))
    return w13, w2


def _calibrated(weights: Weights) -> InputScales:
    """From rows of one expert, with room for what others reach."""
    x = torch.randn(256, weights.w13.shape[2], device=weights.w13.device, dtype=weights.w13.dtype)
    gate, up = (x @ weights.w13[0].T).float().chunk(2, 1)
    largest = x.float().abs().amax(), (gate * gate.sigmoid() * up).abs().amax()
    return InputScales(*(2 * each[None] / 448 for each in largest))


def _usual(weights: Weights, at: Routed) -> Tensor:
    return moe_ops.fused_experts(at.hidden_states, weights.w13, weights.w2, at.topk_weights, at.topk_ids)


def _scaled(weights: tuple[ScaledWeight, ScaledWeight], rows: Rows, at: Routed) -> Tensor:
    return moe_ops.scaled_fused_experts(at.hidden_states, *weights, at.topk_weights, at.topk_ids, rows=rows)


def inputs_of(cell: Cell, device: str) -> list[Routed]:
    """The cell's inputs, routed."""
    routing = RoutingConfig(cell.workload.top_k)
    made = make_inputs(cell, device)
    return [Routed(each.hidden_states, *moe_ops.topk_routing(each.router_logits, routing)) for each in made]


def errors_of(layers: dict[str, Layer], at: Routed) -> list[float]:
    """Relative errors of all ways against bfloat16. Raises ValueError beyond what a way is allowed."""
    usual, *others = [layer(at).double() for layer in layers.values()]
    errors = [((each - usual).norm() / usual.norm()).item() for each in others]
    for (name, way), error in zip(WAYS.items(), errors, strict=True):
        if not error <= way.bound:
            raise ValueError(f"{name}: relative error {error:.3f}: expected at most {way.bound}")
    return errors
