"""What the MoE benchmark times: each takes (inputs, weights, top_k) and returns [T, H]."""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workloads import Inputs, Weights, route

Implementation = Callable[[Inputs, Weights, int], Tensor]


def ours(inputs: Inputs, weights: Weights, top_k: int) -> Tensor:
    """`moe_ops.fused_moe`."""
    return _fused_moe(top_k, False)(inputs, weights)


def ours_interleaved(inputs: Inputs, weights: Weights, top_k: int) -> Tensor:
    """The same of gate and up rows in turns."""
    return _fused_moe(top_k, True)(inputs, weights)


@lru_cache(maxsize=None)
def _fused_moe(top_k: int, interleaved: bool) -> Callable[[Inputs, Weights], Tensor]:
    import moe_ops

    routing, gate = moe_ops.RoutingConfig(top_k=top_k), moe_ops.Activation(interleaved=interleaved)
    return lambda inputs, weights: moe_ops.fused_moe(
        inputs.hidden_states, inputs.router_logits, weights.w13, weights.w2, routing, gate
    )


def plain_compile(inputs: Inputs, weights: Weights, top_k: int) -> Tensor:
    """`moe_ops.fused_moe(emit="fused")` under stock torch.compile, without our passes."""
    return _compiled_layer("fused", top_k)(
        inputs.hidden_states, inputs.router_logits, weights.w13, weights.w2
    )


def passes_compile(inputs: Inputs, weights: Weights, top_k: int) -> Tensor:
    """`moe_ops.fused_moe` under torch.compile with our passes, which fuse its stages."""
    return _compiled_layer("auto", top_k)(inputs.hidden_states, inputs.router_logits, weights.w13, weights.w2)


@lru_cache(maxsize=None)
def _compiled_layer(emit: str, top_k: int) -> Callable[..., Tensor]:
    import inductor_passes
    import moe_ops

    routing = moe_ops.RoutingConfig(top_k=top_k)

    def layer(hidden_states: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return moe_ops.fused_moe(hidden_states, router_logits, w13, w2, routing, emit=emit)  # type: ignore[arg-type]

    options = inductor_passes.options() if emit == "auto" else None
    return torch.compile(layer, fullgraph=True, dynamic=False, options=options)


def gmm(hidden_states: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, top_k: int) -> Tensor:
    """What a PyTorch user writes today: sort the routed rows by expert, two `grouped_mm`, undo the sort, add up."""
    topk_weights, topk_ids = route(router_logits, top_k)
    sorted_ids, order = torch.sort(topk_ids.flatten(), stable=True)
    experts = torch.arange(w13.shape[0], device=w13.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
    gate, up = F.grouped_mm(hidden_states[order // top_k], w13.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    expert_out = F.grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=ends)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    routed = expert_out[inverse].view(*topk_ids.shape, -1)  # [T, K, H]
    return (routed * topk_weights[..., None]).sum(1).to(hidden_states.dtype)


@lru_cache(maxsize=None)
def _compiled_gmm() -> Callable[..., Tensor]:
    return torch.compile(gmm, fullgraph=True, dynamic=False)


def gmm_compile(inputs: Inputs, weights: Weights, top_k: int) -> Tensor:
    """`gmm` under stock torch.compile, one graph per shape."""
    return _compiled_gmm()(inputs.hidden_states, inputs.router_logits, weights.w13, weights.w2, top_k)


def gmm_eager(inputs: Inputs, weights: Weights, top_k: int) -> Tensor:
    """`gmm` as it stands."""
    return gmm(inputs.hidden_states, inputs.router_logits, weights.w13, weights.w2, top_k)


def on_transposed(implementation: Implementation, interleaved: bool = False) -> Implementation:
    """`implementation` on the same weights with input features first; gpt-oss has gate and up columns in turns."""

    @lru_cache(maxsize=None)
    def stored_transposed(weight: Tensor) -> Tensor:
        return weight.transpose(1, 2).contiguous().transpose(1, 2)

    @lru_cache(maxsize=None)
    def in_turns(w13: Tensor) -> Tensor:
        gate, up = w13.transpose(1, 2).chunk(2, dim=2)
        return torch.stack((gate, up), 3).flatten(2).transpose(1, 2)

    def run(inputs: Inputs, weights: Weights, top_k: int) -> Tensor:
        w13 = (in_turns if interleaved else stored_transposed)(weights.w13)
        return implementation(inputs, Weights(w13, stored_transposed(weights.w2)), top_k)

    return run


IMPLEMENTATIONS: dict[str, Implementation] = {
    "fused_moe": ours,
    "gmm_compile": gmm_compile,
    "gmm_eager": gmm_eager,
    "plain_compile": plain_compile,
    "passes_compile": passes_compile,
    "fused_moe_transposed": on_transposed(ours),
    "fused_moe_as_gpt_oss": on_transposed(ours_interleaved, interleaved=True),
    "gmm_compile_transposed": on_transposed(gmm_compile),
}
