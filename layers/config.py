"""What a MoE layer is, as small frozen values. No tensors, no modules: configs pickle, hash and compare by value.

Everything a forward needs is settled here, once: routing and activation carry their canonical strings, so that
equal configs give equal graphs and nothing is formatted while a layer is traced.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from layers._checks import expect_choice, expect_count, expect_floating_dtype, expect_positive, expect_type
from moe_ops import Activation, RoutingConfig
from moe_ops._checks import expect_routing
from moe_ops.fused_experts import Emit as EmittedOps

Emit = Literal["auto", "stages", "fused", "batch_invariant"]
RoutingEmit = Literal["auto", "batch_invariant"]
SaveForBackward = Literal["auto", "inputs", "projections", "activations"]
SharedGate = Literal["plain", "sigmoid"]
Combination = Literal["sum", "average"]
WeightOn = Literal["output", "input"]
ScaleOn = Literal["weights", "output"]
_Options = list[tuple[str, object, tuple[object, ...]]]  # name, value, and what it may be
RoutingFunction = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]


_EMITTED: dict[SaveForBackward, EmittedOps] = {
    "inputs": "fused",
    "projections": "halves",
    "activations": "stages",
}


def emitted(emit: Emit, save_for_backward: SaveForBackward) -> EmittedOps:
    """What a forward emits now: operators that keep for backward what they should."""
    return _EMITTED.get(save_for_backward, emit) if torch.is_grad_enabled() else emit


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
        scale_on: "weights" multiplies the routed weights by `routing.scale`; "output" the sum over experts, before
            anything is added to it (vLLM's `apply_routed_scale_to_output`).
        has_expert_scale: the layer has a parameter `expert_scale` [E], by which the weight of an expert is
            multiplied after everything else (Gemma 4's `per_expert_scale`).
        routing_function: (hidden_states [T, H], router_logits [T, E], top_k, renormalize) -> (weights, ids) [T, K], in
            the place of `topk_routing`. Plain PyTorch, traced like any code; weights become float32, ids (integers of
            any width) int32. Something else is a TypeError or ValueError of the forward.

    Raises:
        TypeError, ValueError: a field has the wrong type or value; the message names all three.
    """

    has_bias: bool = False
    has_correction_bias: bool = False
    gate_dtype: torch.dtype | None = None
    weight_on: WeightOn = "output"
    scale_on: ScaleOn = "weights"
    has_expert_scale: bool = False
    routing_function: RoutingFunction | None = None

    def __post_init__(self) -> None:
        expect_type("has_bias", self.has_bias, bool)
        expect_type("has_correction_bias", self.has_correction_bias, bool)
        expect_choice("weight_on", self.weight_on, WeightOn)
        expect_choice("scale_on", self.scale_on, ScaleOn)
        expect_type("has_expert_scale", self.has_expert_scale, bool)
        if self.routing_function is not None and not callable(self.routing_function):
            raise TypeError(f"routing_function={self.routing_function!r}: expected None or a function")
        if self.routing_function is not None and self.has_correction_bias:
            raise ValueError("routing_function with has_correction_bias=True: expected one of them")
        expect_floating_dtype("gate_dtype", self.gate_dtype)


@dataclass(frozen=True, slots=True)
class SharedExpertConfig:
    """An expert that every token visits, added to the routed output after routed scaling.

    Args:
        intermediate_size: its width; several shared experts are one of the summed width.
        gated: "plain" adds it as it is (DeepSeek), "sigmoid" times `sigmoid(linear(hidden))` (Qwen2-MoE).
        activation: as in `MoEConfig`; None is that of the routed experts.
        combination: "sum" of routed and shared output, or their "average" (Cohere 2).
        overlap: one operator runs it beside the routed experts, for few tokens on a second CUDA stream; see
            `moe_ops.fused_experts_with_shared`. Hooks of `SharedExperts` and its linear layers are then not called, and
            other modules in the place of these, such as PEFT's, are a ValueError of the forward. A `ModularKernel`
            takes an output instead, and a `MoERunner` goes by its `shared_order`.

    Raises:
        TypeError, ValueError: a field has the wrong type or value.
    """

    intermediate_size: int
    gated: SharedGate = "plain"
    activation: Activation | str | None = None
    combination: Combination = "sum"
    overlap: bool = False

    def __post_init__(self) -> None:
        expect_positive("intermediate_size", self.intermediate_size)
        expect_type("overlap", self.overlap, bool)
        expect_choice("gated", self.gated, SharedGate)
        expect_choice("combination", self.combination, Combination)
        if self.activation is not None:
            object.__setattr__(self, "activation", _resolve_activation(self.activation))


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """What surrounds the products of the routed experts, where a model has more than those.

    Args:
        num_zero_experts: Z experts after the E real ones that return their input (LongCat-Flash). They have logits and
            no weights: the router has E + Z rows, and so has everything of its size.
        latent_size: experts work in a space of this size; `MoEBlock` projects into it and back (Nemotron-H's latent
            experts). Router and shared experts see what the block is given.
        padded_size: size of the experts' input and output in the weights, which a checkpoint or another backend padded;
            inputs are padded with zeros, outputs cut.
        post_norm_eps: an RMS norm with a weight [H] of each expert's output, before it is weighed (Muse Spark).
        chunk_size: at most this many tokens at a time, so that the workspace is bounded for very long inputs. Compiled
            or exported, each T beyond it is a graph of its own: how many chunks there are is part of it. Behind an
            exchange compiled code needs `max_tokens` for that.

    Raises:
        TypeError, ValueError: a field has the wrong type or value, or contradicts another one.
    """

    num_zero_experts: int = 0
    latent_size: int | None = None
    padded_size: int | None = None
    post_norm_eps: float | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        expect_count("num_zero_experts", self.num_zero_experts)
        for name in ("latent_size", "padded_size", "chunk_size"):
            if getattr(self, name) is not None:
                expect_positive(name, getattr(self, name))
        eps = self.post_norm_eps
        if eps is not None and not (isinstance(eps, float) and 0 <= eps < float("inf")):
            raise ValueError(f"post_norm_eps={eps!r}: expected None or a finite float of at least 0")
        if self.num_zero_experts and self.latent_size is not None:
            raise ValueError(
                f"num_zero_experts={self.num_zero_experts} with latent_size={self.latent_size}: expected one of them"
            )


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
        has_bias: both products of an expert have biases.
        emit: "auto" gives stage ops to a compiler and one fused op to eager PyTorch. "fused" is the choice for
            `torch.compile` or export without this project's passes, "stages" shows every stage in eager.
            "batch_invariant": a token's output has the same bits whatever other tokens are in the batch; router and
            shared experts too. Options that could not promise it are refused. See `moe_ops.batch_invariant`.
        router: gate bias, correction bias, logits dtype, where the weight is applied.
        shared_experts: None for none.
        save_for_backward: what a forward keeps while gradients are recorded. "inputs" keeps the layer's inputs and
            runs the experts again in backward, "projections" keeps the gate and up projections too and runs no
            product twice, "activations" keeps what every stage returned and runs nothing twice; each decides what
            is emitted, whatever `emit` says. "auto" is "inputs" in eager PyTorch and "projections" compiled.
            Without gradients it changes nothing.
        experts: zero experts, latent size, padding, a norm of the experts' output, chunks.
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
    experts: ExpertsConfig = ExpertsConfig()
    num_redundant_experts: int = 0

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
            expect_positive(name, getattr(self, name))
        expect_count("num_redundant_experts", self.num_redundant_experts)
        expect_type("has_bias", self.has_bias, bool)
        expect_choice("emit", self.emit, Emit)
        expect_choice("save_for_backward", self.save_for_backward, SaveForBackward)
        expect_type("router", self.router, RouterConfig)
        expect_type("experts", self.experts, ExpertsConfig)
        if self.shared_experts is not None:
            expect_type("shared_experts", self.shared_experts, SharedExpertConfig)
        object.__setattr__(self, "routing", self._resolve_routing())
        object.__setattr__(self, "activation", _resolve_activation(self.activation))
        self._check_experts()
        self._check_router()
        if self.shared_experts is not None and self.shared_experts.overlap:
            self.expect_overlap()
        if self.emit == "batch_invariant":
            self._expect_invariance()

    @property
    def router_size(self) -> int:
        """How many experts have a logit: the E real and the Z zero ones."""
        return self.num_experts + self.experts.num_zero_experts

    @property
    def expert_hidden_size(self) -> int:
        """H of an expert's input and output."""
        return self.experts.latent_size or self.hidden_size

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
        expect_routing(self.routing, self.router_size)
        padded = self.experts.padded_size
        if padded is not None and padded < self.expert_hidden_size:
            raise ValueError(
                f"experts.padded_size={padded}: expected at least the experts' size {self.expert_hidden_size}"
            )

    def _check_router(self) -> None:
        router, zero = self.router, self.experts.num_zero_experts
        if router.weight_on == "input" and self.top_k != 1:
            raise ValueError(f"top_k={self.top_k}: expected 1 with router.weight_on='input'")
        if zero and self.num_redundant_experts:
            raise ValueError(
                f"num_redundant_experts={self.num_redundant_experts} with experts.num_zero_experts={zero}: expected "
                "one of them"
            )
        if router.weight_on == "input" and zero:
            raise ValueError(
                f"experts.num_zero_experts={zero} with router.weight_on='input': expected 'output'"
            )
        if router.routing_function is None:
            return
        given = replace(self.routing, renormalize=True)
        given = replace(given, scale=1.0) if router.scale_on == "output" else given
        if given != RoutingConfig(top_k=self.top_k):
            raise ValueError(
                f"routing={self.routing.spec!r} with router.routing_function: expected only top_k and renormalize"
            )

    def expect_overlap(self) -> None:
        """Raises ValueError where an expert cannot run beside the routed ones in one operator.

        That has no place for what comes between the routed sum and the shared output, nor for other inputs.
        """
        experts, router = self.experts, self.router
        options: _Options = [
            ("experts.latent_size", experts.latent_size, (None,)),
            ("experts.padded_size", experts.padded_size, (None,)),
            ("experts.post_norm_eps", experts.post_norm_eps, (None,)),
            ("experts.chunk_size", experts.chunk_size, (None,)),
            ("router.weight_on", router.weight_on, ("output",)),
            ("router.scale_on", router.scale_on, ("weights",)),
            ("emit", self.emit, ("auto", "fused")),
            ("save_for_backward", self.save_for_backward, ("auto", "inputs")),
        ]
        _expect_allowed(options, "an overlapped shared expert")

    def _expect_invariance(self) -> None:
        """Raises ValueError for what computes with all tokens at once by operations that are not ours."""
        experts, router = self.experts, self.router
        options: _Options = [
            ("experts.num_zero_experts", experts.num_zero_experts, (0,)),
            ("experts.latent_size", experts.latent_size, (None,)),
            ("experts.post_norm_eps", experts.post_norm_eps, (None,)),
            ("router.routing_function", router.routing_function, (None,)),
            ("num_redundant_experts", self.num_redundant_experts, (0,)),
            ("save_for_backward", self.save_for_backward, ("auto",)),
        ]
        _expect_allowed(options, "emit='batch_invariant'")


def _expect_allowed(options: _Options, beside: str) -> None:
    for name, value, allowed in options:
        if value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"{name}={value!r} with {beside}: expected {expected}")


def gate_up_size(intermediate_size: int, activation: Activation) -> int:
    """Rows of a gate-and-up projection: 2I, or I when the activation has no gate."""
    return 2 * intermediate_size if activation.is_gated else intermediate_size


def _resolve_activation(activation: Activation | str) -> Activation:
    expect_type("activation", activation, (Activation, str))
    return Activation.from_spec(activation) if isinstance(activation, str) else activation
