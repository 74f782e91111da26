"""Rebalancing in `python -m benchmarks parallel`: experts of uneven popularity, before and after they have moved."""

import time

import torch
from torch import Tensor, nn

from benchmarks.parallel_demo import busiest
from benchmarks.parallel_layers import sharded
from benchmarks.parallel_state import (
    Row,
    State,
    captured,
    expect_close,
    in_turns,
    make_layer,
    seeded,
    synchronize,
    tell,
)
from layers import RouterOutput
from layers.parallel import ExpertParallel, ExpertRebalancer


@torch.no_grad()
def rebalancing(state: State) -> list[Row]:
    """The busiest rank's load over the mean, and a captured layer's time, before experts move and after.

    Popularity is log-normal with a deviation of 1. The graph is captured once; the outputs of one device are what it
    has to give before and after.
    """
    rows: list[Row] = []
    workload, tokens = state.scale.workload, state.scale.prefill // state.size
    whole = make_layer(state, workload)
    hidden, *chosen = _popular(state, tokens)
    call = hidden, RouterOutput(hidden, *chosen)
    expected = whole(*call)
    model = nn.ModuleDict({"experts": sharded(state, whole, ExpertParallel("allgather", max_tokens=tokens))})
    del whole
    rebalancer = ExpertRebalancer(model)
    output = torch.empty_like(expected)
    run = captured(state, lambda: output.copy_(model["experts"](*call)), 1)
    run()
    before = busiest(rebalancer.load_per_rank()).item()
    expect_close(state, output, expected, "before")
    us = in_turns(state, {"it": run}, 1)["it"]
    synchronize(state)
    started = time.perf_counter()
    rebalancer.start()
    rebalancer.finish()
    synchronize(state)
    moved_ms = 1e3 * (time.perf_counter() - started)
    output.zero_()
    run()
    after = busiest(rebalancer.load_per_rank()).item()
    expect_close(state, output, expected, "after")
    us_after = in_turns(state, {"it": run}, 1)["it"]
    loads = {"busiest": before, "busiest_after": after}
    times = {"us": us, "us_after": us_after, "moved_ms": moved_ms}
    tell(state, rows, experts=workload.num_experts, tokens=tokens, **loads, **times)
    return rows


def _popular(state: State, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, H], weights and ids [T, K] of this rank, drawn by the popularity of experts."""
    workload = state.scale.workload
    popularity = torch.randn(workload.num_experts, generator=seeded(11)).exp().to(state.device)
    generator = seeded(1000 + state.rank, state.device)
    hidden = torch.randn(tokens, workload.hidden_size, generator=generator, device=state.device)
    each = popularity.expand(tokens, -1)
    ids = torch.multinomial(each, workload.top_k, generator=generator)
    weights = torch.rand(ids.shape, generator=generator, device=state.device)
    return hidden.to(state.scale.dtype), weights / weights.sum(1, keepdim=True), ids.to(torch.int32)
