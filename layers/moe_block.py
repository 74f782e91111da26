"""The whole MoE block of a transformer layer: gate, routed experts, shared experts."""

import torch
from torch import Tensor, nn

from layers.config import MoEConfig
from layers.fused_moe import FusedMoE
from layers.router import Router
from layers.shared_experts import SharedExperts


class MoEBlock(nn.Module):
    """Gate, routed experts and shared experts, with the shared output entering the experts' own sum.

    Args:
        config: the layer, its router and its shared experts.
        expert_map: see `FusedMoE`.
        device, dtype: of the parameters.

    Attributes:
        gate: `Router`.
        experts: `FusedMoE`.
        shared_experts: `SharedExperts` or None.
    """

    def __init__(
        self,
        config: MoEConfig,
        expert_map: Tensor | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(config, device=device, dtype=dtype)
        self.experts = FusedMoE(config, expert_map, device=device, dtype=dtype)
        shared = config.shared_experts
        self.shared_experts = (
            None if shared is None else SharedExperts(config, shared, device=device, dtype=dtype)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] to [..., H]: routed and shared experts of every token."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # [T, H]
        router_logits = self.gate(tokens)  # [T, E]
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        return self.experts(tokens, router_logits, shared).reshape(hidden_states.shape)
