"""Layers of quantised experts of `python -m benchmarks parallel`: whole on ranks and in parts, beside plain ones."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.parallel_layers import sharded, styles, ways
from benchmarks.parallel_state import Row, State, in_graphs_us, make_layer, routed_evenly, tell
from layers import FusedMoE, RouterOutput, WeightScale, quantise_experts

_FORMATS: dict[str, Callable[[FusedMoE], None]] = {
    "float8 blocks": partial(quantise_experts, kind=WeightScale.BLOCK),
    "MXFP4": partial(quantise_experts, kind=WeightScale.GROUP, block=(1, 32), dtype=torch.uint8),
    "int4 with zero points": partial(
        quantise_experts, kind=WeightScale.GROUP, dtype=torch.uint4, zero_points=True
    ),
}


@torch.no_grad()
def quantised(state: State) -> list[Row]:
    """A few tokens of each rank and many, for each format: its experts in parts, and whole behind exchanges."""
    rows: list[Row] = []
    for name, quantise in _FORMATS.items():
        plain = make_layer(state, state.scale.quantised)
        whole = copy.deepcopy(plain)
        quantise(whole)
        for tokens in (*state.scale.decode, state.scale.prefill // state.size):
            tell(state, rows, format=name, tokens_per_rank=tokens, **_times(state, plain, whole, tokens))
    return rows


def _times(state: State, plain: FusedMoE, whole: FusedMoE, tokens: int) -> Row:
    draw = partial(routed_evenly, tokens=tokens, workload=state.scale.quantised, seed=7)
    parts = [draw(replace(state, rank=rank)) for rank in range(state.size)]
    calls = ways(state, whole, parts)
    best, mine = list(calls)[-1], parts[state.rank]
    beside = sharded(state, plain, styles(state, tokens)[best])
    calls[f"plain {best}"] = partial(beside, mine[0], RouterOutput(*mine))
    return {f"{name} us": us for name, us in in_graphs_us(state, calls).items()}
