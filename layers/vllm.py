"""For people who come from vLLM: its layer's keyword arguments give ours. docs/from_vllm.md maps the other names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layers.config import MoEConfig, RouterConfig
from layers.fused_moe import FusedMoE
from moe_ops import RoutingConfig
from moe_ops.types import ScoreFn


@dataclass(frozen=True, kw_only=True)
class FusedMoEArguments:
    """What vLLM's `FusedMoE` (mid-2025) is constructed with, under its names and with its defaults.

    Args:
        num_experts, top_k, hidden_size, intermediate_size: as in `layers.MoEConfig`.
        params_dtype: of the parameters; None is `torch.get_default_dtype()`.
        reduce_results: whether ranks add up their outputs; one device has nothing to add.
        renormalize, scoring_func, use_grouped_topk, num_expert_group, topk_group: as in `moe_ops.RoutingConfig`; groups
            count only with `use_grouped_topk`. With a correction bias a group's score is the sum of its two best.
        e_score_correction_bias: [E], for the selection only.
        custom_routing_function: (hidden_states, gating_output, topk, renormalize) -> (weights, ids).
        apply_router_weight_on_input, activation: as in `layers.MoEConfig`.
        prefix: plays no part: a layer's name is in no graph.
        enable_eplb, num_redundant_experts: places for replicas, which need balancing; see `FusedMoE.set_eplb_state`.
        quant_config, tp_size, ep_size, dp_size: only their defaults, sizes also 1.

    Raises:
        ValueError, TypeError: an argument, named with its value, that has another form here.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    params_dtype: torch.dtype | None = None
    reduce_results: bool = False
    renormalize: bool = True
    use_grouped_topk: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    quant_config: Any = None
    tp_size: int | None = None
    ep_size: int | None = None
    dp_size: int | None = None
    prefix: str = ""
    custom_routing_function: Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]] | None = None
    scoring_func: ScoreFn = "softmax"
    e_score_correction_bias: Tensor | None = None
    apply_router_weight_on_input: bool = False
    activation: str = "silu"
    enable_eplb: bool = False
    num_redundant_experts: int = 0

    def __post_init__(self) -> None:
        for name, elsewhere in _ELSEWHERE.items():
            value, expected = getattr(self, name), None if name == "quant_config" else 1
            if value is not None and value != expected:
                raise ValueError(f"{name}={value!r}: expected {expected}; {elsewhere}")
        if self.num_redundant_experts and not self.enable_eplb:
            raise ValueError(
                f"num_redundant_experts={self.num_redundant_experts} with enable_eplb=False: expected 0, or True"
            )
        if self.use_grouped_topk and (self.num_expert_group is None or self.topk_group is None):
            raise ValueError(
                f"num_expert_group={self.num_expert_group}, topk_group={self.topk_group}: expected both with "
                "use_grouped_topk=True"
            )
        if self.use_grouped_topk and self.custom_routing_function is not None:
            raise ValueError("use_grouped_topk=True with custom_routing_function: expected one of them")

    def config(self) -> MoEConfig:
        """The layer as our config."""
        return MoEConfig(
            self.num_experts,
            self.top_k,
            self.hidden_size,
            self.intermediate_size,
            routing=self._routing(),
            activation=self.activation,
            num_redundant_experts=self.num_redundant_experts,
            router=RouterConfig(
                has_correction_bias=self.e_score_correction_bias is not None,
                weight_on="input" if self.apply_router_weight_on_input else "output",
                routing_function=self.custom_routing_function,
            ),
        )

    def _routing(self) -> RoutingConfig:
        groups: dict[str, Any] = {"num_groups": self.num_expert_group, "topk_groups": self.topk_group}
        groups["group_score"] = "max" if self.e_score_correction_bias is None else "top2_sum"
        options = groups if self.use_grouped_topk else {}
        return RoutingConfig(self.top_k, self.scoring_func, renormalize=self.renormalize, **options)


_ELSEWHERE = {
    "quant_config": "experts here have floating weights",
    "tp_size": "give layers.FusedMoE the rank's shard=TensorShard(...) and add up the outputs of all ranks",
    "ep_size": "give layers.FusedMoE the rank's expert_map, from layers.determine_expert_map",
    "dp_size": "gather tokens and scatter outputs around the layer",
}


def fused_moe(**arguments: Any) -> FusedMoE:
    """Our layer from the keyword arguments of vLLM's; see `FusedMoEArguments`.

    Returns:
        A module with `forward(hidden_states, router_logits)`, `weight_loader` and `make_expert_params_mapping`.

    Raises:
        TypeError, ValueError: an unknown or missing argument, or a value that has another form here.

    Example:
        >>> layer = layers.vllm.fused_moe(num_experts=8, top_k=2, hidden_size=64, intermediate_size=128)
        >>> output = layer(hidden_states, router_logits)
    """
    given = FusedMoEArguments(**arguments)
    layer = FusedMoE(given.config(), dtype=given.params_dtype)
    if given.e_score_correction_bias is not None:
        layer.e_score_correction_bias = given.e_score_correction_bias.detach().float()
    return layer
