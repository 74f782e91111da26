"""warmup_step: every kernel that a step of a model can launch, before the first request.

What a layer launches depends on its operators, layouts and options; on the token count T, by thresholds. So the step
tells which operators it calls, on what, and from calls for T and T + 1 follows how their arguments grow. Their plans
for every T then say what to load, and nothing more is run. Templates of later plans are made, and packed by address.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from moe_ops._checks import as_device

Step = Callable[[int], object]


def warmup_step(step: Step, max_tokens: int, *, device: torch.device | str = "cuda") -> None:
    """Compiles and loads every kernel of ours that `step` can launch for 1 to `max_tokens` tokens.

    So later calls, whatever T they have, compile nothing of ours. Other kernels (attention, a compiler's own) are
    loaded for the few T that run: 1 to 4, and twice, for what is compiled once, 5, 6, `max_tokens` - 1 and
    `max_tokens`.

    Args:
        step: runs the model, or a part of it, on so many tokens of any contents, without grad.
        max_tokens: the most tokens T that a call will have.
        device: the GPU; elsewhere there is nothing to load, and `step` does not run.

    Raises:
        TypeError: `step` cannot be called, or `max_tokens` is no int.
        ValueError: `max_tokens` below 1, a device that torch does not know, or `step(T)` and `step(T + 1)` call other
            operators than each other, where the one is not the last of fewer tokens.

    Example:
        >>> moe_ops.warmup_step(lambda tokens: layer(torch.zeros(tokens, 64)), max_tokens=512, device="cpu")
    """
    if not callable(step):
        raise TypeError(f"step={step!r}: expected a function of a token count")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool):
        raise TypeError(f"max_tokens={max_tokens!r}: expected an int")
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: expected at least 1")
    if as_device("device", device).type != "cuda":
        return
    from moe_ops.kernels.loading import Loader

    loader = lru_cache(maxsize=None)(Loader)
    with torch.no_grad():
        for operator in _operators(step, max_tokens):
            for tokens in range(1, max_tokens + 1):
                planned = operator(tokens)
                program = planned.program()
                if program is not None:
                    planned.prepare(loader(planned.device).load(program, planned.dtypes()))


def _operators(step: Step, max_tokens: int) -> Iterator[Callable[[int], Any]]:
    """Of every operator that was called, what it is called with for T; alike ones once."""
    pairs = {(_FEW - 1, _FEW), (max_tokens - 1, max_tokens)} if max_tokens >= _FEW else set()
    for count in sorted({*range(1, min(_FEW, max_tokens) + 1), *(count for pair in pairs for count in pair)}):
        step(count)
    found: dict[Any, Callable[[int], Any]] = {}
    for first, last in pairs:
        lower, upper = _calls(step, first), _calls(step, last)
        if first >= _FEW and _names(lower) != _names(upper):  # another form from the last count on
            found |= {(call, call): _growing(last, call, call) for call in upper}
            first, lower, upper = first - 1, _calls(step, first - 1), lower
        _expect_alike(first, lower, upper)
        for calls in zip(lower, upper, strict=True):
            found.setdefault(calls, _growing(first, *calls))
    yield from found.values()


_FEW = 6
"""So many counts run, of which the last two call what all others do: up to four a shared expert may be no call."""


def _calls(step: Step, count: int) -> list[Any]:
    from moe_ops.kernels import plans

    with plans.watched() as seen:
        step(count)
    return seen


def _names(calls: list[Any]) -> list[str]:
    return [call.record.__name__ for call in calls]


def _expect_alike(first: int, lower: list[Any], upper: list[Any]) -> None:
    names, others = _names(lower), _names(upper)
    if names != others:
        raise ValueError(
            f"step({first}) calls {', '.join(names)} and step({first + 1}) calls {', '.join(others)}: "
            f"expected the same operators"
        )


def _growing(first: int, lower: Any, upper: Any) -> Callable[[int], Any]:
    def of(tokens: int) -> Any:
        leaves = zip(lower.leaves, upper.leaves, strict=True)
        return lower._replace(leaves=tuple(_extrapolated(tokens - first, *leaf) for leaf in leaves))

    return of


def _extrapolated(steps: int, lower: Any, upper: Any) -> Any:
    """What grew by `upper - lower` in one step has grown so much in `steps`."""
    if isinstance(lower, tuple):
        values = (_extrapolated(steps, *pair) for pair in zip(lower, upper, strict=True))
        make = getattr(lower, "_make", tuple)  # of a description, or of its shape
        return make(values)
    is_number = isinstance(lower, int) and not isinstance(lower, bool)
    return lower + (upper - lower) * steps if is_number else lower
