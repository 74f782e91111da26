"""Experts that say which they are: what their block weighs each by, for tokens with logits of all sizes."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import trial
from layers.huggingface.expert_modules import Mlp
from layers.huggingface.outside import TOKENS, twin_of
from layers.huggingface.router_trial import Output, Tried

_LARGEST = 300.0
"""Of logits: sigmoids are all one before that, and no softmax is nothing."""
_LOWEST = -60.0
"""Of all logits of a token: sigmoids are smaller than what is added to their sum."""


class _Probe(nn.Module):
    """An expert that says which it is."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, hidden_states: Tensor) -> Tensor:
        said = torch.zeros_like(hidden_states)
        if 0 <= self.place < hidden_states.shape[-1]:
            said[..., self.place] = 1
        return said


def weights(block: Any, gate: str, mlp: Mlp, num_experts: int) -> Tried | None:
    """The weight of every expert for every token, as the block's own forward applies it."""
    twin, generator = twin_of(block, num_experts)
    hidden_size = next(twin.experts.children()).get_parameter(mlp.down).shape[0]
    for name, each in twin.named_parameters():
        if name.startswith("shared"):
            each.data.zero_()  # beside large outputs small weights would be rounded to nothing
    starts = range(0, num_experts, hidden_size)
    try:
        tokens = _tokens_for_probes(getattr(twin, gate), hidden_size, generator)
        logits = trial.in_float64(getattr(twin, gate), tokens[0]).detach()
        silent = _output(twin, tokens, [-1] * num_experts)
        said = [
            _output(twin, tokens, [expert - start for expert in range(num_experts)]) - silent
            for start in starts
        ]
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return None
    applied = torch.cat(said, -1)[:, :num_experts]
    counts = (applied != 0).sum(-1)
    if logits.shape != applied.shape or int(counts.min()) != int(counts.max()) or not int(counts[0]):
        return None
    chosen = applied[applied != 0].view(len(applied), -1)
    output = Output(logits, applied, chosen, (), torch.empty(0), (), chosen.shape[1])
    return Tried(twin, tokens, (), output)


def _tokens_for_probes(gate: Any, hidden_size: int, generator: torch.Generator) -> Tensor:
    """[1, T, H] by which the gate gives logits of all sizes, and some that are all low, where it can."""
    plain = torch.randn(4 * TOKENS, hidden_size, generator=generator, dtype=torch.float64)
    top = trial.in_float64(gate, plain).detach().abs().max()
    sizes = torch.logspace(-1, math.log10(_LARGEST / top), len(plain), dtype=torch.float64)
    tokens, weight = plain * sizes[:, None], getattr(gate, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == hidden_size:
        low = torch.linspace(0, _LOWEST, len(tokens[::4]), dtype=torch.float64)[:, None]
        tokens[::4] = plain[::4] / 4 + low * torch.linalg.pinv(weight.detach()).sum(1)
    return tokens[None]


def _output(twin: Any, tokens: Tensor, places: list[int]) -> Tensor:
    twin.experts = nn.ModuleList(map(_Probe, places))
    returned = trial.in_float64(type(twin).forward, twin, tokens)
    output = returned[0] if isinstance(returned, tuple) else returned
    return output.detach().reshape(tokens.shape[1], -1)
