"""Stands in for symmetric memory: files that processes map, and kernels that are interpreted. Test-only.

So the whole exchange runs among processes of a CPU, each with addresses of its own.
"""

import contextlib
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from layers.parallel import symmetric
from layers.parallel.group import process_group
from moe_ops import _library, pull_sums, push_rows
from moe_ops.arguments import PullSums, PushRows
from moe_ops.kernels import exchange_plans
from moe_ops.kernels.gpu import KIB, Gpu
from moe_ops.peers import ExchangeLayout, Peers, find_peers, new_turns
from tests.kernels.brisk import brisk


@contextlib.contextmanager
def symmetric_memory_of_processes() -> Iterator[None]:
    """On every rank of the world at once."""
    library = torch.library.Library("moe", "IMPL")
    for record, module in ((PushRows, push_rows), (PullSums, pull_sums)):
        operator = _library.OPERATORS[record]
        launched = _library._checked(operator.build, module._check, module._cuda)
        library.impl(operator.name, launched, "CPU", allow_override=True)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        mock.patch.object(symmetric, "_peers", lambda *given: _peers(folder, *given)),
        mock.patch.object(exchange_plans, "gpu_of", return_value=Gpu(90, 3, 227 * KIB)),
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
        brisk(),
    ):
        try:
            yield
        finally:
            library._destroy()


def _peers(folder: str, group: Any, layout: ExchangeLayout, timeout: float) -> Peers:
    processes = process_group(group)
    name = f"{processes.group_name} {layout}"
    known = find_peers(name)
    if known is not None:
        return known
    path = Path(tempfile.mkdtemp(dir=folder), "buffer")
    with path.open("wb") as file:
        file.truncate(layout.num_bytes)
    paths: list[Any] = [None] * processes.size()
    dist.all_gather_object(paths, str(path), group=processes)
    buffers = [_mapped(each, layout.num_bytes) for each in paths]
    dist.barrier()  # a file may go when all have it
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    return Peers(name, processes.rank(), layout, addresses, new_turns(timeout, "cpu"), buffers)


def _mapped(path: str, num_bytes: int) -> torch.Tensor:
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
