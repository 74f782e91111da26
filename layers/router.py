"""The gate: one linear layer from hidden states to a logit per expert, and what routing makes of its logits."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layers._checks import expect_features, expect_floating_dtype, expect_type
from layers.config import MoEConfig
from moe_ops import dense_gemm


class RouterOutput(NamedTuple):
    """How the tokens of one forward were routed; `FusedMoE` takes it in place of logits.

    Attributes:
        router_logits: [T, E], any floating dtype.
        topk_weights: [T, K] float32 (float64 for float64), best first.
        topk_ids: [T, K] int32, the chosen experts, counted over all devices.
    """

    router_logits: Tensor
    topk_weights: Tensor
    topk_ids: Tensor

    def tokens_per_expert(self) -> Tensor:
        """[E] int64: how many of the T*K slots chose each expert. An id out of range, of nobody, does not count."""
        ids, num_experts = self.topk_ids.flatten().long(), self.router_logits.shape[-1]
        known = (ids >= 0) & (ids < num_experts)
        return ids.new_zeros(num_experts).scatter_add(0, ids.masked_fill(~known, 0), known.long())


class Router(nn.Module):
    """`logits = hidden @ weight.T + bias`; scoring and selection belong to `moe_ops.topk_routing`.

    Args:
        config: `router_size`, `hidden_size` and `router` are read.
        device, dtype: of the parameters.

    Attributes:
        weight: [E, H].
        bias: [E] or None.

    Raises:
        TypeError: `config` is not a `MoEConfig`.
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
        expect_type("config", config, MoEConfig)
        expect_floating_dtype("dtype", dtype)
        self.hidden_size = config.hidden_size
        self.gate_dtype = config.router.gate_dtype
        self._product = _invariant_linear if config.emit == "batch_invariant" else _linear
        E, H = config.router_size, config.hidden_size
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
        """[..., H] to logits [..., E] in `gate_dtype`, or in the dtype of the input (of autocast inside it).

        Raises:
            TypeError, ValueError: `hidden_states` is not a floating point tensor [..., H].
        """
        expect_features("hidden_states", hidden_states, self.hidden_size)
        if self.gate_dtype is not None:
            return linear_in(self.gate_dtype, hidden_states, self.weight, self.bias, self._product)
        return self._product(hidden_states.dtype, hidden_states, self.weight, self.bias)


def _linear(dtype: torch.dtype, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if dtype == torch.float32 and _are_halves(hidden_states, weight, bias):
        # Exact to float32 without copies in it; a compiler has a pass for that, and autograd gets the product as it is.
        if hidden_states.dim() == 2:
            return dense_gemm(hidden_states, weight, bias, dtype)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return dense_gemm(rows, weight, bias, dtype).view(*hidden_states.shape[:-1], weight.shape[0])
    return F.linear(hidden_states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _are_halves(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    dtype = hidden_states.dtype
    is_one = weight.dtype == dtype and (bias is None or bias.dtype == dtype)
    return is_one and dtype in (torch.bfloat16, torch.float16)


def _invariant_linear(
    dtype: torch.dtype, hidden_states: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    tokens, *linear = (
        None if each is None else each.to(dtype)
        for each in (hidden_states.reshape(-1, hidden_states.shape[-1]), weight, bias)
    )
    logits = dense_gemm(tokens, *linear, emit="batch_invariant")  # type: ignore[arg-type]
    return logits.view(*hidden_states.shape[:-1], weight.shape[0])


def linear_in(
    dtype: torch.dtype,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    product: Callable[..., Tensor] = _linear,
) -> Tensor:
    """`F.linear` in `dtype`, inside `torch.autocast` too: logits rounded to bfloat16 pick other experts."""
    device_type = hidden_states.device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return product(dtype, hidden_states, weight, bias)
    with torch.autocast(device_type, enabled=False):
        return product(dtype, hidden_states, weight, bias)
