"""Checks of what a user hands to a layer. Of tensors they read metadata and static sizes only, so they add no guards.

Every message names the argument, what it is, and what was expected.
"""

import math
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor, nn

from moe_ops._checks import expect_dense, expect_same_dtype, expect_tensor
from moe_ops._library import autocast, autocasts
from moe_ops.errors import describe, type_error, value_error
from moe_ops.scaled import STORED


def expect_type(name: str, value: object, expected: type | tuple[type, ...]) -> None:
    """Raises TypeError unless `value` is an instance of `expected`."""
    if not isinstance(value, expected):
        options = expected if isinstance(expected, tuple) else (expected,)
        names = " or ".join(option.__name__ for option in options)
        raise TypeError(f"{name}={value!r}: expected {names}, got {type(value).__name__}")


def expect_positive(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless `value` is an int of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}={value}: expected at least 1")


def expect_count(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless `value` is an int of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name}={value}: expected at least 0")


def expect_finite(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless `value` is a finite real number, which True is not."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value}: expected a finite number")


def expect_choice(name: str, value: object, choices: object) -> None:
    """Raises ValueError unless `value` is one of the strings of the Literal `choices`."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def expect_floating_dtype(name: str, dtype: object) -> None:
    """Raises TypeError unless `dtype` is a floating torch.dtype, or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{name}={dtype!r}: expected None or a floating torch.dtype")


def expect_features(name: str, value: object, size: int) -> None:
    """Raises TypeError or ValueError unless `value` is a dense floating point tensor [..., size]."""
    if not isinstance(value, Tensor):
        type_error("{}={}: expected a torch.Tensor", name, describe(value))
    expect_dense(name, value)
    if not value.dtype.is_floating_point:
        type_error("{} has dtype {}: expected a floating point dtype", name, value.dtype)
    if value.dim() == 0:
        value_error("{} has shape []: expected [..., {}]", name, size)
    if value.shape[-1] != size:
        value_error("{} has last dimension {}: expected {}", name, value.shape[-1], size)


def expect_linear_dtype(name: str, value: Tensor, linear: nn.Module) -> None:
    """Raises TypeError where an `nn.Linear` would be given another dtype than its weight's; other modules may cast."""
    if type(linear) is nn.Linear and value.dtype != linear.weight.dtype and not autocasts(value):
        type_error(
            "{} has dtype {}: expected {}, that of the weights", name, value.dtype, linear.weight.dtype
        )


def expect_multiplied(hidden_states: Tensor, weight: Tensor) -> None:
    """Raises TypeError where w13 of experts has another dtype than tokens, as its product would, of tokens elsewhere.

    Quantised weights take any.
    """
    if hidden_states.dtype != weight.dtype and weight.dtype not in STORED:
        tokens, w13 = autocast((hidden_states, weight.detach()[:0]))
        expect_same_dtype(tokens.dtype, "hidden_states", w13=w13)


def rows_of(name: str, value: Any, last: str = "H") -> Tensor:
    """`value` [..., `last`] as [T, `last`]. Raises TypeError or ValueError unless it is a tensor of such a shape."""
    expect_tensor(name, value)
    if not value.shape:
        value_error("{} has shape []: expected [..., {}]", name, last)
    return value.reshape(-1, value.shape[-1])


def present(name: str, value: Tensor | None) -> Tensor:
    """`value`. Raises TypeError when it is None."""
    if value is None:
        type_error("{}=None: expected a torch.Tensor", name)
    return value
