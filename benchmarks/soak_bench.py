"""Does a long run wear out? Graphs replayed a million times and eager calls of any T, watched for values and growth.

Contents and routing differ every time; some outputs are compared with those of eager. Memory is read once everything
was met, a tenth of the way, and at the end.
"""

import argparse
import gc
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import moe_ops
from benchmarks.arguments import known_device, to_write, whole
from benchmarks.report import machine, progress
from benchmarks.workloads import Cell, Inputs, Workload, make_inputs, make_weights, reference
from layers import CudaGraphRunner
from layers.graph_capture import Graphs

LAYER = Workload("soaked", num_experts=13, top_k=3, hidden_size=256, intermediate_size=136)
SIZES = (1, 2, 4, 8, 16, 33, 64)
MOST_TOKENS = 4096  # of an eager call
SAMPLES = 1000
MAX_RELATIVE_ERROR = 2e-2  # bfloat16
_PAGE_BYTES = 4096

Layer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that is held, in bytes: of the device by tensors and by PyTorch for them, of the host by this process."""

    allocated: int
    reserved: int
    host: int


@dataclass(frozen=True, slots=True)
class Soaked:
    """What came of many runs.

    Attributes:
        runs, compared, wrong: how many there were, were compared, and differed.
        grown: what was held at the end less what was held after a tenth of them.
        blocks: what Python had allocated at the end less what it had after a tenth, in objects.
    """

    runs: int
    compared: int
    wrong: int
    grown: Held
    blocks: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks soak`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=known_device, metavar="cpu|cuda", default=device)
    parser.add_argument("--replays", type=whole, default=1_000_000, help="of graphs, on a GPU")
    parser.add_argument("--calls", type=whole, default=100_000, help="of the eager operator")
    parser.add_argument("--out", type=to_write, default=Path("build/soak.json"), help="where the figures go")


@torch.inference_mode()
def main(arguments: argparse.Namespace) -> int:
    """Runs both; 1 where a value was wrong or the device's memory grew."""
    facts = machine()
    print("  ".join(f"{name} {fact}" for name, fact in facts.items()), flush=True)
    soak = Soak(arguments.device)
    parts = {"calls": (soak.calls, arguments.calls)}
    if arguments.device == "cuda":
        parts = {"replays": (soak.replays, arguments.replays), **parts}
    told: dict[str, object] = {"machine": facts}
    is_well = True
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name, (run, count) in parts.items():
        with progress(f"{count} {name}", 60):
            found = run(count)
        print(f"{name}: {found}", flush=True)
        is_well &= found.wrong == 0 and found.grown.allocated <= 0 and found.grown.reserved <= 0
        told[name] = asdict(found)
        arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    return int(not is_well)


class Soak:
    """One layer, and rows that calls take from anywhere of a pool."""

    def __init__(self, device: str) -> None:
        self._weights = make_weights(LAYER, 0, device)
        self._routing = moe_ops.RoutingConfig(LAYER.top_k)
        self._pool = make_inputs(Cell(LAYER, 2 * MOST_TOKENS, "uniform"), device)[0]
        self._device = device
        self._random = random.Random(0)

    def layer(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """[T, H]: routing and experts."""
        return moe_ops.fused_moe(hidden_states, router_logits, *self._experts(), self._routing)

    def replays(self, count: int, graphs: Graphs | None = None) -> Soaked:
        """Of graphs of every size in `SIZES`; outputs have the bits of eager's of as many rows."""
        with CudaGraphRunner(self.layer, SIZES, graphs=graphs) as run:
            run.capture(*self._rows(max(SIZES)))

            def is_right(is_sampled: bool) -> bool:
                rows = self._rows(self._random.randint(1, max(SIZES)))
                output = run(*rows)
                return not is_sampled or torch.equal(output, self._as_captured(rows))

            return self._watched(count, is_right)

    def calls(self, count: int) -> Soaked:
        """Of the eager operator, of up to `MOST_TOKENS` tokens; near a float32 formula."""

        def is_right(is_sampled: bool) -> bool:
            rows = self._rows(self._random.randint(0, MOST_TOKENS))
            output = self.layer(*rows)
            return not is_sampled or self._is_near(output, rows)

        return self._watched(count, is_right)

    def _experts(self) -> tuple[Tensor, Tensor]:
        return self._weights.w13, self._weights.w2

    def _rows(self, tokens: int) -> tuple[Tensor, Tensor]:
        start = self._random.randrange(MOST_TOKENS)
        pool = self._pool
        return pool.hidden_states[start : start + tokens], pool.router_logits[start : start + tokens]

    def _as_captured(self, rows: tuple[Tensor, Tensor]) -> Tensor:
        tokens = rows[0].shape[0]
        size = next(size for size in SIZES if size >= tokens)
        places = torch.arange(size, device=self._device).clamp(max=tokens - 1)
        return self.layer(rows[0][places], rows[1][places])[:tokens]

    def _is_near(self, output: Tensor, rows: tuple[Tensor, Tensor]) -> bool:
        expected = reference(Inputs(*rows), self._weights, LAYER.top_k)
        return bool((output.float() - expected).norm() <= MAX_RELATIVE_ERROR * expected.norm())

    def _watched(self, count: int, is_right: Callable[[bool], bool]) -> Soaked:
        every = max(count // SAMPLES, 1)
        compared, wrong, before, blocks = 0, 0, self._held(), 0
        for index in range(count):
            is_sampled = index % every == every - 1
            compared += is_sampled
            wrong += not is_right(is_sampled)
            if index == count // 10:
                before, blocks = self._held(), sys.getallocatedblocks()
        after = self._held()
        return Soaked(count, compared, wrong, _difference(after, before), sys.getallocatedblocks() - blocks)

    def _held(self) -> Held:
        gc.collect()
        host = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
        if self._device == "cpu":
            return Held(0, 0, host)
        torch.cuda.synchronize()
        return Held(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host)


def _difference(after: Held, before: Held) -> Held:
    return Held(
        after.allocated - before.allocated, after.reserved - before.reserved, after.host - before.host
    )
