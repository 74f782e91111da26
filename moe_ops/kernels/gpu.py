"""What a launch plan may know of the GPU it is made for."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from moe_ops.kernels.tuning import Tuning

KIB = 1024
_SLOW = 30e9  # bytes a second for each multiprocessor: an H100 has 25e9, an H200 37e9
_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, slots=True)
class Gpu:
    """capability: 90 for compute capability 9.0. shared_memory: bytes that one CTA can have. tuning: table in use.

    memory_speed: bytes a second that its memory can send, 4.9e12 of an H200 and 3.4e12 of an H100.
    """

    capability: int
    multiprocessors: int
    shared_memory: int
    tuning: Tuning | None = None
    memory_speed: float = 4.9e12

    @property
    def has_slow_memory(self) -> bool:
        """Whether its memory sends each multiprocessor about what an H100's does, or less."""
        return self.memory_speed < _SLOW * self.multiprocessors

    @property
    def has_tma(self) -> bool:
        """Whether it loads boxes by descriptor."""
        return self.capability >= 90


H200 = Gpu(90, 132, 227 * KIB)
"""What plans are made for where there is no GPU to ask (fake tensors, the interpreter)."""


H200_NAME = "NVIDIA H200"
_IN_USE: list[Tuning] = []


@lru_cache(maxsize=None)
def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind `device`, an H200 for any other device and where there is no GPU, and the table in use for it."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return replace(H200, tuning=_tuning_of(H200_NAME))
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    tuning = _tuning_of(found.name)
    # A clock in kHz, two transfers each, of so many bits.
    speed = 2e3 * found.memory_clock_rate * found.memory_bus_width / 8
    return Gpu(capability, found.multi_processor_count, found.shared_memory_per_block_optin, tuning, speed)


def _tuning_of(name: str) -> Tuning | None:
    return next((tuning for tuning in _IN_USE if tuning.gpu == name), None)


def names() -> list[str]:
    """Of the GPUs here, or of the one that plans are for where there is none."""
    if not torch.cuda.is_available():
        return [H200_NAME]
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def use(tuning: Tuning | None) -> None:
    """From now on `gpu_of` a GPU of its name has this table, and no other has one."""
    _IN_USE[:] = [] if tuning is None else [tuning]
    gpu_of.cache_clear()


def in_use() -> Tuning | None:
    """The table given to `use` last."""
    return next(iter(_IN_USE), None)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within it launches go to `device`."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(device)
