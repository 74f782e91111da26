"""The activation of experts modules: which `Activation` is what one computes between its products."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import trial
from moe_ops import Activation, gated_activation
from moe_ops.types import ActivationName

_ROWS, _COLUMNS = 72, 12
_GATED: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh")
_UNGATED: tuple[ActivationName, ...] = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2")


def recognised(experts: Any) -> Activation | None:
    """What the experts compute of [S, 2I], or [S, I] without a gate, if it is one of ours; tried in float64."""
    with trial.trial_mode():
        twin = trial.skeleton(experts, lambda name, like: torch.empty(0, dtype=torch.float64))
        has_gate = getattr(experts, "has_gate", True)
        return _search(gate_of, twin, _candidates(experts) if has_gate else map(Activation, _UNGATED))


def of_function(act: Any) -> Activation | None:
    """What a function of the gate columns, times the up columns, is."""
    with trial.trial_mode():
        own = trial.skeleton(act, lambda _, like: like) if isinstance(act, nn.Module) else act
        twin = own if isinstance(own, nn.Module) else nn.Module()
        return _search(lambda _: _multiplied(own), twin, map(Activation, _GATED))


def _search(
    gate_of_twin: Callable[[Any], Callable[[Tensor], Tensor]],
    twin: nn.Module,
    candidates: Iterable[Activation],
) -> Activation | None:
    """Compares on numbers small and large, in few rows too, in both modes; None also where the gate fails."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float64)
    values = values * torch.logspace(-1, 5, _ROWS, dtype=torch.float64)[:, None]
    values[0] = 0
    batches = [(values, False), (values, True), (values[20:21], False), (values[20:23], False)]
    try:
        tried = [_tried(gate_of_twin(twin.train(is_training)), twin, rows) for rows, is_training in batches]
    except (ValueError, RuntimeError, AttributeError):
        return None
    return next((each for each in candidates if all(_is(each, *given) for given in tried)), None)


def _tried(gate: Callable[[Tensor], Tensor], twin: nn.Module, values: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Numbers, what a gate gives for them and its gradient; without gradients, too, it has to give that."""
    given = values.clone().requires_grad_()
    output = trial.run(lambda _, rows: gate(rows), twin, given)
    with torch.no_grad():
        alone = trial.run(lambda _, rows: gate(rows), twin, values)
    if not trial.close(alone, output):
        raise ValueError("it gives something else without gradients")
    return values, [output.detach(), _gradient(output, given)]


def _gradient(output: Tensor, given: Tensor) -> Tensor:
    by_column = torch.linspace(0.5, 2, output.shape[-1], dtype=torch.float64)
    return torch.autograd.grad((output * by_column).sum(), given)[0]


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


def _is(activation: Activation, values: Tensor, wanted: list[Tensor]) -> bool:
    given = values.clone().requires_grad_()
    output = gated_activation(given, activation)
    ours = output, _gradient(output, given)
    return all(
        our.shape == each.shape and bool(((our - each).abs() <= trial.CLOSE * (1 + each.abs())).all())
        for our, each in zip(ours, wanted, strict=True)
    )
