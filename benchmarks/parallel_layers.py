"""Layers of `python -m benchmarks parallel`: prefill on W ranks against one, decode with experts whole and in parts."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.parallel_state import (
    Row,
    State,
    all_eager_us,
    expect_close,
    in_graphs_us,
    make_layer,
    routed,
    routed_evenly,
    tell,
)
from layers import FusedMoE, RouterOutput
from layers.parallel import ExpertParallel, ExpertTensorParallel

Call = Callable[[], Tensor]


def styles(state: State, tokens: int) -> dict[str, Any]:
    """Ways to share experts whole, for at most so many tokens of a rank."""
    ways: dict[str, Any] = {
        "allgather": ExpertParallel("allgather", max_tokens=tokens),
        "allgather, 2 batches": ExpertParallel("allgather", max_tokens=tokens, batches=2),
    }
    if state.has_gpu or state.size == 1:
        ways["symmetric"] = ExpertParallel("symmetric", max_tokens=tokens)
    return ways


def sharded(state: State, whole: FusedMoE, style: Any) -> FusedMoE:
    """A layer of the same weights, shared in this way. `whole` keeps its own."""
    layer = copy.deepcopy(whole, {id(each): each for each in whole.parameters()})
    return parallelize_module(layer, state.mesh["ep"], style, src_data_rank=None)  # all have the same


@torch.no_grad()
def layer(state: State) -> list[Row]:
    """A layer's prefill on W ranks, each with its part of the tokens, against one rank with all of them."""
    rows: list[Row] = []
    workload, total = state.scale.workload, state.scale.prefill
    each = total // state.size
    whole = make_layer(state, workload)
    parts = [routed(replace(state, rank=rank), each, workload, 5) for rank in range(state.size)]
    hidden, weights, ids = (torch.cat([part[i] for part in parts]) for i in range(3))
    every = hidden, RouterOutput(hidden, weights, ids)
    mine = parts[state.rank][0], RouterOutput(*parts[state.rank])
    expected = whole(*every)[state.rank * each :][:each]
    calls: dict[str, Call] = {"one rank": partial(whole, *every)}
    for name, style in styles(state, each).items():
        calls[name] = partial(sharded(state, whole, style), *mine)
        expect_close(state, calls[name](), expected, name)
    times, captured = all_eager_us(state, calls), in_graphs_us(state, calls)
    for name, us in times.items():
        row = {"way": name, "tokens": total, "us": us, "captured_us": captured[name]}
        if name != "one rank":
            row["speedup"] = times["one rank"] / us
            row["captured_speedup"] = captured["one rank"] / captured[name]
        tell(state, rows, **row)
    return rows


def busiest_rank(ids: Tensor, size: int, num_experts: int) -> float:
    """Of the experts that anybody chose, how many are on the rank with most of them, over the mean."""
    loads = torch.bincount(ids.unique() * size // num_experts, minlength=size)
    return (loads.max() / loads.float().mean()).item()


@torch.no_grad()
def decode(state: State) -> list[Row]:
    """A few tokens of each rank: experts whole, and in parts with all tokens on every rank.

    Experts are chosen by chance, which gives one rank more of them, and then as many on every rank: what is left of the
    difference is what the exchange costs.
    """
    rows: list[Row] = []
    workload = state.scale.workload
    whole = make_layer(state, workload)
    for tokens, draw in product(state.scale.decode, (routed, routed_evenly)):
        parts = [draw(replace(state, rank=rank), tokens, workload, 7) for rank in range(state.size)]
        times = {f"{name} us": us for name, us in in_graphs_us(state, ways(state, whole, parts)).items()}
        busiest = busiest_rank(torch.cat([ids for *_, ids in parts]), state.size, workload.num_experts)
        tell(state, rows, tokens_per_rank=tokens, busiest=busiest, **times)
    return rows


def ways(state: State, whole: FusedMoE, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Call]:
    """Experts in parts, with all tokens on every rank, and whole ones behind each exchange, with a rank's own.

    Each gives what `whole` does. parts: of each rank, as `routed` draws them.
    """
    (hidden, *chosen), mine = (torch.cat(each) for each in zip(*parts, strict=True)), parts[state.rank]
    every, tokens = (hidden, RouterOutput(hidden, *chosen)), len(mine[0])
    calls: dict[str, Call] = {
        "tensor parallel": partial(sharded(state, whole, ExpertTensorParallel()), *every)
    }
    for name, style in styles(state, tokens).items():
        if "batches" not in name:
            calls[name] = partial(sharded(state, whole, style), mine[0], RouterOutput(*mine))
    expected = whole(*every)
    for name, call in calls.items():
        part = expected if name == "tensor parallel" else expected[state.rank * tokens :][:tokens]
        expect_close(state, call(), part, f"{name}, {tokens} tokens")
    return calls
