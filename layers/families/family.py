"""How the fields of a transformers config are read: `Family`, and the readers that families share.

Configs are read by their attributes, and transformers is not imported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from layers.config import RouterConfig, SharedGate
from moe_ops import Activation, RoutingConfig
from moe_ops.types import GroupScore, ScoreFn

RoutingReader = Callable[[Any, int], RoutingConfig]
ActivationReader = Callable[[Any], Activation]
WidthReader = Callable[[Any], int | None]

_PLAIN = RouterConfig()

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
_NEEDED = object()


def refuse(config: Any, field: str, why: str, value: object = _NEEDED) -> ValueError:
    """The error that names a field of the config that we cannot express."""
    found = get_field(config, field) if value is _NEEDED else value
    return ValueError(f"{config.model_type}: {field}={found!r}: {why}")


def get_field(config: Any, *names: str) -> Any:
    """The first of the fields that the config has; a dot leads into a nested config."""
    for name in names:
        value: Any = config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        if value is not None:
            return value
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """How the configs of a model type are read.

    Attributes:
        routing: the routing of a config, given K.
        width: field with the intermediate size of an expert.
        router: options of the gate.
        correction_switch: field that says whether there is a selection bias, "" when there always or never is.
        activation: the activation of a config.
        shared: width of the shared expert of a config, None or 0 for none.
        shared_gate: see `SharedExpertConfig`.
        shared_activation: None for that of the experts.
        combination: field that says how shared and routed output are combined, "" for their sum.
        latent: field with the size of the experts' space, "" where it is that of the layer.
        has_bias: experts have biases.
        needs: (field, allowed values, why not another): anything else is refused.
    """

    routing: RoutingReader
    width: str = "moe_intermediate_size"
    router: RouterConfig = _PLAIN
    correction_switch: str = ""
    activation: ActivationReader = lambda config: named_activation(config, "hidden_act")
    shared: WidthReader = lambda config: None
    shared_gate: SharedGate = "plain"
    shared_activation: ActivationReader | None = None
    combination: str = ""
    latent: str = ""
    has_bias: bool = False
    needs: tuple[tuple[str, tuple[object, ...], str], ...] = ()


def named_activation(config: Any, field: str) -> Activation:
    """The activation that a field names."""
    name = get_field(config, field)
    if name not in _ACTIVATIONS:
        raise refuse(config, field, f"expected one of {', '.join(map(repr, _ACTIVATIONS))}")
    return Activation(_ACTIVATIONS[name])  # type: ignore[arg-type]


def named(field: str) -> ActivationReader:
    """Reads the activation that a field names."""
    return lambda config: named_activation(config, field)


def silu(config: Any) -> Activation:
    """SiLU, whatever activation the config names for other parts of the model."""
    return Activation("silu")


def clamped_silu(config: Any) -> Activation:
    """SiLU on clamped gate and up, whatever activation the config names for other parts."""
    return Activation("silu", limit=get_field(config, "swiglu_limit"))


def step_silu(field: str) -> ActivationReader:
    """SiLU, clamped after it by the limits of a field, one per layer; 0 is none."""

    def activation(config: Any) -> Activation:
        limits = {limit or 0.0 for limit in get_field(config, field) or (0.0,)}
        if len(limits) > 1:
            raise refuse(config, field, "expected one limit for all layers")
        limit = float(limits.pop())
        return Activation("swiglustep", limit=limit) if limit else named_activation(config, "hidden_act")

    return activation


def swiglu_oai(interleaved: bool) -> ActivationReader:
    """gpt-oss' activation, with rows of gate and up alternating or not."""
    return lambda config: Activation(
        "swiglu_oai",
        alpha=get_field(config, "swiglu_alpha"),
        limit=get_field(config, "swiglu_limit"),
        interleaved=interleaved,
    )


def relu2(config: Any) -> Activation:
    """Squared ReLU, for experts without a gate."""
    if get_field(config, "mlp_hidden_act") != "relu2":
        raise refuse(config, "mlp_hidden_act", "expected 'relu2' for experts without a gate")
    return Activation("relu2")


def softmax(renormalize: bool | str, scale: str = "") -> RoutingReader:
    """Softmax over all experts; `renormalize` may name a field."""
    return lambda config, top_k: RoutingConfig(
        top_k,
        renormalize=bool(get_field(config, renormalize)) if isinstance(renormalize, str) else renormalize,
        scale=_scale(config, scale),
    )


def _scale(config: Any, field: str) -> float:
    value = get_field(config, field) if field else None
    return 1.0 if value is None else float(value)


def topk_softmax(config: Any, top_k: int) -> RoutingConfig:
    """Softmax over the chosen logits (gpt-oss, Granite)."""
    return RoutingConfig(top_k, order="topk_then_score", renormalize=False)  # sums to one already


def grouped(
    score_fn: ScoreFn = "sigmoid",
    fill: float = float("-inf"),
    group_score: GroupScore = "top2_sum",
    norm: bool | str = "norm_topk_prob",
) -> RoutingReader:
    """Groups first, as DeepSeek does; `norm` may name a field, without which weights are renormalised."""

    def routing(config: Any, top_k: int) -> RoutingConfig:
        renormalize = norm if isinstance(norm, bool) else getattr(config, norm, True)
        plain = RoutingConfig(
            top_k,
            score_fn=score_fn,
            renormalize=renormalize,
            renorm_eps=1e-20 if renormalize else 0.0,
            scale=_scale(config, "routed_scaling_factor"),
        )
        groups, topk_groups = get_field(config, "n_group") or 1, get_field(config, "topk_group") or 1
        if groups == 1:
            return plain
        return replace(
            plain, num_groups=groups, topk_groups=topk_groups, group_score=group_score, group_fill=fill
        )

    return routing


def deepseek_v2(config: Any, top_k: int) -> RoutingConfig:
    """Softmax scores, with or without groups."""
    if get_field(config, "topk_method") == "greedy":
        return softmax(False, "routed_scaling_factor")(config, top_k)
    if get_field(config, "topk_method") == "group_limited_greedy":
        return grouped("softmax", 0.0, "max", norm=False)(config, top_k)
    raise refuse(config, "topk_method", "expected 'greedy' or 'group_limited_greedy'")


def sigmoid(eps: float = 0.0, scale: str = "", norm: bool | str = True) -> RoutingReader:
    """Sigmoid scores without groups; `scale` names a field, and `norm` may."""

    def routing(config: Any, top_k: int) -> RoutingConfig:
        renormalize = norm if isinstance(norm, bool) else bool(get_field(config, norm))
        return RoutingConfig(
            top_k,
            score_fn="sigmoid",
            renormalize=renormalize,
            renorm_eps=eps if renormalize else 0.0,
            scale=_scale(config, scale),
        )

    return routing


def kolibri(config: Any, top_k: int) -> RoutingConfig:
    """Logits decide, and a sigmoid of the chosen ones weighs."""
    return RoutingConfig(
        top_k,
        score_fn="sigmoid",
        order="topk_then_score",
        renormalize=bool(get_field(config, "norm_topk_prob")),
    )


def cohere(config: Any, top_k: int) -> RoutingConfig:
    """Softmax or sigmoid over the chosen logits, by config."""
    if get_field(config, "expert_selection_fn") == "softmax":
        return topk_softmax(config, top_k)
    return kolibri(config, top_k)


def llama4(config: Any, top_k: int) -> RoutingConfig:
    """A sigmoid of the one chosen logit."""
    return RoutingConfig(top_k, score_fn="sigmoid", order="topk_then_score", renormalize=False)


def times(width: str, count: str) -> WidthReader:
    """Several shared experts are one of the summed width."""
    return lambda config: (get_field(config, width) or 0) * (get_field(config, count) or 0)


def field(name: str) -> WidthReader:
    """Reads a width from one field."""
    return lambda config: get_field(config, name)
