"""Layers of quantised experts of `python -m benchmarks parallel`: whole on ranks and in parts, beside plain ones."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.parallel_layers import sharded, styles
from benchmarks.parallel_state import Row, State, expect_close, in_graphs_us, make_layer, routed_evenly, tell
from layers import FusedMoE, RouterOutput, WeightScale, quantise_experts
from layers.parallel import ExpertTensorParallel

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
    parts = [
        routed_evenly(replace(state, rank=rank), tokens, state.scale.quantised, 7)
        for rank in range(state.size)
    ]
    hidden, *chosen = (torch.cat(each) for each in zip(*parts, strict=True))
    every, mine = (hidden, RouterOutput(hidden, *chosen)), parts[state.rank]
    own = mine[0], RouterOutput(*mine)
    expected = whole(*every)
    calls: dict[str, Callable[[], Tensor]] = {
        "tensor parallel": partial(_shared(state, whole, ExpertTensorParallel()), *every)
    }
    ways = {name: style for name, style in styles(state, tokens).items() if "batches" not in name}
    calls |= {name: partial(_shared(state, whole, style), *own) for name, style in ways.items()}
    for name, call in calls.items():
        part = expected if name == "tensor parallel" else expected[state.rank * tokens :][:tokens]
        expect_close(state, call(), part, f"{name}, {tokens} tokens")
    best = list(ways)[-1]
    calls[f"plain {best}"] = partial(sharded(state, plain, ways[best]), *own)
    return {f"{name} us": us for name, us in in_graphs_us(state, calls).items()}


def _shared(state: State, whole: FusedMoE, style: Any) -> FusedMoE:
    return parallelize_module(copy.deepcopy(whole), state.mesh["ep"], style, src_data_rank=None)
