"""Forward and backward of one MoE layer: ours and `grouped_mm`, compiled and eager; time, and what is kept in between.

Gradients of every way are compared with those of a float32 layer first; no time is taken of wrong ones. On a GPU at
the real sizes of `--workloads`, a step as it is called, with the host's time where that is longer, and as a CUDA graph:
the GPU's alone. `--small` runs anywhere in seconds and says nothing about speed.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.arguments import listed, number, one_of, whole
from benchmarks.implementations import gmm
from benchmarks.report import machine
from benchmarks.timing import capture, time_in_turns
from benchmarks.workloads import WORKLOADS, Cell, Workload, make_inputs, make_weights, route

if TYPE_CHECKING:
    from moe_ops.fused_experts import Emit

MAX_RELATIVE_ERROR = 2e-2  # bfloat16: a gradient passes through twice as many roundings as a value
SMALL = Workload("small", num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)

Layer = Callable[..., Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks training`."""
    parser.add_argument(
        "--workloads",
        type=listed(one_of(WORKLOADS)),
        default="W1,W2",
        help=f"comma list from {', '.join(WORKLOADS)}",
    )
    parser.add_argument("--tokens", type=whole, default=16384)
    parser.add_argument("--cell-ms", type=number, default=1000.0, help="milliseconds of steps per workload")
    parser.add_argument("--small", action="store_true", help="a tiny layer, on the CPU too")


def main(arguments: argparse.Namespace) -> int:
    """Prints a table for each workload; the status is 1 when a way's gradients were wrong."""
    if not (arguments.small or torch.cuda.is_available()):
        print("python -m benchmarks training needs a CUDA GPU; --small runs on a CPU")
        return 2
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workloads = [SMALL] if arguments.small else [WORKLOADS[name] for name in arguments.workloads.split(",")]
    tokens = 64 if arguments.small else arguments.tokens
    return max(measure(Cell(each, tokens, "uniform"), device, arguments.cell_ms) for each in workloads)


def ways(top_k: int) -> dict[str, Layer]:
    """What is compared, by name."""
    import inductor_passes
    import moe_ops

    routing = moe_ops.RoutingConfig(top_k=top_k)

    def ours(hidden: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, emit: "Emit" = "auto") -> Tensor:
        return moe_ops.fused_moe(hidden, logits, w13, w2, routing, emit=emit)

    def stock(hidden: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return gmm(hidden, logits, w13, w2, top_k)

    options = inductor_passes.options()
    return {
        "ours compiled": torch.compile(ours, fullgraph=True, dynamic=False, options=options),
        "grouped_mm raised": torch.compile(stock, fullgraph=True, dynamic=False, options=options),
        "grouped_mm compiled": torch.compile(_apart(stock), fullgraph=True, dynamic=False),
        "ours eager": ours,
        "ours eager, gate_up": partial(ours, emit="halves"),
        "grouped_mm eager": stock,
    }


def _apart(layer: Layer) -> Layer:
    """The same under other code, so that two compiles do not see each other's graphs."""

    def stock_compiled(hidden: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return layer(hidden, logits, w13, w2)

    return stock_compiled


def measure(cell: Cell, device: str, cell_ms: float) -> int:
    """Checks, times and prints every way in one cell. Returns 1 when one was wrong."""
    (inputs, *_), weights = make_inputs(cell, device), make_weights(cell.workload, 1, device)
    args = [inputs.hidden_states, inputs.router_logits, weights.w13, weights.w2]
    expected, steps, kept = _expected(args, cell.workload.top_k), {}, {}
    for name, layer in ways(cell.workload.top_k).items():
        _release(device)
        error = _error(_step(layer, args), expected)
        if not error <= MAX_RELATIVE_ERROR:
            print(f"WRONG {cell.workload.name} {name}: relative error of a gradient {error:.2e}", flush=True)
            continue
        steps[name], kept[name] = lambda layer=layer: _step(layer, args), kept_bytes(layer, args)
    _show(cell, "called", _time(list(steps.values()), device, cell_ms), kept)
    if device == "cuda":
        _release(device)
        graphs = [capture([each]) for each in steps.values()]
        _show(cell, "as a graph", _time(graphs, device, cell_ms), kept)
    return int(len(steps) < len(ways(cell.workload.top_k)))


def _show(cell: Cell, how: str, milliseconds: Sequence[float], kept: Mapping[str, int]) -> None:
    for (name, size), took in zip(kept.items(), milliseconds, strict=True):
        where = f"{cell.workload.name} T={cell.tokens} {name:20}"
        print(f"{where} {took:10.2f} ms {how:10} {size / 2**20:10.2f} MiB", flush=True)


def kept_bytes(layer: Layer, args: Sequence[Tensor]) -> int:
    """What autograd holds between forward and backward, weights aside."""
    weights = {each.untyped_storage().data_ptr() for each in args[2:]}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(*[each.detach().requires_grad_() for each in args])
    del output
    return sum(kept.values())


def _step(layer: Layer, args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    # Leaves of its own: what autograd keeps for a leaf stays on the stream of its first step, which no capture allows.
    leaves = [each.detach().requires_grad_() for each in args]
    output = layer(*leaves)
    weights = torch.linspace(0.5, 1.5, output.shape[1], device=output.device, dtype=output.dtype)
    return torch.autograd.grad(output, leaves, weights.expand_as(output).contiguous())


def _expected(args: Sequence[Tensor], top_k: int) -> tuple[Tensor, ...]:
    """Gradients in float32, expert by expert, to hidden states and logits: those that depend on everything."""
    hidden, logits = (each.detach().float().requires_grad_() for each in args[:2])
    topk_weights, topk_ids = route(logits, top_k)
    weights = torch.linspace(0.5, 1.5, hidden.shape[1], device=hidden.device)
    total = [torch.zeros_like(hidden), torch.zeros_like(logits)]
    for expert in range(args[2].shape[0]):
        token, slot = torch.where(topk_ids == expert)
        gate, up = (hidden[token] @ args[2][expert].detach().float().T).chunk(2, dim=-1)
        out = (torch.nn.functional.silu(gate) * up) @ args[3][expert].detach().float().T
        grads = torch.autograd.grad(
            (out * topk_weights[token, slot, None] * weights).sum(), (hidden, logits), retain_graph=True
        )
        total = [sum_ + each for sum_, each in zip(total, grads, strict=True)]
    return tuple(total)


def _error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(actual[: len(expected)], expected, strict=True)
    errors = [float((one.float() - other).norm() / other.norm()) for one, other in pairs]
    return max(errors) if all(each.isfinite().all() for each in actual) else float("nan")


def _time(steps: Sequence[Callable[[], object]], device: str, budget_ms: float) -> list[float]:
    if device == "cuda":
        return time_in_turns(steps, budget_ms)
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(3):
        for step, mine in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            mine.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(mine) for mine in times]


def _release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
