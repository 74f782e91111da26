"""transformers' configs as `MoEConfig`: one `Family` says how the configs of one model type are read.

A field that changes what a block computes and that we cannot express is named in the refusal; a model type that is
not in the tables is refused as a whole. Nothing here imports transformers: a config is read by its attributes.
"""

from typing import Any

from layers.config import MoEConfig, SharedExpertConfig
from layers.families.family import Family, get_field, refuse
from layers.families.refused import REFUSED
from layers.families.table import FAMILIES

_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k")


def _int(config: Any, *names: str) -> int:
    value = get_field(config, *names)
    if isinstance(value, list | tuple) and len(set(value)) == 1:  # one per layer, all alike
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool):
        name = next((name for name in names if get_field(config, name) is not None), names[0])
        raise refuse(config, name, "expected one int for all layers", value)
    return value


def moe_config(config: Any) -> MoEConfig:
    """See `MoEConfig.from_hf`."""
    config, family = _family_of(config)
    for field, allowed, why in family.needs:
        if get_field(config, field) not in allowed:
            raise refuse(config, field, why)
    top_k = _int(config, *_TOP_K, "ffn_config.moe_top_k")
    if family.router.weight_on == "input" and top_k != 1:
        raise refuse(
            config, "num_experts_per_tok", "weights are applied to the input of one expert per token"
        )
    width = family.shared(config)
    return MoEConfig(
        num_experts=_int(config, *_NUM_EXPERTS, "ffn_config.moe_num_experts"),
        top_k=top_k,
        hidden_size=_int(config, "hidden_size", "d_model"),
        intermediate_size=_int(config, family.width),
        routing=family.routing(config, top_k),
        activation=family.activation(config),
        has_bias=family.has_bias,
        router=family.router,
        shared_experts=SharedExpertConfig(width, gated=family.shared_gate) if width else None,  # type: ignore[arg-type]
    )


def _family_of(config: Any) -> tuple[Any, Family]:
    """The config that has the experts' fields, and how it is read."""
    if not isinstance(model_type := getattr(config, "model_type", None), str):
        raise TypeError(f"config is a {type(config).__name__}: expected a config of transformers")
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    for each in (config, inner):
        if why := REFUSED.get(each.model_type):
            raise refuse(each, why.field, why.reason)
        if each.model_type in FAMILIES:
            return each, FAMILIES[each.model_type]
    raise ValueError(f"model_type={model_type!r}: no family of mixture-of-experts models that is known")
