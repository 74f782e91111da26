"""Adapters of all experts of a layer, as plain tensors, and what a layer with them computes, in float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from layers import ExpertLora, FusedMoE, LowRank
from tests.kernels.oracles import activate

SCALINGS = (0.7, 2.0, 1.0)
RANKS = (5, 3, 1)  # of adapters, the first with the most


class Adapter(NamedTuple):
    gate_up: LowRank
    down: LowRank
    scaling: float


def make_adapters(layer: FusedMoE) -> list[Adapter]:
    """The same on every rank, of a layer that holds all experts."""
    generator = torch.Generator().manual_seed(7)
    return [Adapter(*_low_ranks(layer, rank, generator), scaling) for rank, scaling in zip(RANKS, SCALINGS)]


def _low_ranks(layer: FusedMoE, rank: int, generator) -> tuple[LowRank, LowRank]:
    E, dtype = layer.num_local_experts, layer.w13_weight.dtype

    def drawn(*shape: int) -> Tensor:
        return torch.randn(E, *shape, generator=generator, dtype=torch.float64).mul(0.3).to(dtype)

    weights = layer.w13_weight, layer.w2_weight
    return tuple(LowRank(drawn(rank, each.shape[2]), drawn(each.shape[1], rank)) for each in weights)


def attach(layer: FusedMoE, adapters: list[Adapter], adapter_ids: Tensor) -> ExpertLora:
    """To the experts that `layer` holds."""
    dtype = adapters[0].gate_up.a.dtype
    layer.lora = ExpertLora(layer, len(adapters), RANKS[0], adapter_ids, dtype=dtype)
    for number, adapter in enumerate(adapters):
        layer.lora.load_adapter(number, *adapter)
    return layer.lora


def draw_ids(num_tokens: int, seed: int = 0, dtype=torch.int32) -> Tensor:
    """Adapters 0 to 2, and numbers that are none: -1 and 3."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, len(RANKS) + 1, (num_tokens,), generator=generator).to(dtype)


def oracle(layer: FusedMoE, adapters, hidden: Tensor, routed, adapter_ids: Tensor) -> Tensor:
    """[T, H] in float64, differentiable: each slot's expert as a dense one with the changed weights."""
    out = [
        sum(
            (
                weight * _expert(layer, adapters, expert, adapter, row)
                for weight, expert in zip(weights, ids)
                if 0 <= expert < layer.config.num_experts
            ),
            torch.zeros_like(row),
        )
        for row, weights, ids, adapter in zip(
            hidden.double(), routed.topk_weights.double(), routed.topk_ids.tolist(), adapter_ids.tolist()
        )
    ]
    return torch.stack(out) if out else hidden.double()


def _expert(layer: FusedMoE, adapters, expert: int, adapter: int, row: Tensor) -> Tensor:
    w13, w2 = layer.w13_weight[expert].double(), layer.w2_weight[expert].double()
    if 0 <= adapter < len(adapters):
        gate_up, down, scaling = adapters[adapter]
        scaling = torch.tensor(scaling, dtype=torch.float32).double()  # as it is kept
        w13 = w13 + scaling * gate_up.b[expert].double() @ gate_up.a[expert].double()
        w2 = w2 + scaling * down.b[expert].double() @ down.a[expert].double()
    up = w13 @ row
    up = up if layer.w13_bias is None else up + layer.w13_bias[expert].double()
    out = w2 @ activate(up, layer.config.activation)
    out = out if layer.w2_bias is None else out + layer.w2_bias[expert].double()
    if layer.post_norm_weight is None:
        return out
    eps = layer.config.experts.post_norm_eps
    return out / (out.square().mean() + eps).sqrt() * layer.post_norm_weight.double()
