"""Times on a GPU: medians of CUDA-graph replays."""

import statistics
from collections.abc import Callable, Sequence

import torch

MIN_REPLAYS, MAX_REPLAYS = 7, 60


def time_graph(calls: Sequence[Callable[[], object]], budget_ms: float) -> float:
    """Microseconds per call: the median replay of one CUDA graph that holds all `calls`, over their number.

    The calls work on different inputs, so that a replay does not find in the cache what the call before it read.
    """
    for call in calls:  # loads kernels, which a capture may not
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    graph.replay()
    times = _event_times(graph.replay, budget_ms)
    del graph, outputs
    return statistics.median(times) * 1e3 / len(calls)


def _event_times(run: Callable[[], object], budget_ms: float) -> list[float]:
    first = _elapsed_ms([_record(run)])[0]
    replays = int(min(max(budget_ms / max(first, 1e-3), MIN_REPLAYS), MAX_REPLAYS))
    return _elapsed_ms([_record(run) for _ in range(replays)])


def _record(run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    run()
    after.record()
    return before, after


def _elapsed_ms(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]
