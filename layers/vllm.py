"""For people who come from vLLM: its layer's keyword arguments give ours. docs/from_vllm.md maps the other names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layers._checks import expect_choice, expect_floating_dtype, expect_type
from layers.config import MoEConfig, RouterConfig
from layers.fused_moe import FusedMoE
from moe_ops import RoutingConfig
from moe_ops.types import ScoreFn

CustomRouting = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ByKeyword:
    """A routing function as vLLM calls it, by the names of its arguments, in whatever order it has them."""

    function: CustomRouting

    def __call__(
        self, hidden_states: Tensor, router_logits: Tensor, top_k: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        """(weights, ids) [T, K] of tokens [T, H] and logits [T, E]."""
        return self.function(
            hidden_states=hidden_states, gating_output=router_logits, topk=top_k, renormalize=renormalize
        )


@dataclass(frozen=True, kw_only=True)
class FusedMoEArguments:
    """What vLLM's `FusedMoE` (mid-2025, and below the line what came later) is constructed with, with its defaults.

    Args:
        num_experts, top_k, hidden_size, intermediate_size: as in `layers.MoEConfig`.
        params_dtype: of the parameters; None is `torch.get_default_dtype()`.
        reduce_results: whether ranks add up their outputs; one device has nothing to add.
        renormalize, scoring_func, use_grouped_topk, num_expert_group, topk_group: as in `moe_ops.RoutingConfig`; groups
            count only with `use_grouped_topk`. With a correction bias a group's score is the sum of its two best.
        e_score_correction_bias: [E] float32, for the selection only, with groups and without. The layer's buffer has
            its memory, so that what is loaded into it later counts; until one of both is moved or cast, as by `to` or
            `to_empty`: build them where they are to be, or copy what was loaded into the layer's buffer.
        custom_routing_function: (hidden_states, gating_output, topk, renormalize) -> (weights, ids), called by these
            names.
        apply_router_weight_on_input, activation: as in `layers.MoEConfig`; but "relu2" has a gate in vLLM, where
            ours is called "relu2_no_mul".
        prefix: plays no part: a layer's name is in no graph.
        enable_eplb, num_redundant_experts: places for replicas, which need balancing; see `FusedMoE.set_eplb_state`.
        quant_config, tp_size, ep_size, dp_size: only their defaults, sizes also 1. No size is taken from a process
            group.
        has_bias, routed_scaling_factor, apply_routed_scale_to_output: as in `layers.MoEConfig`; the factor counts with
            every kind of routing but a custom one, of which it scales the output only.

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
    custom_routing_function: CustomRouting | None = None
    scoring_func: ScoreFn = "softmax"
    e_score_correction_bias: Tensor | None = None
    apply_router_weight_on_input: bool = False
    activation: str = "silu"
    enable_eplb: bool = False
    num_redundant_experts: int = 0
    # Later versions.
    has_bias: bool = False
    routed_scaling_factor: float = 1.0
    apply_routed_scale_to_output: bool = False

    def __post_init__(self) -> None:
        self._check_types()
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
        expect_choice("scoring_func", self.scoring_func, ScoreFn)
        if self.activation == "relu2":
            raise ValueError("activation='relu2': expected 'relu2_no_mul'; with a gate it is none of ours")
        if self.custom_routing_function is not None:
            self._check_custom()
        if self.e_score_correction_bias is not None:
            self._check_bias(self.e_score_correction_bias)

    def _check_custom(self) -> None:
        others = {
            "use_grouped_topk=True": self.use_grouped_topk,
            "e_score_correction_bias": self.e_score_correction_bias is not None,
            f"scoring_func={self.scoring_func!r}": self.scoring_func != "softmax",
        }
        for name, is_given in others.items():
            if is_given:
                raise ValueError(f"{name} with custom_routing_function: expected one of them")
        if self.routed_scaling_factor != 1 and not self.apply_routed_scale_to_output:
            raise ValueError(
                f"routed_scaling_factor={self.routed_scaling_factor!r} with custom_routing_function: expected 1, or "
                "apply_routed_scale_to_output=True"
            )

    def _check_types(self) -> None:
        expect_floating_dtype("params_dtype", self.params_dtype)
        for name in _FLAGS:  # others go into configs, which ask
            expect_type(name, getattr(self, name), bool)
        if self.custom_routing_function is not None and not callable(self.custom_routing_function):
            raise TypeError(f"custom_routing_function={self.custom_routing_function!r}: expected a function")

    def _check_bias(self, bias: Tensor) -> None:
        expect_type("e_score_correction_bias", bias, Tensor)
        if bias.dtype != torch.float32:
            raise TypeError(
                f"e_score_correction_bias has dtype {bias.dtype}: expected torch.float32, which is shared"
            )
        if bias.shape != (self.num_experts,):
            raise ValueError(
                f"e_score_correction_bias has shape {list(bias.shape)}: expected [{self.num_experts}]"
            )

    def config(self) -> MoEConfig:
        """The layer as our config."""
        custom = self.custom_routing_function
        return MoEConfig(
            self.num_experts,
            self.top_k,
            self.hidden_size,
            self.intermediate_size,
            routing=self._routing(),
            activation=self.activation,
            has_bias=self.has_bias,
            num_redundant_experts=self.num_redundant_experts,
            router=RouterConfig(
                has_correction_bias=self.e_score_correction_bias is not None,
                weight_on="input" if self.apply_router_weight_on_input else "output",
                scale_on="output" if self.apply_routed_scale_to_output else "weights",
                routing_function=None if custom is None else ByKeyword(custom),
            ),
        )

    def _routing(self) -> RoutingConfig:
        groups: dict[str, Any] = {"num_groups": self.num_expert_group, "topk_groups": self.topk_group}
        groups["group_score"] = "max" if self.e_score_correction_bias is None else "top2_sum"
        options = groups if self.use_grouped_topk else {}
        options |= {"renormalize": self.renormalize, "scale": self.routed_scaling_factor}
        return RoutingConfig(self.top_k, self.scoring_func, **options)


_FLAGS = (
    "use_grouped_topk",
    "enable_eplb",
    "reduce_results",
    "apply_router_weight_on_input",
    "apply_routed_scale_to_output",
)
_ELSEWHERE = {
    "quant_config": "layers.quantise_experts makes a layer one of 8 or 4 bits",
    "tp_size": "layers.parallel.ParallelConfig(tp=...) cuts a layer among ranks, TensorShard makes one of the parts",
    "ep_size": "layers.parallel.ParallelConfig(ep=True) spreads experts, layers.determine_expert_map is for one part",
    "dp_size": "layers.parallel.ParallelConfig(dp=...) is for ranks with tokens of their own",
}


def fused_moe(**arguments: Any) -> FusedMoE:
    """Our layer from the keyword arguments of vLLM's; see `FusedMoEArguments`.

    Returns:
        A module with `forward(hidden_states, router_logits)`, `weight_loader` and `make_expert_params_mapping`. Its
        parameters have `weight_loader` as an attribute, for loops over a model's parameters, until they are replaced.

    Raises:
        TypeError, ValueError: an unknown or missing argument, or a value that has another form here.

    Example:
        >>> layer = layers.vllm.fused_moe(num_experts=8, top_k=2, hidden_size=64, intermediate_size=128)
        >>> output = layer(hidden_states, router_logits)
    """
    given = FusedMoEArguments(**arguments)
    layer = FusedMoE(given.config(), dtype=given.params_dtype)
    if given.e_score_correction_bias is not None:
        layer.e_score_correction_bias = given.e_score_correction_bias.detach()
    for parameter in layer.parameters():
        parameter.weight_loader = layer.weight_loader  # type: ignore[attr-defined]
    return layer
