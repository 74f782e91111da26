"""Experts outside transformers' experts interface that lie, and are called, as it would have them.

What their own code computes is tried on a twin of small sizes, in float64, with its gradient, and compared with what
ours computes: where the two differ they are left as they are.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import gates, trial
from layers.huggingface.experts import experts_forward, settle

TOKENS = 33


class Collection:
    """Experts [E, 2I, H] and [E, H, I] that are called with (hidden_states, ids, weights).

    Experts behind the last that has weights return their input (LongCat-Flash).
    """

    @staticmethod
    def is_kind(module: Any) -> bool:
        """Whether a module looks so."""
        up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        are_stacked = all(isinstance(each, Tensor) and each.dim() == 3 for each in (up, down))
        return are_stacked and type(module).forward.__code__.co_argcount == 4

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        output = experts_forward(self, hidden_states, top_k_index, top_k_weights)
        num_experts = self.down_proj.shape[0]
        if self.gate_up_proj.shape[0] == num_experts:
            return output
        kept = (top_k_weights * (top_k_index >= num_experts)).sum(-1, keepdim=True)
        return output + (hidden_states * kept).to(output.dtype)


def collection_activation(module: Any) -> str | None:
    """The activation of experts that `Collection` is exact for, or None."""
    activation = gates.recognised(module)
    num_experts = module.gate_up_proj.shape[0]
    if activation is None or num_experts < 2:
        return None
    with trial.trial_mode():
        twin, generator = twin_of(module, num_experts, module.down_proj.shape[0])
        twin.moe_ops_options = settle(twin, "auto", "auto", activation.spec)
        hidden_size = twin.down_proj.shape[1]
        ids = torch.rand(TOKENS, num_experts, generator=generator).argsort(-1)[:, :2]
        weights = torch.rand(TOKENS, 2, generator=generator, dtype=torch.float64)
        tokens = tokens_of_all_sizes(generator, 100, TOKENS, hidden_size)
        own, ours = (
            run(forward, twin, tokens, ids, weights) for forward in (type(twin).forward, Collection.forward)
        )
    return activation.spec if are_close(own, ours) else None


def twin_of(module: nn.Module, num_experts: int, *kept: int) -> tuple[Any, torch.Generator]:
    """The module on small random tensors, and what drew them."""
    generator = torch.Generator().manual_seed(0)
    sizes = trial.smaller(module, num_experts, *kept)
    return trial.skeleton(module, trial.random_like(generator), sizes).eval(), generator


def tokens_of_all_sizes(generator: torch.Generator, largest: float, *shape: int) -> Tensor:
    """Random tokens [..., H], from a tenth of the usual size to `largest` times it, so that limits on sums show."""
    tokens = torch.randn(shape, generator=generator, dtype=torch.float64)
    sizes = torch.logspace(-1, math.log10(largest), math.prod(shape[:-1]), dtype=torch.float64)
    return tokens * sizes.view(*shape[:-1], 1)


def run(forward: Callable[..., Any], twin: Any, tokens: Tensor, *rest: Tensor) -> list[Tensor]:
    """What a forward returns in float64, and the gradient of its output; nothing where it fails."""
    tokens = tokens.clone().requires_grad_()
    try:
        returned = trial.run(forward, twin, tokens, *rest)
        output, *more = returned if isinstance(returned, tuple) else (returned,)
        weight = torch.linspace(0.5, 2, output.numel(), dtype=torch.float64).view(output.shape)
        (gradient,) = torch.autograd.grad((output * weight).sum(), tokens)
        return [each.detach() for each in (output, gradient, *more)]
    except (ValueError, RuntimeError, AttributeError):  # it fails, has no gradient, or returns no tensors
        return []


def are_close(own: list[Tensor], ours: list[Tensor]) -> bool:
    """Whether both ran, and gave the same."""
    return bool(own) and len(own) == len(ours) and all(map(trial.close, ours, own))
