"""What a MoE layer is, as small frozen values. No tensors, no modules: configs pickle, hash and compare by value.

Everything a forward needs is settled here, once: routing and activation carry their canonical strings, so that
equal configs give equal graphs and nothing is formatted while a layer is traced.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from layers._checks import expect_choice, expect_positive, expect_type
from moe_ops import Activation, RoutingConfig

Emit = Literal["auto", "stages", "fused"]
SaveForBackward = Literal["auto", "inputs", "activations"]
SharedGate = Literal["plain", "sigmoid"]
WeightOn = Literal["output", "input"]


def _is_floating(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def emitted(emit: Emit, save_for_backward: SaveForBackward) -> Emit:
    """What a forward emits now. Recorded stages keep their activations; the fused operator keeps its inputs."""
    if save_for_backward == "auto" or not torch.is_grad_enabled():
        return emit
    return "stages" if save_for_backward == "activations" else "fused"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The gate in front of the experts, and how its verdict is applied.

    Args:
        has_bias: the gate's linear layer has a bias (gpt-oss).
        has_correction_bias: a float32 bias per expert is added to the scores for *selection* only
            (`e_score_correction_bias`, DeepSeek-V3).
        gate_dtype: dtype of the gate's GEMM and so of the logits, inside `torch.autocast` too; None keeps the
            model's dtype, or autocast's. Scores are computed in float32 either way; DeepSeek-V3 and GLM-4 also
            want `torch.float32` logits.
        weight_on: "output" weighs what an expert returns; "input" weighs what it is given, and needs one
            expert per token (Llama-4).

    Raises:
        TypeError, ValueError: a field has the wrong type or value; the message names all three.
    """

    has_bias: bool = False
    has_correction_bias: bool = False
    gate_dtype: torch.dtype | None = None
    weight_on: WeightOn = "output"

    def __post_init__(self) -> None:
        expect_type("has_bias", self.has_bias, bool)
        expect_type("has_correction_bias", self.has_correction_bias, bool)
        expect_choice("weight_on", self.weight_on, WeightOn)
        if self.gate_dtype is not None and not _is_floating(self.gate_dtype):
            raise TypeError(f"gate_dtype={self.gate_dtype!r}: expected None or a floating torch.dtype")


@dataclass(frozen=True, slots=True)
class SharedExpertConfig:
    """An expert that every token visits, added to the routed output after routed scaling.

    Args:
        intermediate_size: its width; several shared experts are one of the summed width.
        gated: "plain" adds it as it is (DeepSeek), "sigmoid" times `sigmoid(linear(hidden))` (Qwen2-MoE).
        activation: as in `MoEConfig`; None is that of the routed experts.

    Raises:
        TypeError, ValueError: a field has the wrong type or value.
    """

    intermediate_size: int
    gated: SharedGate = "plain"
    activation: Activation | str | None = None

    def __post_init__(self) -> None:
        expect_positive("intermediate_size", self.intermediate_size)
        expect_choice("gated", self.gated, SharedGate)
        if self.activation is not None:
            object.__setattr__(self, "activation", _resolve_activation(self.activation))


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A mixture-of-experts layer: sizes, routing, activation, and two nested configs for the rarer choices.

    Args:
        num_experts: E, counted over all devices.
        top_k: K, experts per token.
        hidden_size: H.
        intermediate_size: I of one routed expert.
        routing: how logits become weighted experts; None means `RoutingConfig(top_k=top_k)`.
        activation: an `Activation` or its canonical string; stored as an `Activation`.
        has_bias: experts have `w13_bias` and `w2_bias`.
        emit: "auto" gives stage ops to a compiler and one fused op to eager PyTorch. "fused" is the choice for
            `torch.compile` or export without this project's passes, "stages" shows every stage in eager.
        router: gate bias, correction bias, logits dtype, where the weight is applied.
        shared_experts: None for none.
        save_for_backward: what a forward keeps while gradients are recorded. "inputs" keeps the layer's inputs and
            runs the experts again in backward, "activations" keeps what every stage returned and runs nothing
            twice; either decides what is emitted, whatever `emit` says. "auto" is "inputs" in eager PyTorch and
            leaves the choice to a compiler's partitioner. Without gradients it changes nothing.
        num_redundant_experts: places for replicas beside the E experts. They are used once a placement says so;
            see `FusedMoE.set_eplb_state`.

    Raises:
        TypeError, ValueError: a field has the wrong type or value, or contradicts another one.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    routing: RoutingConfig = None  # type: ignore[assignment]  # never None after __post_init__
    activation: Activation | str = "silu"
    has_bias: bool = False
    emit: Emit = "auto"
    router: RouterConfig = RouterConfig()
    shared_experts: SharedExpertConfig | None = None
    save_for_backward: SaveForBackward = "auto"
    num_redundant_experts: int = 0

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
            expect_positive(name, getattr(self, name))
        if self.num_redundant_experts != 0:
            expect_positive("num_redundant_experts", self.num_redundant_experts)
        expect_type("has_bias", self.has_bias, bool)
        expect_choice("emit", self.emit, Emit)
        expect_choice("save_for_backward", self.save_for_backward, SaveForBackward)
        expect_type("router", self.router, RouterConfig)
        if self.shared_experts is not None:
            expect_type("shared_experts", self.shared_experts, SharedExpertConfig)
        object.__setattr__(self, "routing", self._resolve_routing())
        object.__setattr__(self, "activation", _resolve_activation(self.activation))
        self._check_experts()

    @property
    def num_physical_experts(self) -> int:
        """P: the E experts and the places for their replicas."""
        return self.num_experts + self.num_redundant_experts

    @staticmethod
    def from_hf(config: Any) -> "MoEConfig":
        """The MoE block that a config of transformers describes.

        Args:
            config: of a model, or the text config inside it; any version's, read by its attributes.

        Raises:
            TypeError: `config` is no config of transformers.
            ValueError: a field that `MoEConfig` cannot express, which is named, or a model type without a MoE block
                that is known.

        Example:
            >>> config = MoEConfig.from_hf(AutoConfig.from_pretrained(folder))
        """
        from layers.families import moe_config  # it builds a MoEConfig

        return moe_config(config)

    def gate_up_size(self, intermediate_size: int) -> int:
        """Rows of an expert's gate-and-up projection: 2I, or I when the activation has no gate."""
        return gate_up_size(intermediate_size, _resolve_activation(self.activation))

    def _resolve_routing(self) -> RoutingConfig:
        routing = RoutingConfig(top_k=self.top_k) if self.routing is None else self.routing
        expect_type("routing", routing, RoutingConfig)
        if routing.top_k != self.top_k:
            raise ValueError(
                f"top_k={self.top_k}: expected routing.top_k={routing.top_k} (give one, or both alike)"
            )
        return routing

    def _check_experts(self) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k}: expected at most num_experts={self.num_experts}")
        groups = self.routing.num_groups
        if self.num_experts % groups:
            raise ValueError(
                f"routing.num_groups={groups}: expected a divisor of num_experts={self.num_experts}"
            )
        if self.router.weight_on == "input" and self.top_k != 1:
            raise ValueError(f"top_k={self.top_k}: expected 1 with router.weight_on='input'")


def gate_up_size(intermediate_size: int, activation: Activation) -> int:
    """Rows of a gate-and-up projection: 2I, or I when the activation has no gate."""
    return 2 * intermediate_size if activation.is_gated else intermediate_size


def _resolve_activation(activation: Activation | str) -> Activation:
    expect_type("activation", activation, (Activation, str))
    return Activation.from_spec(activation) if isinstance(activation, str) else activation
