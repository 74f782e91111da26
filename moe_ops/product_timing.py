"""Times the ways to compute one grouped product on a GPU, each of them compared with float64 first.

For `python -m benchmarks tune`, and for compilers that are asked to choose by time. Times are medians of CUDA-graph
replays in turns. What a replay multiplies with was not in the L2 cache, and rows are spread over the experts as routers
do it: evenly but for chance in one half of the calls, in the other by popularity that falls as 1/rank.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.activation import apply_activation
from moe_ops.kernels import gemm_config, tma
from moe_ops.kernels.gemm import Gemm
from moe_ops.kernels.gemm_tables import LaunchConfig
from moe_ops.kernels.grouped_gemm import plan
from moe_ops.kernels.program import Program, TensorMeta
from moe_ops.types import Activation

_GAIN = 0.98  # of the time of the choice in use: what is saved must be more than noise
_OF_L2, _MOST_COPIES = 4, 16
_BUDGET_MS, _LEAST_ROUNDS, _MOST_ROUNDS = 30.0, 5, 30
_PER_16_BYTES = 8  # of bfloat16
_ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-12}  # of the norm of a row; else twice the dtype's epsilon


@dataclass(frozen=True, slots=True)
class GroupedMm:
    """torch's own product, behind a gather and in front of an activation where ours does these itself."""

    def __str__(self) -> str:
        return "_grouped_mm"


Way = LaunchConfig | GroupedMm


class Timed(NamedTuple):
    """How long a way takes, in microseconds; infinite where `failure` says why it was dropped."""

    way: Way
    microseconds: float
    failure: str = ""


Calls = Sequence[Callable[[], object]]
Stopwatch = Callable[[Sequence[Calls]], Sequence[float]]
"""Microseconds of one call of each, of which all are timed in turns."""


def ways(gemm: Gemm) -> tuple[Way, ...]:
    """What is worth timing: the choice in use first, then tiles of half to twice the rows that an expert asks for."""
    chosen, rows = gemm_config.pick_config(gemm), gemm_config.rows_of_one_height(gemm)
    near = [each for each in gemm_config.alternatives(gemm) if rows <= 2 * each.block_m <= 4 * rows]
    library = (GroupedMm(),) if takes_grouped_mm(gemm) else ()
    return tuple(dict.fromkeys((chosen, *near, *library)))


def takes_grouped_mm(gemm: Gemm) -> bool:
    """Whether torch's product computes it: bfloat16 in 16-byte pieces, no bias, an activation that is an operator."""
    weight, x = gemm.linear.weight.meta, gemm.x.meta
    named = gemm.activation is None or isinstance(gemm.activation, Activation)
    plain = gemm.linear.bias is None and gemm.max_tokens is None and gemm.rows_per_tile is None and named
    lies = tma.allows(gemm.gpu, weight, tma.boxed_weight(weight, False))
    in_order = gemm.top_k is not None or tma.allows(gemm.gpu, x, tma.boxed_rows(x))
    sizes = weight.shape[1] % _PER_16_BYTES == 0 and weight.shape[2] % _PER_16_BYTES == 0
    return plain and weight.dtype == torch.bfloat16 and lies and in_order and sizes


def fastest(timed: Sequence[Timed]) -> Way:
    """The fastest where it saves 2 % of the first, the choice in use; else that.

    Raises RuntimeError when the choice in use fails: then nothing here is to be trusted.
    """
    in_use = timed[0]
    if in_use.failure:
        raise RuntimeError(f"the choice in use, {in_use.way}, {in_use.failure}")
    best = min(timed, key=lambda each: each.microseconds)
    return best.way if best.microseconds < _GAIN * in_use.microseconds else in_use.way


def graph_times(calls: Sequence[Calls]) -> list[float]:
    """The `Stopwatch` of a GPU."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs = [_captured(each, pool, stream) for each in calls]
    longest = max(_elapsed_ms(graph) for graph in graphs)
    rounds = int(min(max(_BUDGET_MS / longest, _LEAST_ROUNDS), _MOST_ROUNDS))
    times = [[_elapsed_ms(graph) for graph in graphs] for _ in range(rounds)]
    return [1e3 * statistics.median(mine) / len(each) for mine, each in zip(zip(*times), calls, strict=True)]


def _captured(calls: Calls, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # loads kernels, which a capture may not
            call()
        torch.cuda.synchronize()
        # Without `torch.cuda.graph`, which collects garbage: seconds in a process that holds a model's graphs.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def _elapsed_ms(graph: torch.cuda.CUDAGraph) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    graph.replay()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after)


def measure(
    gemm: Gemm, among: Iterable[Way], device: torch.device, stopwatch: Stopwatch = graph_times
) -> list[Timed]:
    """Times each way to compute `gemm` on `device`, on tensors of its own; a wrong or failing one has no time."""
    with torch.no_grad():
        trial = Trial.of(timed_as(gemm), device)
        failures = {way: trial.failure(way) for way in among}
        right = [way for way, failure in failures.items() if not failure]
        times = dict(zip(right, stopwatch([trial.calls(way) for way in right]) if right else ()))
    return [Timed(way, times.get(way, math.inf), failure) for way, failure in failures.items()]


def timed_as(gemm: Gemm) -> Gemm:
    """The product that is timed for this one and all that differ in nothing that takes time.

    A gate without a name counts as one that has one: its tensors are not known here.
    """
    activation = gemm.activation
    if activation is not None and not isinstance(activation, Activation):
        name = "silu" if activation.is_gated else "relu2"
        activation = Activation(name, interleaved=activation.is_gated and activation.interleaved)
    num_ids = gemm.num_ids if gemm.is_part else None
    return replace(gemm, out="out", tail=False, activation=activation, num_ids=num_ids)


class Routing(NamedTuple):
    """Slots in expert order [S] int32, and where each expert's begin [E+1] int32."""

    sorted_slots: Tensor
    expert_offsets: Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """A product with tensors to multiply: copies of its weight, more than the L2 cache holds, and several routings."""

    gemm: Gemm
    tensors: dict[str, Tensor]
    weights: tuple[Tensor, ...]
    routings: tuple[Routing, ...]
    reference: Tensor
    """Of the first weight and the last routing, float64."""

    @classmethod
    def of(cls, gemm: Gemm, device: torch.device) -> "Trial":
        """With numbers that are the same in every run."""
        generator = torch.Generator(device).manual_seed(gemm.num_slots)
        linear = gemm.linear
        tensors = {gemm.x.name: _filled(gemm.x.meta, generator, 1.0)}
        if linear.bias is not None:
            tensors[linear.bias.name] = _filled(linear.bias.meta, generator, 1.0)
        scale = linear.weight.meta.shape[2] ** -0.5
        copies = _copies(linear.weight.meta, device)
        weights = tuple(_filled(linear.weight.meta, generator, scale) for _ in range(copies))
        routings = tuple(_routing(gemm, skew, generator) for skew in (0.0, 1.0))
        reference = _reference(gemm, {**tensors, linear.weight.name: weights[0]}, routings[-1])
        return cls(gemm, tensors, weights, routings, reference)

    def failure(self, way: Way) -> str:
        """What is wrong with a way; empty if nothing is."""
        try:
            out = self._call(way, self.weights[0], self.routings[-1])()
        except Exception as error:  # whatever a compiler or a launch says
            return f"does not run: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        norms = self.reference.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        errors = (out.double() - self.reference).norm(dim=1) / norms
        worst = torch.where(_are_here(self.routings[-1], len(out)), errors, 0.0).max().item()
        allowed = _ALLOWED.get(out.dtype, 2 * torch.finfo(out.dtype).eps)
        return "" if worst <= allowed else f"is wrong: {worst:.1e} of a row's norm, allowed are {allowed:.1e}"

    def calls(self, way: Way) -> list[Callable[[], Tensor]]:
        """What is timed."""
        return [self._call(way, weight, routing) for routing in self.routings for weight in self.weights]

    def _call(self, way: Way, weight: Tensor, routing: Routing) -> Callable[[], Tensor]:
        tensors = {**self.tensors, self.gemm.linear.weight.name: weight, **routing._asdict()}
        if isinstance(way, GroupedMm):
            return lambda: _by_library(self.gemm, tensors)
        filled = Program(*plan(self.gemm, way), (self.gemm.out,)).filled
        return lambda: filled.run(tensors)[0]


def _copies(weight: TensorMeta, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    wanted = _OF_L2 * torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(1, math.ceil(wanted / (math.prod(weight.shape) * weight.dtype.itemsize))), _MOST_COPIES)


def _filled(meta: TensorMeta, generator: torch.Generator, scale: float) -> Tensor:
    """Normal numbers in a tensor of this description."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, meta.strides, strict=True))
    start = 0 if meta.aligned else 1
    storage = torch.empty(length + start, dtype=meta.dtype, device=generator.device)
    return storage.normal_(0, scale, generator=generator).as_strided(meta.shape, meta.strides, start)


def _routing(gemm: Gemm, skew: float, generator: torch.Generator) -> Routing:
    """Experts of each token, drawn without repetition with a popularity of 1 / rank ** skew."""
    device, num_experts = generator.device, gemm.linear.weight.meta.shape[0]
    top_k, num_ids = gemm.top_k or 1, gemm.num_ids or num_experts
    ranks = torch.randperm(num_ids, generator=generator, device=device) + 1
    chance = torch.rand(gemm.num_slots // top_k, num_ids, generator=generator, device=device)
    chosen = (-skew * ranks.log() - chance.log().neg().log()).topk(top_k, dim=1).indices.flatten()
    ids = chosen.clamp_max(num_experts)
    counts = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    return Routing(ids.argsort(stable=True).to(torch.int32), offsets)


def _are_here(routing: Routing, num_rows: int) -> Tensor:
    """Which rows an expert of the weight has; others are not written."""
    return torch.arange(num_rows, device=routing.expert_offsets.device) < routing.expert_offsets[-1]


def _groups(
    gemm: Gemm, tensors: dict[str, Tensor], routing: Routing
) -> Iterator[tuple[int, int, int, Tensor]]:
    """Of each expert that has rows: its number, its first and end row, and the rows."""
    x, ends = tensors[gemm.x.name], routing.expert_offsets.tolist()
    for expert, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        slots = routing.sorted_slots[start:end]
        if end > start:
            yield expert, start, end, x[start:end] if gemm.top_k is None else x[slots // gemm.top_k]


def _reference(gemm: Gemm, tensors: dict[str, Tensor], routing: Routing) -> Tensor:
    linear = gemm.linear
    weight = tensors[linear.weight.name]
    out = torch.zeros(gemm.num_slots, gemm.features, dtype=torch.float64, device=weight.device)
    for expert, start, end, rows in _groups(gemm, tensors, routing):
        product = rows.double() @ weight[expert].double().T
        if linear.bias is not None:
            product += tensors[linear.bias.name][expert].double()
        out[start:end] = _activated(product, gemm.activation)
    return out


def _activated(product: Tensor, activation: Any) -> Tensor:
    return product if activation is None else apply_activation(product, activation)


def _by_library(gemm: Gemm, tensors: dict[str, Tensor]) -> Tensor:
    x, weight = tensors[gemm.x.name], tensors[gemm.linear.weight.name]
    rows = x if gemm.top_k is None else torch.ops.moe.permute(x, tensors["sorted_slots"])
    product = torch.ops.aten._grouped_mm(rows, weight.transpose(1, 2), offs=tensors["expert_offsets"][1:])
    if gemm.activation is None:
        return product
    return torch.ops.moe.gated_activation(product, gemm.activation.spec)
