"""Routing by what a user brought instead of `topk_routing`: an override of the layer's, or a routing function."""

from typing import Any

import torch
from torch import Tensor, nn

from layers.config import MoEConfig, RoutingFunction
from layers.routed_experts import KnownExperts
from moe_ops import _checks
from moe_ops.errors import describe, type_error, value_error


def route_by_override(
    override: nn.Module, config: MoEConfig, logits: Tensor, hidden_states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(topk_weights, topk_ids) of a `routing_override`; without the scale where the output is scaled."""
    if isinstance(override, KnownExperts) and config.router.scale_on == "output":
        return override(hidden_states, logits, override.unscaled)
    return _pair("routing_override", override(hidden_states, logits))


def route_by_function(
    function: RoutingFunction, config: MoEConfig, logits: Tensor, hidden_states: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(topk_weights in the compute dtype, topk_ids int32) of a `routing_function`. Ids of no expert choose none.

    Raises:
        TypeError, ValueError: it returned something else than weights [T, K] and integers [T, K], in this order.
    """
    if hidden_states is None:
        value_error("hidden_states=None: expected a tensor [..., H] for the routing_function")
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    returned = function(tokens, logits, config.top_k, config.routing.renormalize)
    weights, ids = _pair("routing_function", returned)
    for name, tensor in (("topk_weights", weights), ("topk_ids", ids)):
        _checks.expect_shape(f"{name} of routing_function", tensor, (logits.shape[0], config.top_k))
    if weights.is_complex():
        type_error("topk_weights of routing_function has dtype {}: expected a real one", weights.dtype)
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        type_error(
            "topk_ids of routing_function has dtype {}: expected integers, behind topk_weights", ids.dtype
        )
    return weights.to(_checks.compute_dtype(weights.dtype)), _in_32_bits(ids)


def _in_32_bits(ids: Tensor) -> Tensor:
    """Ids of no expert for those that would wrap round."""
    if ids.dtype == torch.int32:
        return ids
    return ids.long().clamp(-1, torch.iinfo(torch.int32).max).int()


def _pair(name: str, returned: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(returned, tuple | list):
        type_error("{} returned {}: expected (topk_weights, topk_ids)", name, describe(returned))
    if len(returned) != 2:
        value_error("{} returned {} values: expected (topk_weights, topk_ids)", name, len(returned))
    weights, ids = returned
    return weights, ids
