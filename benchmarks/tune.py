"""A tuning table for the GPU at hand, for `moe_ops.use_tuning`: the fastest block sizes of each product of a layer.

Every candidate is compared with float64 before it is timed, and every layer with float32. A candidate that fails is
left out; when the choice in use fails, or a layer with the table is wrong, nothing is written. A choice is kept where
the whole layer is faster with it, under routing that is even but for chance and routing by popularity (zipf) together.
"""

import argparse
import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import moe_ops
from benchmarks import moe_bench
from benchmarks.arguments import number, to_write
from benchmarks.report import machine, table
from benchmarks.timing import time_in_turns
from benchmarks.workloads import WORKLOADS, Cell, Weights, Workload, make_inputs, make_weights
from moe_ops.arguments import ExpertWeights, FusedExperts, GroupedLinear, PairedLinear, Placement

ROWS = (1, 4, 16, 64, 256, 1024)
ROUTINGS = ("uniform", "zipf")
_BAR = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks tune`."""
    parser.add_argument("--workloads", nargs="*", choices=[*WORKLOADS], default=None, help="default: all")
    moe_bench.add_sizes_argument(parser)
    parser.add_argument("--transposed", action="store_true", help="weights stored [E, in, out]")
    parser.add_argument(
        "--rows", type=_rows, nargs="+", default=ROWS, help="mean rows of an expert, powers of two"
    )
    parser.add_argument("--cell-ms", type=number, default=60, help="time for a layer's replays")
    parser.add_argument(
        "--out", type=to_write, default=Path("build/tuning.json"), help="where the table goes"
    )


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text).bit_count() != 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a power of two")
    return int(text)


def main(arguments: argparse.Namespace) -> int:
    """Measures, verifies and writes; the status is 1 when something was wrong and nothing was written."""
    if not torch.cuda.is_available():
        print("python -m benchmarks tune needs a CUDA GPU")
        return 2
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    try:
        tuning, gains = _made(cases_of(arguments), arguments.cell_ms)
    except (RuntimeError, moe_bench.WrongResult) as error:
        print(f"nothing is written: {error}")
        return 1
    print("\n" + report(gains))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(tuning.to_json())
    print(f"{arguments.out}: {len(tuning.choices)} choices; moe_ops.use_tuning({str(arguments.out)!r})")
    return 0


@dataclass(frozen=True, slots=True)
class Case:
    """A layer at the number of tokens that gives its experts so many rows in the mean."""

    workload: Workload
    rows: int
    transposed: bool

    @property
    def tokens(self) -> int:
        """T."""
        return max(1, self.rows * self.workload.num_experts // self.workload.top_k)

    def products(self, gpu: Any) -> Sequence[Any]:
        """What the layer multiplies, as its launch plan says; nothing where it runs in the form for few tokens."""
        from moe_ops.kernels import plans

        E, K, H, I = (getattr(self.workload, name) for name in _SIZES)
        w13, w2 = PairedLinear(self._weight(E, 2 * I, H)), GroupedLinear(self._weight(E, H, I))
        routed = (
            _described(self.tokens, K, dtype=torch.float32),
            _described(self.tokens, K, dtype=torch.int32),
        )
        hidden, placement = _described(self.tokens, H), Placement()
        layer = FusedExperts(hidden, ExpertWeights(w13, w2), *routed, placement, None, "silu")
        return plans.products_of(layer, gpu)

    def _weight(self, experts: int, rows: int, depth: int) -> torch.Tensor:
        return _described(experts, depth, rows).mT if self.transposed else _described(experts, rows, depth)


_SIZES = ("num_experts", "top_k", "hidden_size", "intermediate_size")


def _described(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Every layer asked for at every number of rows."""
    layers = moe_bench.chosen_layers(arguments.workloads, arguments.sizes)
    return [Case(layer, rows, arguments.transposed) for layer in layers for rows in arguments.rows]


def _made(cases: Sequence[Case], cell_ms: float) -> tuple[Any, "list[Gain]"]:
    from moe_ops.kernels.gpu import gpu_of

    moe_ops.use_tuning(None)
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = gpu_of(device)
    compile_ahead(cases, gpu, device)
    choices = tune(cases, gpu, lambda gemm, among: _measure(gemm, among, device))
    found = moe_ops.Tuning(torch.cuda.get_device_name(device), tuple(choices))
    gains = verify(cases, gpu, found, cell_ms)
    tuning = kept(cases, gpu, found, gains)
    return tuning, [each for each in gains if _choices(each.case, gpu, tuning)]


def _measure(gemm: Any, among: Sequence[Any], device: torch.device) -> Sequence[Any]:
    from moe_ops import product_timing

    try:
        return product_timing.measure(gemm, among, device)
    finally:
        _release()


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _ours(gemm: Any) -> list[Any]:
    from moe_ops import product_timing

    return [way for way in product_timing.ways(gemm) if way != product_timing.GroupedMm()]


def compile_ahead(cases: Iterable[Case], gpu: Any, device: torch.device) -> None:
    """Has Triton compile all candidates, on as many threads as there are processors; what fails is met again later."""
    import triton

    from moe_ops.kernels.grouped_gemm import plan
    from moe_ops.kernels.loading import Loader
    from moe_ops.kernels.program import Program
    from moe_ops.product_timing import timed_as

    started, loader = time.perf_counter(), Loader(device)
    dtypes = {"hidden_states": torch.bfloat16, "w13": torch.bfloat16, "w2": torch.bfloat16}
    dtypes |= dict.fromkeys(("permuted", "out", "activated"), torch.bfloat16)
    dtypes |= dict.fromkeys(("sorted_slots", "expert_offsets"), torch.int32)
    gemms = dict.fromkeys(timed_as(gemm) for case in cases for gemm in case.products(gpu))
    threads = ThreadPoolExecutor(os.cpu_count())
    with torch.cuda.device(device), threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        for gemm in gemms:
            for way in _ours(gemm):
                loader.compile(Program(*plan(gemm, way), (gemm.out,)), dtypes)
    print(f"compiled what {len(gemms)} products can run in {time.perf_counter() - started:.0f} s", flush=True)


Timer = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""Of a product and configurations, the one in use first: a `product_timing.Timed` of each."""


def tune(cases: Sequence[Case], gpu: Any, timer: Timer) -> list[Any]:
    """The choices that beat the one in use, product by product. Raises RuntimeError when the one in use fails."""
    from moe_ops import product_timing
    from moe_ops.kernels.tuning import Choice

    todo = [(case, gemm) for case in cases for gemm in case.products(gpu)]
    choices: dict[Any, Any] = {}
    for done, (case, gemm) in enumerate(todo, 1):
        timed = timer(gemm, _ours(gemm))
        best: Any = product_timing.fastest(timed)
        in_use = timed[0]
        for each in timed:
            if each.failure:
                print(f"  dropped {_sized(each.way)}: {each.failure}", flush=True)
        us = next(each.microseconds for each in timed if each.way == best)
        if best != in_use.way:
            choices[gemm.product, case.rows] = Choice(gemm.product, case.rows, best)
        print(f"{_bar(done, len(todo))} {_told(case, gemm, in_use, best, us)}", flush=True)
    return list(choices.values())


def _bar(done: int, of: int) -> str:
    filled = _BAR * done // of
    return f"[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{of}"


def _told(case: Case, gemm: Any, in_use: Any, best: Any, us: float) -> str:
    side = "up" if gemm.gated else "down"
    what = f"{case.workload.name} {side:<4} {case.rows:>5} rows"
    before = f"{in_use.microseconds:9.1f} us by {_sized(in_use.way)}"
    return f"{what} {before}" + ("" if best == in_use.way else f" -> {us:.1f} us by {_sized(best)}")


def _sized(config: Any) -> str:
    sizes = f"{config.block_m}x{config.block_n}x{config.block_k}"
    return f"{sizes} w{config.num_warps} s{config.num_stages} c{config.ctas_per_sm}"


class Gain(NamedTuple):
    """Microseconds of a layer without and with the table."""

    case: Case
    routing: str
    before: float
    after: float


def verify(cases: Sequence[Case], gpu: Any, tuning: Any, cell_ms: float) -> list[Gain]:
    """Runs each layer that the table changes, without and with it in turns. Raises WrongResult for a wrong one."""
    gains: list[Gain] = []
    changed = [case for case in cases if _choices(case, gpu, tuning)]
    for workload in dict.fromkeys(case.workload for case in changed):
        mine = [case for case in changed if case.workload is workload]
        weights = [_stored(workload, seed, mine[0]) for seed in range(workload.weight_copies)]
        for case in mine:
            gains += [_gain(case, routing, weights, tuning, cell_ms) for routing in ROUTINGS]
        del weights
        _release()
    return gains


def _stored(workload: Workload, seed: int, case: Case) -> Weights:
    made = make_weights(workload, seed, "cuda")
    return Weights(_transposed(made.w13), _transposed(made.w2)) if case.transposed else made


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.mT.contiguous().mT


def _gain(case: Case, routing: Any, weights: list[Weights], tuning: Any, cell_ms: float) -> Gain:
    cell = Cell(case.workload, case.tokens, routing)
    inputs, replays = make_inputs(cell, "cuda"), []
    try:
        for table_in_use in (None, tuning):
            moe_ops.use_tuning(table_in_use)
            replays.append(moe_bench.prepare(cell, inputs, weights, "fused_moe"))
    finally:
        moe_ops.use_tuning(None)
    before, after = (1e3 * ms / len(inputs) for ms in time_in_turns(replays, cell_ms))
    print(f"  layer {_cell(case, routing)}: {before:.1f} -> {after:.1f} us", flush=True)
    return Gain(case, routing, before, after)


def _cell(case: Case, routing: str) -> str:
    return f"{case.workload.name} T={case.tokens} {routing}"


def _choices(case: Case, gpu: Any, tuning: Any) -> list[Any]:
    products = {gemm.product for gemm in case.products(gpu)}
    return [each for each in tuning.choices if each.rows == case.rows and each.product in products]


def kept(cases: Iterable[Case], gpu: Any, tuning: Any, gains: Sequence[Gain]) -> Any:
    """The table without the choices of layers that are no faster with it, all routings together."""
    slower = {
        choice
        for case in cases
        if _times(gains, case, "after") >= _times(gains, case, "before")
        for choice in _choices(case, gpu, tuning)
    }
    return moe_ops.Tuning(tuning.gpu, tuple(each for each in tuning.choices if each not in slower))


def _times(gains: Iterable[Gain], case: Case, when: str) -> float:
    return sum(getattr(each, when) for each in gains if each.case == case)


def report(gains: Sequence[Gain]) -> str:
    """Every layer that the table changes, and the geometric mean of what it gains."""
    header = ("layer", "shipped us", "tuned us", "shipped / tuned")
    lines = [
        (
            _cell(each.case, each.routing),
            f"{each.before:.1f}",
            f"{each.after:.1f}",
            f"{each.before / each.after:.3f}",
        )
        for each in gains
    ]
    logs = [math.log(each.before / each.after) for each in gains]
    mean = math.exp(sum(logs) / len(logs)) if logs else 1.0
    return f"{table(header, lines)}\n\nshipped / tuned, geometric mean of {len(logs)}: {mean:.3f}"
