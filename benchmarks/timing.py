"""Times on a GPU: medians of CUDA-graph replays, taken in turns."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

MIN_REPLAYS, MAX_REPLAYS = 7, 60
LONG_MS, IDLE_S = 2.0, 0.03  # after a long replay the card rests, or the next one meets lower clocks


def capture(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One CUDA graph of all `calls`; returns its replay.

    The calls work on different inputs, so that a replay does not find in the cache what the call before it read.
    """
    for call in calls:  # loads kernels, which a capture may not
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def time_in_turns(replays: Sequence[Callable[[], object]], budget_ms: float) -> list[float]:
    """Median milliseconds of each replay. They take turns, so that the card's clocks and heat fall on all alike."""
    first = max(_elapsed_ms(replay) for replay in replays)
    rounds = int(min(max(budget_ms / max(first, 1e-3), MIN_REPLAYS), MAX_REPLAYS))
    times: list[list[float]] = [[] for _ in replays]
    for _ in range(rounds):
        for replay, mine in zip(replays, times):
            if first > LONG_MS:
                time.sleep(IDLE_S)
            mine.append(_elapsed_ms(replay))
    return [statistics.median(mine) for mine in times]


def _elapsed_ms(run: Callable[[], object]) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    run()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after)
