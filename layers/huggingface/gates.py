"""The activation of experts modules: which `Activation` is what one computes between its products."""

from collections.abc import Callable, Iterator
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
        twin = trial.skeleton(experts, lambda name, like: torch.empty(0, dtype=torch.float64)).eval()
        has_gate = getattr(experts, "has_gate", True)
        try:
            return _search(
                gate_of(twin), list(_candidates(experts) if has_gate else map(Activation, _UNGATED))
            )
        except (ValueError, AttributeError):  # it fails, or has no activation at all
            return None


def of_function(act: Any) -> Activation | None:
    """What a function of the gate columns, times the up columns, is."""
    with trial.trial_mode():
        return _search(_multiplied(act), [Activation(name) for name in _GATED])


def _search(gate: Callable[[Tensor], Tensor], candidates: list[Activation]) -> Activation | None:
    """Compares on numbers small and large."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float64)
    values = values * torch.logspace(-1, 3, _ROWS, dtype=torch.float64)[:, None]
    values[0] = 0
    wanted = trial.in_float64(gate, values)
    return next((each for each in candidates if _is(each, values, wanted)), None)


def gate_of(experts: Any) -> Callable[[Tensor], Tensor]:
    """What experts themselves compute of [S, 2I], or [S, I] without a gate."""
    if not getattr(experts, "has_gate", True):
        return experts.act_fn
    return experts._apply_gate if hasattr(experts, "_apply_gate") else _multiplied(experts.act_fn)


def _multiplied(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gate(gate_up: Tensor) -> Tensor:
        columns, up = gate_up.chunk(2, -1)
        return act(columns) * up

    return gate


def _candidates(experts: Any) -> Iterator[Activation]:
    """Plain ones, then those with a number, which must be an attribute of the module."""
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
