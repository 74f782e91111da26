"""The activation of experts modules: which `Activation` is what one computes between its products."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from layers.huggingface import trial
from moe_ops import Activation, gated_activation
from moe_ops.types import ActivationName

_ROWS, _COLUMNS = 48, 12
_GATED: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh")
_UNGATED: tuple[ActivationName, ...] = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2")


def recognised(experts: Any) -> Activation | None:
    """What the experts compute of [S, 2I], or [S, I] without a gate, if it is one of ours; tried in float64."""
    with trial.trial_mode():
        tried = _tried(experts)
        if tried is None:
            return None
        values, wanted = tried
        return next((each for each in _candidates(experts) if _is(each, values, wanted)), None)


def _tried(experts: Any) -> tuple[Tensor, Tensor] | None:
    """Numbers small and large, and what the module's own code makes of them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float64)
    values = values * torch.logspace(-1, 2, _ROWS, dtype=torch.float64)[:, None]
    values[0] = 0
    twin = trial.skeleton(experts, trial.random_like(generator)).eval()
    gate = twin._apply_gate if getattr(experts, "has_gate", True) else twin.act_fn
    try:
        return values, trial.in_float64(gate, values)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return None


def _candidates(experts: Any) -> Iterator[Activation]:
    """Plain ones, then those with a number, which must be an attribute of the module."""
    if not getattr(experts, "has_gate", True):
        yield from map(Activation, _UNGATED)
        return
    written = [value for value in vars(experts).values() if isinstance(value, float | int) and value > 0]
    finite = sorted({float(value) for value in written if value < float("inf")})
    for interleaved in (False, True):
        for name in _GATED:
            yield Activation(name, interleaved=interleaved)
        for limit in finite:
            yield Activation("silu", limit=limit, interleaved=interleaved)
            yield Activation("swiglustep", limit=limit, interleaved=interleaved)
            for alpha in {1.702, *finite}:
                yield Activation("swiglu_oai", alpha=alpha, limit=limit, interleaved=interleaved)


def _is(activation: Activation, values: Tensor, wanted: Tensor) -> bool:
    ours = gated_activation(values, activation)
    return ours.shape == wanted.shape and bool(
        ((ours - wanted).abs() <= trial.CLOSE * (1 + wanted.abs())).all()
    )
