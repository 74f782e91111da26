"""Experts outside transformers' experts interface that lie, and are called, as it would have them.

What their own code computes is tried on a twin of small sizes, in float64, with its gradient, and compared with what
ours computes: where the two differ they are left as they are.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import experts, gates, trial
from layers.huggingface.experts import experts_forward, settle

TOKENS = 33
_MANY = 140
_ARGUMENTS = ("self", "hidden_states", "top_k_index", "top_k_weights")


class Collection:
    """Experts [E, 2I, H] and [E, H, I] that are called with (hidden_states, ids, weights).

    Experts behind the last that has weights return their input (LongCat-Flash).
    """

    @staticmethod
    def is_kind(module: Any) -> bool:
        """Whether a module looks so."""
        up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        are_stacked = all(isinstance(each, Tensor) and each.dim() == 3 for each in (up, down))
        return are_stacked and tuple(inspect.signature(type(module).forward).parameters) == _ARGUMENTS

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
        inputs = list(_routed(generator, num_experts, twin.down_proj.shape[1]))
        is_same = all(
            is_same_everywhere(type(twin).forward, Collection.forward, twin.train(mode), *each)
            for mode in (True, False)
            for each in inputs
        )
    return activation.spec if is_same else None


def is_of_interface(module: Any) -> bool:
    """Whether the code that a class of transformers' interface runs by itself ("eager") is what the interface runs.

    It is taken to be where it cannot be tried.
    """
    with trial.trial_mode():
        num_experts = experts.weights(module).w13.weight.shape[0]
        twin, generator = twin_of(module, num_experts)
        activation = experts.settled_activation(module)
        twin.moe_ops_options = settle(twin, "auto", "auto", activation)
        hidden_size = experts.weights(twin).w2.weight.shape[1]
        given = next(iter(_routed(generator, num_experts, hidden_size)))
        wanted = run(type(twin).forward.__wrapped__, twin.eval(), *given)
        return not wanted or are_close(wanted, run(experts_forward, twin, *given))


def _routed(
    generator: torch.Generator, num_experts: int, hidden_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, ids and weights: many of all experts, one alone, and many of two experts."""
    count = max(TOKENS, 2 * num_experts)
    tokens = tokens_of_all_sizes(generator, 1e4, count, hidden_size)
    ids = torch.rand(count, num_experts, generator=generator).argsort(-1)[:, :2]
    ids[:num_experts, 0] = torch.arange(num_experts)
    ids[:num_experts, 1] = (ids[:num_experts, 0] + 1) % num_experts
    weights = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    weights[::3] **= 12
    yield tokens, ids, weights
    yield tokens[:1], ids[:1], weights[:1]
    yield tokens, ids[:1].expand(count, 2), weights


def is_same_everywhere(own: Callable[..., Any], ours: Callable[..., Any], twin: Any, *inputs: Tensor) -> bool:
    """Whether two forwards give the same, with gradients and without."""
    for has_gradients in (True, False):
        with torch.set_grad_enabled(has_gradients):
            if not are_close(run(own, twin, *inputs), run(ours, twin, *inputs)):
                return False
    return True


def twin_of(module: nn.Module, num_experts: int, *kept: int) -> tuple[Any, torch.Generator]:
    """The module on small random tensors, and what drew them."""
    generator = torch.Generator().manual_seed(0)
    sizes = trial.smaller(module, num_experts, *kept)
    return trial.skeleton(module, trial.random_like(generator), sizes).eval(), generator


def other_batches(tokens: Tensor) -> list[Tensor]:
    """Of hidden states [B, S, H]: one token, few in other shapes, and many that want the same experts."""
    flat = tokens.flatten(0, 1)
    rows = torch.arange(_MANY).view(2, -1) % len(flat)
    return [flat[-1:, None], flat[:5, None], flat[None, -7:], flat[-1] + flat[rows] / 1e4]


def tokens_of_all_sizes(generator: torch.Generator, largest: float, *shape: int) -> Tensor:
    """Random tokens [..., H], from a tenth of the usual size to `largest` times it, so that limits on sums show."""
    tokens = torch.randn(shape, generator=generator, dtype=torch.float64)
    sizes = torch.logspace(-1, math.log10(largest), math.prod(shape[:-1]), dtype=torch.float64)
    return tokens * sizes.view(*shape[:-1], 1)


def run(forward: Callable[..., Any], twin: Any, tokens: Tensor, *rest: Tensor) -> list[Tensor]:
    """What a forward returns in float64, and the gradients of its output; nothing where it fails.

    Gradients are those of the tokens, other numbers that it is given, and the twin's parameters.
    """
    torch.default_generator.manual_seed(0)
    inputs = [each.clone().requires_grad_() if each.is_floating_point() else each for each in (tokens, *rest)]
    trained = [each for each in inputs if each.requires_grad]
    parameters = list(twin.parameters())
    try:
        returned = trial.run(forward, twin, *inputs)
        output, *more = returned if isinstance(returned, tuple) else (returned,)
        gradients = _gradients(output, [*trained, *parameters])
        by_parameter = [each.flatten() for each in gradients[len(trained) :]]
        return [each.detach() for each in (output, *gradients[: len(trained)], *by_parameter, *more)]
    except (ValueError, RuntimeError, AttributeError):  # it fails, or returns no tensors
        return []


def _gradients(output: Tensor, trained: list[Tensor]) -> list[Tensor]:
    if not output.requires_grad:
        return [torch.zeros_like(each) for each in trained]
    weight = torch.linspace(0.5, 2, output.numel(), dtype=torch.float64).view(output.shape)
    found = torch.autograd.grad((output * weight).sum(), trained, allow_unused=True)
    pairs = zip(trained, found, strict=True)
    return [torch.zeros_like(each) if gradient is None else gradient for each, gradient in pairs]


def are_close(own: list[Tensor], ours: list[Tensor]) -> bool:
    """Whether both ran, and gave the same."""
    return bool(own) and len(own) == len(ours) and all(map(trial.close, ours, own))
