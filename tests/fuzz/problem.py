"""What a level makes of a case: tensors, a call of them, what it must give and how exactly."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.fuzz.cases import Case
from tests.helpers import RELATIVE_NORM

Tensors = dict[str, Tensor]


class Mismatch(Exception):
    """An integer result or a property that must hold exactly does not."""


@dataclass
class Problem:
    """The floating tensors of a call by name, the call, and what it must give.

    `bound` is of the relative error by norm. `sizes` holds, after a gradient of the oracle, the norms of terms that
    cancel in a gradient of that name: rounding is relative to them. `constants` have no gradient, and ask for none.
    `allowed`, where there is one, is given what comes down from behind and knows of each element of the output and of
    gradients how far it may be off; it counts instead of `bound`. `reached`: tokens whose NaN has to reach the output.
    """

    tensors: Tensors
    run: Callable[[Tensors], Tensor | None]
    expected: Callable[[Tensors], Tensor]
    bound: float
    sizes: dict[str, float] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    allowed: Callable[[Tensor | None], Tensors] | None = None
    reached: Tensor | None = None


def layer_bound(case: Case) -> float:
    """Four roundings of the storage dtype, see RELATIVE_NORM; six when a rounded weight scales the input."""
    return RELATIVE_NORM[getattr(torch, case.dtype)] * (1.5 if case.weight_on_input else 1.0)


def stage_bound(case: Case) -> float:
    """One rounding: half an epsilon, and as much for the order of summation."""
    dtype = getattr(torch, case.dtype)
    return RELATIVE_NORM[dtype] / (2 if dtype in (torch.bfloat16, torch.float16) else 1)


def routing_bound(case: Case) -> float:
    """Routing computes in float32 (float64 for float64 logits), whatever the layer's dtype."""
    return RELATIVE_NORM[torch.float64 if case.logits_dtype == "float64" else torch.float32]


def without_none(**tensors: Tensor | None) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def expect_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    """Raises Mismatch unless two integer tensors are equal."""
    if actual.shape != expected.shape or not torch.equal(actual.long(), expected.long()):
        raise Mismatch(
            f"{name}: {actual.flatten()[:8].tolist()}..., expected {expected.flatten()[:8].tolist()}..."
        )
