"""The whole MoE block of a transformer layer: gate, routed experts, shared experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from layers._checks import expect_features, expect_linear_dtype, expect_type
from layers.attached import expect_own_config
from layers.config import MoEConfig
from layers.expert_options import in_chunks
from layers.fused_moe import FusedMoE
from layers.modular_kernel import ModularKernel
from layers.router import Router, RouterOutput
from layers.shared_experts import SharedExperts
from moe_ops._checks import expect_shape
from moe_ops.arguments import SharedExpert


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
        routed_input_transform, routed_output_transform: linear, H to `config.experts.latent_size` and back, around the
            routed experts, or None. Any modules of these shapes may take their place.

    Raises:
        TypeError, ValueError: as `FusedMoE` does.
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
        expect_type("config", config, MoEConfig)
        self.config = config
        self.gate = Router(config, device=device, dtype=dtype)
        self.experts = FusedMoE(config, expert_map, device=device, dtype=dtype)
        H, latent = config.hidden_size, config.experts.latent_size
        into = None if latent is None else nn.Linear(H, latent, bias=False, device=device, dtype=dtype)
        back = None if latent is None else nn.Linear(latent, H, bias=False, device=device, dtype=dtype)
        self.routed_input_transform, self.routed_output_transform = into, back
        shared = config.shared_experts
        self._averages = shared is not None and shared.combination == "average"
        self._overlaps = shared is not None and shared.overlap
        self.shared_experts = (
            None if shared is None else SharedExperts(config, shared, device=device, dtype=dtype)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        expect_own_config(self, name, value)
        super().__setattr__(name, value)

    @classmethod
    def from_hf(cls, block: nn.Module, config: Any = None) -> "MoEBlock":
        """A block of transformers as one of ours, around the same weights; the block itself is left as it is.

        Parameters that lie as ours do are the same tensors, transposed ones are views of them. Only what the block
        has in several tensors is copied: gate and up projections of shared experts.

        Args:
            block: the module with router, experts and shared experts of one layer.
            config: its model's, for the few blocks that do not hold one.

        Raises:
            TypeError, ValueError: as `MoEConfig.from_hf` does; or the block has no config, or tensors that have no
                place here.

        Example:
            >>> ours = MoEBlock.from_hf(model.model.layers[0].mlp)
        """
        from layers.families.blocks import share_weights, stock_config  # they build a MoEBlock's config

        ours = cls(stock_config(block, config), device="meta")
        share_weights(ours, block)
        return ours

    def reset_parameters(self) -> None:
        """Draws every parameter anew, as the constructor did."""
        self.gate.reset_parameters()
        self.experts.reset_parameters()
        for transform in (self.routed_input_transform, self.routed_output_transform):
            if transform is not None:
                transform.reset_parameters()
        if self.shared_experts is not None:
            self.shared_experts.reset_parameters()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] to [..., H]: routed and shared experts of every token.

        Raises:
            TypeError, ValueError: `hidden_states` is not a floating point tensor [..., H], or its dtype or device
                is not that of the weights.
        """
        tokens = self._tokens_of(hidden_states)
        return self._run(tokens, self.gate(tokens)).reshape(hidden_states.shape)

    def forward_with_routing(self, hidden_states: Tensor) -> tuple[Tensor, RouterOutput]:
        """What `forward` returns, and how the T tokens were routed: logits, weights and ids, with gradients.

        It is not `forward`, so what FSDP2 hangs on that has to be told of it:
        `torch.distributed.fsdp.register_fsdp_forward_method(block, "forward_with_routing")`.

        Example:
            >>> output, routed = block.forward_with_routing(hidden_states)
            >>> load = routed.tokens_per_expert()  # [E]
        """
        tokens = self._tokens_of(hidden_states)
        routed = self.experts.route(self.gate(tokens), tokens)
        return self._run(tokens, routed).reshape(hidden_states.shape), routed

    def _tokens_of(self, hidden_states: Tensor) -> Tensor:
        expect_features("hidden_states", hidden_states, self.config.hidden_size)
        return hidden_states.reshape(-1, hidden_states.shape[-1])  # [T, H]

    def _run(self, tokens: Tensor, routing: Tensor | RouterOutput) -> Tensor:
        into, back = self.routed_input_transform, self.routed_output_transform
        if into is None or back is None:
            output = self.experts(tokens, routing, self._shared_for_experts(tokens))
        else:
            shared = self._run_shared(tokens)
            # Experts without `route` go by logits alone.
            if not isinstance(routing, RouterOutput) and hasattr(self.experts, "route"):
                routing = self.experts.route(routing, tokens)
            expect_linear_dtype("hidden_states", tokens, into)
            output = back(self.experts(into(tokens), routing))
            expect_shape("output of routed_output_transform", output, tokens.shape)
            output = output if shared is None else output + shared
        return output * 0.5 if self._averages else output

    def _shared_for_experts(self, tokens: Tensor) -> Tensor | SharedExpert | Callable[[], Tensor] | None:
        """What joins the experts' sum; computed later, where tokens go to other ranks first."""
        if self.shared_experts is not None and getattr(self.experts, "parallel", None) is not None:
            return lambda: self._run_shared(tokens)  # type: ignore[return-value]
        return self._run_shared(tokens)

    def _run_shared(self, tokens: Tensor) -> Tensor | SharedExpert | None:
        if self.shared_experts is None:
            return None
        if self._overlaps and not isinstance(self.experts, ModularKernel):  # that takes an output
            return self.shared_experts.operand(tokens)
        shared = in_chunks(self.shared_experts, self.config.experts.chunk_size, tokens)
        expect_shape("output of shared_experts", shared, tokens.shape)  # a sum would broadcast another
        return shared
