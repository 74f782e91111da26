"""A rank of `python -m benchmarks parallel`: what it measures on, how it takes times, what it takes for wrong."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.timing import IDLE_S, LONG_MS
from benchmarks.workloads import WORKLOADS, Workload
from layers import FusedMoE, MoEConfig

Row = dict[str, Any]
MAX_RELATIVE_ERROR = {torch.bfloat16: 8e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Scale:
    """How large: what a GPU is measured at, and the least that runs every line on a CPU.

    Attributes:
        exchanged: tokens of a rank.
        workload: of layers.
        quantised: the same, large enough to have blocks of scales.
        prefill: tokens of all ranks.
        decode: tokens of a rank.
        dtype: of tokens and weights.
        rounds, calls: how often a time is taken, and of how many calls in a row.
    """

    exchanged: tuple[int, ...]
    workload: Workload
    quantised: Workload
    prefill: int
    decode: tuple[int, ...]
    dtype: torch.dtype
    rounds: int
    calls: int


FULL = Scale((128, 4096), WORKLOADS["W3"], WORKLOADS["W3"], 16384, (1, 8, 32, 128), torch.bfloat16, 15, 10)
_SMALL = Workload("small", 8, 2, 32, 16), Workload("small, in blocks", 8, 2, 128, 256)
SMALL = Scale((8,), *_SMALL, 16, (2,), torch.float32, 2, 2)


@dataclass(frozen=True)
class State:
    """A rank and what it is to do."""

    rank: int
    size: int
    options: dict[str, Any]
    scale: Scale
    mesh: DeviceMesh
    device: torch.device

    @property
    def has_gpu(self) -> bool:
        """Whether it computes on one."""
        return self.device.type == "cuda"

    @property
    def float32(self) -> "State":
        """The same with float32 tokens and weights, whose errors show."""
        return replace(self, scale=replace(self.scale, dtype=torch.float32))


def start(rank: int, size: int, options: dict[str, Any]) -> State:
    """What the parts get, in a process that has joined the others."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("ep",))
    return State(rank, size, options, FULL if device.type == "cuda" else SMALL, mesh, device)


def tell(state: State, rows: list[Row], **row: Any) -> None:
    """Keeps a row, and shows it."""
    rows.append(row)
    if state.rank == 0:
        shown = (f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  " + "  ".join(shown), flush=True)


def synchronize(state: State) -> None:
    """Waits for the device, and for the other ranks."""
    if state.has_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    if state.has_gpu:
        torch.cuda.synchronize()


def slowest(state: State, value: float) -> float:
    """The most of all ranks."""
    told = torch.tensor([value], dtype=torch.float64, device=state.device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.item()


def in_turns(state: State, runs: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Microseconds of one of the `calls` that each of `runs` makes: the median of rounds, of each the slowest rank.

    They take turns, and what runs long is followed by a rest, so that clocks and heat fall on all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(state.scale.rounds):
        for name, run in runs.items():
            synchronize(state)
            elapsed = slowest(state, _elapsed_us(state, run))
            times[name].append(elapsed / calls)
            if elapsed > 1e3 * LONG_MS:
                time.sleep(IDLE_S)
    return {name: statistics.median(mine) for name, mine in times.items()}


def _elapsed_us(state: State, run: Callable[[], object]) -> float:
    if not state.has_gpu:
        started = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - started)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.all_reduce(torch.zeros(1, device=state.device))  # from here on the ranks' devices run together
    before.record()
    run()
    after.record()
    torch.cuda.synchronize()
    return 1e3 * before.elapsed_time(after)


def captured(state: State, call: Callable[[], object], calls: int) -> Callable[[], object]:
    """So many calls as a CUDA graph; on a CPU as they are."""

    def run() -> object:
        return [call() for _ in range(calls)]

    if not state.has_gpu:
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    synchronize(state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    synchronize(state)
    return graph.replay


def in_graph_us(state: State, call: Callable[[], object]) -> float:
    """Microseconds of a call in a CUDA graph."""
    return in_graphs_us(state, {"it": call})["it"]


def in_graphs_us(state: State, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of each in CUDA graphs that take turns."""
    graphs = {name: captured(state, call, state.scale.calls) for name, call in calls.items()}
    return in_turns(state, graphs, state.scale.calls)


def eager_us(state: State, call: Callable[[], object]) -> float:
    """Microseconds of a call that is not captured."""
    return all_eager_us(state, {"it": call})["it"]


def all_eager_us(state: State, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of each, not captured, in turns."""
    for call in calls.values():
        call()
    return in_turns(state, {name: partial(_thrice, call) for name, call in calls.items()}, 3)


def _thrice(call: Callable[[], object]) -> list[object]:
    return [call() for _ in range(3)]


def expect_close(state: State, actual: Tensor, expected: Tensor, what: str) -> None:
    """Raises ValueError on all ranks where one is wrong, also by NaN."""
    norm = expected.double().norm().item()
    error = (actual.double() - expected.double()).norm().item() / max(norm, 1e-30)
    limit = MAX_RELATIVE_ERROR[actual.dtype]
    worst = slowest(state, error if error <= limit else float("inf"))
    if not worst <= limit:
        raise ValueError(f"{what}: relative error {error:.2e} on rank {state.rank}: expected at most {limit}")


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers that every rank can draw alike."""
    return torch.Generator(device=device).manual_seed(seed)


def routed(state: State, tokens: int, workload: Workload, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, H], weights and ids [T, K] of this rank; experts are all as likely."""
    generator = seeded(1000 * seed + state.rank, state.device)
    shape = tokens, workload.hidden_size
    hidden = torch.randn(shape, generator=generator, device=state.device).to(state.scale.dtype)
    scores = torch.rand(tokens, workload.num_experts, generator=generator, device=state.device)
    weights, ids = scores.topk(workload.top_k, dim=1)
    return hidden, weights / weights.sum(1, keepdim=True), ids.to(torch.int32)


def routed_evenly(state: State, tokens: int, workload: Workload, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same, but of each token as many experts are on every rank."""
    hidden, weights, ids = routed(state, tokens, workload, seed)
    each, chosen = workload.num_experts // state.size, workload.top_k // state.size
    generator = seeded(1000 * seed + state.rank + 500, state.device)
    scores = torch.rand(tokens, state.size, each, generator=generator, device=state.device)
    first = each * torch.arange(state.size, device=state.device).unsqueeze(1)
    return hidden, weights, (scores.topk(chosen, dim=2).indices + first).flatten(1).to(ids.dtype)


def make_layer(state: State, workload: Workload, seed: int = 1) -> FusedMoE:
    """The layer of one device, the same on every rank."""
    sizes = workload.num_experts, workload.top_k, workload.hidden_size, workload.intermediate_size
    layer = FusedMoE(MoEConfig(*sizes), device="meta", dtype=state.scale.dtype).to_empty(device=state.device)
    generator = seeded(seed, state.device)
    with torch.no_grad():
        for parameter in layer.parameters():
            for expert in parameter:
                expert.normal_(0, expert.shape[-1] ** -0.5, generator=generator)
    return layer
