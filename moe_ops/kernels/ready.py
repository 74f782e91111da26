"""Calls of an operator that go straight to their launches: neither the dispatcher nor a check sees them again.

What a call was checked and launched for is kept with a guard over its tensors: their types, dtypes, devices, sizes and
strides, whether they are recorded, and which transforms and modes are active. It holds no tensor and no address: those
are read in each call.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from moe_ops import _compat
from moe_ops.kernels.packed import Packed

MOST = 1024
"""Calls that are kept of an operator."""


class Library(NamedTuple):
    """A product of a library's instead of launches: a function of the operator's tensors."""

    product: Callable[..., torch.Tensor]

    def run(self, given: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor]:
        """What it gives, as a tuple."""
        return (self.product(*given),)


Runs = Packed | Library


class _Call(NamedTuple):
    is_for: Callable[..., bool]
    places: tuple[int, ...]
    packed: Runs


class Ready(NamedTuple):
    """Calls of one operator, by what `glance` says of its leaves, of which the first `count` are tensors."""

    glance: Callable[..., Hashable]
    count: int
    calls: dict[Hashable, _Call]

    def run(self, leaves: tuple[Any, ...]) -> Any:
        """What the launches give, as a tuple; None for a call that is none of these, or that somebody watches."""
        if _compat.is_watched():
            return None
        try:
            found = self.calls.get(self.glance(*leaves))
        except (
            AttributeError,
            TypeError,
            RuntimeError,
        ):  # no tensor, a symbolic size, a nested tensor, which has none
            return None
        if found is None:
            return None
        is_for, places, packed = found
        return packed.run(leaves[: self.count]) if is_for(*[leaves[place] for place in places]) else None

    def keep(self, leaves: tuple[Any, ...], packed: Runs) -> None:
        """Has `packed` at hand for such leaves, in the modes that are active now."""
        if len(self.calls) >= MOST:
            self.calls.pop(next(iter(self.calls)), None)  # one at a time: to free all would take milliseconds
        places = tuple([place for place in range(self.count) if leaves[place] is not None])
        is_for = _compat.guard_of([leaves[place] for place in places])
        self.calls[self.glance(*leaves)] = _Call(is_for, places, packed)
