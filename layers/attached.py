"""What a user sets on a layer: its adapters, a capture, an override of its routing, parameters that ranks share."""

from dataclasses import fields
from typing import Any

from torch import nn

from layers._checks import expect_type
from layers.config import MoEConfig
from layers.expert_parameters import weight_shapes
from layers.lora import ExpertLora
from layers.weights.expert_loader import is_distributed
from moe_ops.errors import describe

_CALLED = {
    "capture": "a RoutedExpertsCapture",
    "routing_override": "a module (hidden_states, router_logits) -> (topk_weights, topk_ids)",
}


def expect_attached(layer: Any, name: str, value: Any) -> None:
    """Raises TypeError or ValueError where an attribute of a layer gets what it cannot use."""
    expect_own_config(layer, name, value)
    if value is None:
        return
    if name == "lora":
        _expect_lora(layer, value)
    if isinstance(value, nn.Parameter):
        _expect_shared(layer, name, value)
    if name in _CALLED and (isinstance(value, type) or not callable(value)):
        raise TypeError(f"{name}={describe(value)}: expected None or {_CALLED[name]}")


def expect_own_config(module: Any, name: str, value: Any) -> None:
    """Raises TypeError or ValueError where a module that was built by one config gets another.

    What a forward goes by is decided when a module is built, so half of the other config would count.
    """
    built_by = vars(module).get("config")
    if name != "config" or built_by is None:
        return
    expect_type("config", value, MoEConfig)
    changed = [
        each.name for each in fields(value) if getattr(value, each.name) != getattr(built_by, each.name)
    ]
    if changed:
        raise ValueError(
            f"config changes {', '.join(changed)}: expected the one that this {type(module).__name__} was built by; "
            "build another one, which load_state_dict(..., assign=True) gives these weights"
        )


def _expect_shared(layer: Any, name: str, value: nn.Parameter) -> None:
    """A rank would take a whole parameter for its part: `load_state_dict(assign=True)` sets what it is given.

    Of a layer that no style has shared FSDP2 sets whole ones for a forward.
    """
    is_shared = layer.parallel is not None and is_distributed(layer._parameters.get(name))
    if is_shared and not is_distributed(value):
        raise TypeError(
            f"{name}={describe(value)}: expected a DTensor, for ranks share it; "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict loads whole ones"
        )


def _expect_lora(layer: Any, value: Any) -> None:
    if not isinstance(value, ExpertLora):
        raise TypeError(f"lora={describe(value)}: expected None or an ExpertLora, got {type(value).__name__}")
    ours = weight_shapes(layer.config, layer.config.num_physical_experts)
    for part, given, shape in zip(("w13", "w2"), value.experts.shapes, ours, strict=True):
        if given[1:] != shape[1:]:  # how many experts there are, a forward asks
            raise ValueError(
                f"lora changes {part} of {list(given[1:])} features: expected {list(shape[1:])}, those of this layer"
            )
