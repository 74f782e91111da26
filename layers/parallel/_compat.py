"""Symmetric memory of torch, which is private in 2.11 to 2.14: the one file of `layers` that knows it.

The backend is the default one, "CUDA": plain peer-to-peer memory. `set_backend("CUDA")` raises on torch 2.11, and that
of NVSHMEM has barriers that do nothing (pytorch/pytorch#191858). Multicast is never used.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class SymmetricMemory(NamedTuple):
    """Memory of a rank that the others of its group reach.

    Attributes:
        buffer: [num_bytes] uint8, of this rank, zeros.
        addresses: [W] int64, where the buffer of each rank lies for this one.
    """

    buffer: Tensor
    addresses: Tensor


def symmetric_memory(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device, timeout_s: float
) -> SymmetricMemory:
    """Allocates so many bytes on every rank. All have to call it, with the same number, outside of captures.

    A rank that stays away for longer than `timeout_s` is an error of the device on the ranks that wait.
    """
    from torch.distributed import _symmetric_memory

    buffer = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(buffer, group.group_name)
    buffer.zero_()
    addresses = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device)
    handle.barrier(channel=0, timeout_ms=int(1000 * timeout_s))  # zeros are there before anybody writes
    torch.cuda.synchronize(device)
    return SymmetricMemory(buffer, addresses)
