"""Every access of an interpreted kernel is checked: it must lie inside a tensor that this launch was given.

Stronger than guard zones around buffers: an address a gigabyte away is named, not followed. Test-only: it patches
private names of Triton's interpreter, through which all loads and stores pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

_REAL = interpreter._interpreter
_Range = tuple[int, int]


class OutOfBounds(AssertionError):
    """A kernel touched memory that belongs to none of its tensors."""


def extent(tensor: torch.Tensor) -> _Range:
    """First byte of a tensor's elements and the byte after the last one, whatever its strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


_reachable: list[torch.Tensor] = []


@contextmanager
def reachable(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Kernels may touch these as well: they are given their addresses as numbers."""
    _reachable.extend(tensors)
    try:
        yield
    finally:
        _reachable.clear()


def _ranges(arguments: tuple[Any, ...]) -> list[_Range]:
    tensors = [getattr(argument, "base", argument) for argument in (*arguments, *_reachable)]
    return [extent(t) for t in tensors if isinstance(t, torch.Tensor) and t.numel()]


class _CheckedMemory:
    """Stands in for the interpreter's memory functions while a kernel runs."""

    def __init__(self) -> None:
        self.ranges: list[_Range] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(_REAL, name)

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> np.ndarray:
        self._expect_inside("reads", addresses, mask, np.dtype(dtype).itemsize)
        return _REAL.load(addresses, mask, other, dtype)

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray) -> Any:
        self._expect_inside("writes", addresses, mask, values.itemsize)
        return _REAL.store(addresses, values, mask)

    def atomic_rmw(
        self, operation: Any, addresses: np.ndarray, values: np.ndarray, mask: Any, sem: Any
    ) -> Any:
        self._expect_inside("adds to", addresses, mask, values.itemsize)
        return _REAL.atomic_rmw(operation, addresses, values, mask, sem)

    def _expect_inside(self, verb: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        active = addresses[np.broadcast_to(mask, addresses.shape).astype(bool, copy=False)]
        for first, end in self.ranges:
            if active.size == 0 or (first <= int(active.min()) and int(active.max()) + size <= end):
                return
            active = active[(active < first) | (active + np.uint64(size) > end)]
        if active.size:
            count = active.size
            raise OutOfBounds(
                f"a kernel {verb} {count} elements outside its tensors, {self._nearest(active)}"
            )

    def _nearest(self, addresses: np.ndarray) -> str:
        first = int(addresses.flat[0])
        away = min(min(abs(first - start), abs(first - end)) for start, end in self.ranges)
        return f"the first {away} bytes away from one"


@contextmanager
def checked() -> Iterator[None]:
    """Raises OutOfBounds from any interpreted launch that leaves its tensors."""
    memory = _CheckedMemory()
    launch = interpreter.GridExecutor.__call__

    def checked_launch(executor: Any, *arguments: Any, **options: Any) -> Any:
        memory.ranges = _ranges((*arguments, *options.values()))
        return launch(executor, *arguments, **options)

    with (
        mock.patch.object(interpreter, "_interpreter", memory),
        mock.patch.object(interpreter.GridExecutor, "__call__", checked_launch),
    ):
        yield
