"""Routing by what a user brought instead of `topk_routing`: an override of the layer's, or a routing function."""

from torch import Tensor, nn

from layers.config import MoEConfig, RoutingFunction
from layers.routed_experts import KnownExperts
from moe_ops._checks import compute_dtype
from moe_ops.errors import value_error


def route_by_override(
    override: nn.Module, config: MoEConfig, logits: Tensor, hidden_states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(topk_weights, topk_ids) of a `routing_override`; without the scale where the output is scaled."""
    if isinstance(override, KnownExperts) and config.router.scale_on == "output":
        return override(hidden_states, logits, override.unscaled)
    return override(hidden_states, logits)


def route_by_function(
    function: RoutingFunction, config: MoEConfig, logits: Tensor, hidden_states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(topk_weights in the compute dtype, topk_ids int32) of a `routing_function`."""
    if hidden_states is None:
        value_error("hidden_states=None: expected a tensor [..., H] for the routing_function")
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    weights, ids = function(tokens, logits, config.top_k, config.routing.renormalize)
    return weights.to(compute_dtype(weights.dtype)), ids.int()
