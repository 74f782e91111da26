"""A small layer written with the public functions, for tests of passes."""

from typing import NamedTuple

import torch
from torch import Tensor

import moe_ops

# More slots than a layer is written out for on a CPU, unless its experts are as small as these.
TOKENS, HIDDEN, EXPERTS, INTERMEDIATE, TOP_K = 9, 16, 4, 8, 2
MANY_TOKENS = 257  # whose products stay calls on a CPU
ROUTING = moe_ops.RoutingConfig(top_k=TOP_K)


class Inputs(NamedTuple):
    """Arguments of the layer."""

    hidden_states: Tensor
    router_logits: Tensor
    w13: Tensor
    w2: Tensor


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.float32, dynamic: bool = False) -> Inputs:
    """Seeded inputs; `dynamic` marks the token dimension."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (tokens, HIDDEN),
        (tokens, EXPERTS),
        (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        (EXPERTS, HIDDEN, INTERMEDIATE),
    )
    made = Inputs(*(torch.randn(shape, generator=generator).to(dtype) / 2 for shape in shapes))
    if dynamic:
        for tensor in made[:2]:
            torch._dynamo.mark_dynamic(tensor, 0)
    return made


def layer(hidden_states: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """All stages through the public function."""
    return moe_ops.fused_moe(hidden_states, router_logits, w13, w2, ROUTING)


def routed(router_logits: Tensor) -> tuple[Tensor, Tensor, moe_ops.DispatchPlan]:
    """Router and dispatch by hand."""
    weights, ids = moe_ops.topk_routing(router_logits, ROUTING)
    return weights, ids, moe_ops.build_dispatch(ids, EXPERTS)


def up(hidden_states: Tensor, w13: Tensor, plan: moe_ops.DispatchPlan) -> Tensor:
    """The first GEMM by hand, without its gate."""
    rows = moe_ops.permute(hidden_states, plan.sorted_slots)
    return moe_ops.grouped_gemm(rows, w13, plan.expert_offsets)
