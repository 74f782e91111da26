"""Experts that were modules of their own, in two tensors, under the names that they had.

A state dict has, and takes, what the modules had: each of their weights is a part of a stacked one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from layers.huggingface.experts import ExpertsOptions, experts_forward, settled_activation


class Part(NamedTuple):
    """Where one weight of before lies.

    Attributes:
        name: of the weight, among the experts.
        parameter: of the stacked experts.
        place: of it, [experts, rows].
        is_transposed: experts [E, I, H] in a row.
    """

    name: str
    parameter: str
    place: tuple[int | slice, slice]
    is_transposed: bool = False

    def of(self, stacked: Tensor) -> Tensor:
        """The part, a view."""
        part = stacked[self.place]
        return part.transpose(-1, -2) if self.is_transposed else part


class StackedExperts(nn.Module):
    """E experts with a gate and without biases, or without a gate.

    Args:
        up: [E, 2I, H], gate rows first, or [E, I, H] without a gate.
        down: [E, H, I].
        act_fn: of the gate columns, or of all where there is no gate.
        parts: the weights of before.
        before: what held them. It is kept for `unpatch`, without weights.
    """

    has_bias = is_transposed = False
    is_concatenated = True

    def __init__(
        self, up: nn.Parameter, down: nn.Parameter, act_fn: Any, parts: Sequence[Part], before: nn.Module
    ) -> None:
        super().__init__()
        self.has_gate = up.shape[1] == 2 * down.shape[2]
        self.register_parameter("gate_up_proj" if self.has_gate else "up_proj", up)
        self.down_proj = down
        self.num_experts = down.shape[0]
        self.act_fn = act_fn
        self.moe_ops_parts = tuple(parts)
        self.moe_ops_before = (before,)  # in a tuple, so that it is no module of this one
        self.moe_ops_options = ExpertsOptions(settled_activation(self), "auto", "auto")
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_gather)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] to [T, H], by ids and weights [T, K]."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)

    def unstacked(self) -> nn.Module:
        """What held the weights before, with them: views of the stacked ones."""
        (before,) = self.moe_ops_before
        for part in self.moe_ops_parts:
            stacked = self.get_parameter(part.parameter)
            owner, _, name = part.name.rpartition(".")
            holder = before.get_submodule(owner)
            view = part.of(stacked.data)
            view = view.flatten(0, 1) if view.dim() == 3 else view
            setattr(holder, name, nn.Parameter(view, stacked.requires_grad))
        return before


class MaskedExperts(StackedExperts):
    """Experts told by a mask [T, 1, E], at most one for a token (Switch)."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] to [T, H], by a mask and weights [T, 1]."""
        is_chosen, ids = top_k_index.max(-1)
        return experts_forward(self, hidden_states, ids.masked_fill(is_chosen == 0, -1), top_k_weights)


def _rename(module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    stacked = {name: state_dict.pop(prefix + name) for name, _ in module.named_parameters(recurse=False)}
    for part in module.moe_ops_parts:
        value = part.of(stacked[part.parameter])
        state_dict[prefix + part.name] = value.flatten(0, 1) if value.dim() == 3 else value


def _gather(module: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Of names that are there; what lacks some keeps what it has."""
    for part in module.moe_ops_parts:
        if prefix + part.name in state_dict:
            key = prefix + part.parameter
            if key not in state_dict:
                state_dict[key] = module.get_parameter(part.parameter).detach().clone()
            target = part.of(state_dict[key])
            target.copy_(state_dict.pop(prefix + part.name).view(target.shape))
