"""The gate: one linear layer from hidden states to a logit per expert."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layers.config import MoEConfig


class Router(nn.Module):
    """`logits = hidden @ weight.T + bias`; scoring and selection belong to `moe_ops.topk_routing`.

    Args:
        config: `num_experts`, `hidden_size` and `router` are read.
        device, dtype: of the parameters.

    Attributes:
        weight: [E, H].
        bias: [E] or None.
    """

    bias: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_dtype = config.router.gate_dtype
        E, H = config.num_experts, config.hidden_size
        self.weight = nn.Parameter(torch.empty(E, H, device=device, dtype=dtype))
        bias = nn.Parameter(torch.empty(E, device=device, dtype=dtype)) if config.router.has_bias else None
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills weight and bias uniformly in ±1/sqrt(H), as `nn.Linear` does."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] to logits [..., E] in `gate_dtype`, or in the dtype of the input."""
        dtype = hidden_states.dtype if self.gate_dtype is None else self.gate_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(hidden_states.to(dtype), self.weight.to(dtype), bias)
