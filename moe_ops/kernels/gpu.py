"""What a launch plan may know of the GPU it is made for."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

KIB = 1024
_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True, slots=True)
class Gpu:
    """capability: 90 for compute capability 9.0. shared_memory: bytes that one CTA can have."""

    capability: int
    multiprocessors: int
    shared_memory: int

    @property
    def has_tma(self) -> bool:
        """Whether it loads boxes by descriptor."""
        return self.capability >= 90


H200 = Gpu(90, 132, 227 * KIB)
"""H100 and H200 alike; what plans are made for where there is no GPU to ask (fake tensors, the interpreter)."""


@lru_cache(maxsize=None)
def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind `device`, an H200 for any other device and where there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    return Gpu(capability, found.multi_processor_count, found.shared_memory_per_block_optin)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Within it launches go to `device`."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(device)
