"""transformers' configs as `MoEConfig`: one `Family` says how the configs of one model type are read.

A field that changes what a block computes and that we cannot express is named in the refusal; a model type that is
not in the tables is refused as a whole. Nothing here imports transformers: a config is read by its attributes.
"""

from dataclasses import replace
from typing import Any

from layers.config import ExpertsConfig, MoEConfig, RouterConfig, SharedExpertConfig
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
    config = family_config(config)
    family = FAMILIES[config.model_type]
    for field, allowed, why in family.needs:
        if get_field(config, field) not in allowed:
            raise refuse(config, field, why)
    top_k = _int(config, *_TOP_K, "ffn_config.moe_top_k")
    if family.router.weight_on == "input" and top_k != 1:
        raise refuse(
            config, "num_experts_per_tok", "weights are applied to the input of one expert per token"
        )
    return MoEConfig(
        num_experts=_int(config, *_NUM_EXPERTS, "ffn_config.moe_num_experts"),
        top_k=top_k,
        hidden_size=_int(config, "hidden_size", "d_model"),
        intermediate_size=_int(config, family.width),
        routing=family.routing(config, top_k),
        activation=family.activation(config),
        has_bias=family.has_bias,
        router=_router(config, family),
        shared_experts=_shared_config(config, family),
        experts=ExpertsConfig(latent_size=get_field(config, family.latent) if family.latent else None),
    )


def _router(config: Any, family: Family) -> RouterConfig:
    if family.correction_switch and not get_field(config, family.correction_switch):
        return replace(family.router, has_correction_bias=False)
    return family.router


def _shared_config(config: Any, family: Family) -> SharedExpertConfig | None:
    width = family.shared(config)
    if not width:
        return None
    activation = None if family.shared_activation is None else family.shared_activation(config)
    combination = get_field(config, family.combination) if family.combination else "sum"
    return SharedExpertConfig(width, family.shared_gate, activation, combination)


def family_config(config: Any) -> Any:
    """The config that has the experts' fields: this one, or the text config inside it.

    Raises:
        TypeError, ValueError: it is no config of transformers, or of a family that is refused or not known.
    """
    if not isinstance(model_type := getattr(config, "model_type", None), str):
        raise TypeError(f"config is a {type(config).__name__}: expected a config of transformers")
    for each in (config, _inner_config(config)):
        if why := REFUSED.get(each.model_type):
            raise refuse(each, why.field, why.reason)
        if each.model_type in FAMILIES:
            return each
    raise ValueError(f"model_type={model_type!r}: no family of mixture-of-experts models that is known")


def _inner_config(config: Any) -> Any:
    """The text config of a model of several parts; the config itself where transformers cannot tell which it is."""
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):
        return config
