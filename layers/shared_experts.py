"""The expert that every token visits."""

import torch
from torch import Tensor, nn

from layers._checks import expect_features, expect_floating_dtype, expect_linear_dtype, expect_type
from layers.config import Combination, MoEConfig, SharedExpertConfig, gate_up_size
from moe_ops import RoutingConfig, dense_gemm, fused_experts, gated_activation, topk_routing
from moe_ops.activation import activation_spec
from moe_ops.arguments import SharedExpert
from moe_ops.errors import value_error

_SIGMOID = RoutingConfig(1, "sigmoid", renormalize=False)


class SharedExperts(nn.Module):
    """A dense gated MLP beside the routed experts, optionally scaled per token by a sigmoid gate.

    Args:
        config: the layer's sizes, and the activation when `shared` has none.
        shared: width, gating and activation of this expert.
        device, dtype: of the parameters.

    Attributes:
        gate_up_proj: linear, H to 2I, gate columns first, or alternating when the activation is interleaved
            (H to I for an ungated activation).
        down_proj: linear, I to H.
        gate: linear, H to 1, or None for a plain shared expert.
        combination: that of `shared`, for who adds this expert's output to the routed one.

    Raises:
        TypeError: `config` or `shared` is not the config it should be.
    """

    def __init__(
        self,
        config: MoEConfig,
        shared: SharedExpertConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        expect_type("config", config, MoEConfig)
        expect_type("shared", shared, SharedExpertConfig)
        expect_floating_dtype("dtype", dtype)
        H, I = config.hidden_size, shared.intermediate_size
        self.activation = config.activation if shared.activation is None else shared.activation
        rows = gate_up_size(I, self.activation)  # type: ignore[arg-type]  # an Activation after __post_init__
        self.gate_up_proj = nn.Linear(H, rows, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(I, H, bias=False, device=device, dtype=dtype)
        is_gated = shared.gated == "sigmoid"
        self.gate = nn.Linear(H, 1, bias=False, device=device, dtype=dtype) if is_gated else None
        self.combination: Combination = shared.combination
        self._is_invariant = config.emit == "batch_invariant"

    def reset_parameters(self) -> None:
        """Fills the weights uniformly in ±1/sqrt(fan_in), as `nn.Linear` does."""
        self.gate_up_proj.reset_parameters()
        self.down_proj.reset_parameters()
        if self.gate is not None:
            self.gate.reset_parameters()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[T, H] to [T, H].

        Raises:
            TypeError, ValueError: `hidden_states` is not a floating point tensor [T, H], or of another dtype than the
                weights outside of autocast.
        """
        expect_features("hidden_states", hidden_states, self.gate_up_proj.in_features)
        if self._is_invariant:
            return self._row_by_row(hidden_states)
        expect_linear_dtype("hidden_states", hidden_states, self.gate_up_proj)
        gate_up = self.gate_up_proj(hidden_states)  # [T, 2I]
        expert_out = self.down_proj(gated_activation(gate_up, self.activation))
        if self.gate is None:
            return expert_out
        return torch.sigmoid(self.gate(hidden_states)) * expert_out

    def _row_by_row(self, hidden_states: Tensor) -> Tensor:
        """As the only expert, chosen by every token."""
        weights = hidden_states.new_ones((hidden_states.shape[0], 1))
        if self.gate is not None:
            logits = dense_gemm(hidden_states, _weight_of("gate", self.gate), emit="batch_invariant")
            weights, _ = topk_routing(logits, _SIGMOID, emit="batch_invariant")
            weights = weights.masked_fill(logits.isnan(), float("nan"))  # a router would drop the token
        ids = torch.zeros_like(weights, dtype=torch.int32)
        w13, w2 = (weight.unsqueeze(0) for weight in self._weights())
        return fused_experts(hidden_states, w13, w2, weights, ids, self.activation, emit="batch_invariant")

    def operand(self, hidden_states: Tensor) -> SharedExpert:
        """What `FusedMoE` takes in place of an output, to run this expert beside its own."""
        gate, spec = self.gate, activation_spec(self.activation)
        expect_linear_dtype("hidden_states", hidden_states, self.gate_up_proj)
        weights = None if gate is None else torch.sigmoid(gate(hidden_states))  # [T, 1]
        return SharedExpert(*self._weights(), weights, spec)

    def _weights(self) -> tuple[Tensor, Tensor]:
        return _weight_of("gate_up_proj", self.gate_up_proj), _weight_of("down_proj", self.down_proj)


def _weight_of(name: str, linear: nn.Module) -> Tensor:
    """What there is of a linear layer that is not called. Raises ValueError for one that is more, as PEFT's are."""
    kind = type(linear)
    if kind.forward is not nn.Linear.forward or linear.bias is not None:
        value_error(
            "shared_experts.{} is a {}.{}: expected torch.nn.Linear without a bias, of which overlap=True and "
            "emit='batch_invariant' read the weight",
            name,
            kind.__module__,
            kind.__name__,
        )
    return linear.weight  # type: ignore[return-value]  # of any module, to a type checker
