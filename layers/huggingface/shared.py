"""Shared experts of patched blocks whose products routed experts' launches take along, for a few tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layers.huggingface import trial
from layers.huggingface.settled import Settings, get, has_changed, is_watched, settings_of
from moe_ops.activation import gated_activation
from moe_ops.arguments import SharedExpert
from moe_ops.types import Activation

MOST_TOKENS = 4
"""More have products that a library runs, so its modules may as well be called."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """A shared expert that is its linear modules and the activation between them.

    Attributes:
        linears: their names: gate, up and down, or up and down without a gate.
        activation: the spec of an `Activation`.
    """

    linears: tuple[str, ...]
    activation: str


@dataclass(frozen=True, slots=True)
class Settled:
    """An `Mlp`, and what was there when it was tried."""

    mlp: Mlp
    settings: Settings


def known(twin: Any, tokens: Tensor, activation: str) -> Mlp | None:
    """What a shared expert is, tried in float64 with the activation of the routed ones; None where it is no such."""
    try:
        wanted = trial.in_float64(type(twin).forward, twin, tokens)
    except (ValueError, RuntimeError):  # it takes tokens in another shape
        return None
    return next((each for each in _candidates(twin, activation) if _is(each, twin, tokens, wanted)), None)


def _candidates(twin: nn.Module, spec: str) -> Iterator[Mlp]:
    activation = Activation.from_spec(spec)
    linears = [name for name, each in twin.named_children() if type(each) is nn.Linear]
    weights = {id(get(twin, f"{name}.weight")) for name in linears}
    is_all = {id(each) for each in (*twin.parameters(), *twin.buffers())} == weights
    if is_all and not activation.interleaved and len(linears) == (3 if activation.is_gated else 2):
        for names in permutations(linears):
            yield Mlp(names, spec)


def _is(mlp: Mlp, twin: Any, tokens: Tensor, wanted: Tensor) -> bool:
    *first, down = (get(twin, f"{name}.weight") for name in mlp.linears)
    if any(each.shape != down.t().shape for each in first):
        return False
    gate_up = torch.cat([F.linear(tokens, each) for each in first], -1)
    return trial.close(F.linear(gated_activation(gate_up, mlp.activation), down), wanted)


def settled(module: nn.Module, mlp: Mlp) -> Settled:
    """What `operand` compares a module with."""
    inside = (name for name, _ in module.named_modules() if name)
    return Settled(mlp, settings_of(module, *inside))


def operand(module: Any, how: Settled, tokens: Tensor, gate: Any) -> SharedExpert | None:
    """What the operators take of a module for these tokens [T, H]; None where it has to be called.

    `gate` is the module whose sigmoid weighs its output, or None.
    """
    if tokens.shape[0] > MOST_TOKENS or is_watched(module) or has_changed(module, how.settings):
        return None
    *first, down = (module._modules[name].weight for name in how.mlp.linears)
    if not all(_fits(each, first[0], tokens) for each in first) or not _fits(down, down, tokens):
        return None
    weights = None if gate is None else gate(tokens).sigmoid()
    return SharedExpert(first[0], down, weights, how.mlp.activation, *first[1:])


def _fits(weight: Tensor, gate: Tensor, tokens: Tensor) -> bool:
    """Whether an operator takes a weight beside these tokens: another may have been assigned since."""
    is_plain = type(weight) is nn.Parameter and weight.dtype == tokens.dtype
    return is_plain and weight.device == tokens.device and weight.stride() == gate.stride()
