"""Checks of what a user hands to a layer. Of tensors they read metadata and static sizes only, so they add no guards.

Every message names the argument, what it is, and what was expected.
"""

from typing import get_args

from torch import Tensor


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


def expect_choice(name: str, value: object, choices: object) -> None:
    """Raises ValueError unless `value` is one of the strings of the Literal `choices`."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def expect_features(name: str, value: object, size: int) -> None:
    """Raises TypeError or ValueError unless `value` is a floating point tensor [..., size]."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a torch.Tensor")
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name} has dtype {value.dtype}: expected a floating point dtype")
    if value.dim() == 0:
        raise ValueError(f"{name} has shape []: expected [..., {size}]")
    if value.shape[-1] != size:
        raise ValueError(f"{name} has last dimension {value.shape[-1]}: expected {size}")
