"""Exchanges of `python -m benchmarks parallel`: there and back by each dispatcher, beside bare collectives."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.parallel_state import Row, State, eager_us, expect_close, in_graph_us, routed, tell
from benchmarks.ranks import WAIT_S
from benchmarks.workloads import Workload
from layers import ExpertOutput
from layers.parallel import (
    AllGatherPrepareAndFinalize,
    AllToAllPrepareAndFinalize,
    ExpertRanks,
    PaddedAllToAllPrepareAndFinalize,
    SymmetricPrepareAndFinalize,
)
from layers.weigh_and_reduce import TopKWeightAndReduceNoOp


def exchanges(
    state: State,
    owners: ExpertRanks,
    tokens: int,
    hidden_size: int,
    top_k: int,
    timeout: float = WAIT_S,
) -> dict[str, Any]:
    """Those that there are on this device, for so many tokens of a rank."""
    group = state.mesh["ep"]
    found: dict[str, Any] = {
        "allgather": AllGatherPrepareAndFinalize(group, max_tokens=tokens),
        "padded": PaddedAllToAllPrepareAndFinalize(group, owners, max_tokens=tokens),
        "variable": AllToAllPrepareAndFinalize(group, owners),
    }
    if state.has_gpu or state.size == 1:
        sizes = {"max_tokens": tokens, "hidden_size": hidden_size, "top_k": top_k, "dtype": state.scale.dtype}
        found["symmetric"] = SymmetricPrepareAndFinalize(group, owners, timeout=timeout, **sizes)
    return found


def there_and_back(exchange: Any, given: Sequence[Tensor], num_experts: int) -> Tensor:
    """Tokens to the ranks, and what came to each as its part of the sums."""
    prepared = exchange.prepare(*given, num_experts, None)
    rows = ExpertOutput(prepared.hidden_states)
    return exchange.finalize(rows, prepared, TopKWeightAndReduceNoOp(), None)


def exchange(state: State) -> list[Row]:
    """Dispatch and combine of each dispatcher, beside bare collectives of the same bytes."""
    rows: list[Row] = []
    workload = state.scale.workload
    owners = ExpertRanks(workload.num_experts, state.size)
    for tokens in state.scale.exchanged:
        given = routed(state, tokens, workload, tokens)
        wanted = ranks_wanted(owners, given[2])
        bare = bare_us(state, tokens, workload)
        made = exchanges(state, owners, tokens, workload.hidden_size, workload.top_k)
        for name, each in made.items():
            copies = (
                torch.full((tokens,), state.size, device=state.device)
                if name == "allgather"
                else wanted.sum(1)
            )
            expected = (given[0].float() * copies.unsqueeze(1)).to(given[0].dtype)
            expect_close(state, there_and_back(each, given, workload.num_experts), expected, name)
        for name, each in made.items():
            times = exchange_us(state, name, each, given, workload.num_experts)
            tell(state, rows, **_exchange_row(state, name, tokens, wanted, workload, times), **bare)
    return rows


def ranks_wanted(owners: ExpertRanks, ids: Tensor) -> Tensor:
    """[T, W] bool: which ranks have an expert for a token."""
    ranks = torch.arange(owners.num_ranks, device=ids.device)
    return (owners.of(ids).unsqueeze(2) == ranks).any(1)


def exchange_us(
    state: State, name: str, each: Any, given: Sequence[Tensor], num_experts: int
) -> tuple[float, float]:
    """Microseconds of the way there, and there and back."""
    measure = eager_us if name == "variable" else in_graph_us
    there = measure(state, lambda: each.prepare(*given, num_experts, None))
    return there, measure(state, lambda: there_and_back(each, given, num_experts))


def bare_us(state: State, tokens: int, workload: Workload) -> Row:
    """Collectives of the bytes that the all-gather moves: tokens, weights and ids there, sums back."""
    row = workload.hidden_size * state.scale.dtype.itemsize
    mine = torch.zeros(tokens, row + 8 * workload.top_k, dtype=torch.uint8, device=state.device)
    every = torch.zeros(state.size * tokens, mine.shape[1], dtype=torch.uint8, device=state.device)
    sums = torch.zeros(tokens, workload.hidden_size, dtype=state.scale.dtype, device=state.device)
    parts = torch.zeros(
        state.size * tokens, workload.hidden_size, dtype=state.scale.dtype, device=state.device
    )
    gather = in_graph_us(state, lambda: dist.all_gather_into_tensor(every, mine))
    if not state.has_gpu:
        return {"bare_gather_us": gather}  # gloo before torch 2.13 has no reduce-scatter of one tensor
    scatter = in_graph_us(state, lambda: dist.reduce_scatter_tensor(sums, parts))
    return {"bare_gather_us": gather, "bare_scatter_us": scatter}


def _exchange_row(
    state: State, name: str, tokens: int, wanted: Tensor, workload: Workload, times: tuple[float, float]
) -> Row:
    """Logical bytes are those of rows that somebody wants, here too; on the wire are those that leave a rank."""
    there, both = times
    row = workload.hidden_size * state.scale.dtype.itemsize
    needed = int(wanted.sum()) - int(wanted[:, state.rank].sum())
    static = tokens * (state.size - 1)
    sent = static if name in ("allgather", "padded") else needed
    way = {"there": (there, sent * (row + 8 * workload.top_k)), "back": (both - there, sent * row)}
    figures: Row = {"dispatcher": name, "tokens": tokens, "there_us": there, "both_us": both}
    for direction, (us, num_bytes) in way.items():
        figures[f"{direction}_wire_GBps"] = num_bytes / max(us, 1e-3) / 1e3
        figures[f"{direction}_logical_GBps"] = int(wanted.sum()) * row / max(us, 1e-3) / 1e3
    return figures
