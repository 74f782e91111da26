"""Several collectives of torch's under way on gloo, and nothing of ours: `python -m tests.layers.parallel.gloo_crash`.

Torch 2.13 ends with SIGSEGV or SIGABRT in gloo's own thread (`Pair::handleRemotePendingSend`), on two cores within
seconds to a minute; torch 2.11 does not, nor does 2.13 where each collective is waited for before the next.
"""

import multiprocessing
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

_W, _STEPS = 2, 60_000


def _rank(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, _W), rank=rank, world_size=_W)
    functional, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    tensors = [torch.full((9, 64), float(rank)), torch.full((9, 2), float(rank)), torch.full((9, 2), rank)]
    for _ in range(_STEPS):
        started = [functional.all_gather_into_tensor(each, _W, name) for each in tensors]
        gathered, *_ = [functional.wait_tensor(each) for each in started]
        functional.wait_tensor(functional.reduce_scatter_tensor(gathered, "sum", _W, name))
    os._exit(0)


def main() -> int:
    """The exit status is 1 when a rank crashed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, str(Path(folder, "store")))) for rank in range(_W)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    print(f"torch {torch.__version__}: exit codes {[each.exitcode for each in ranks]}")
    return int(any(each.exitcode for each in ranks))


if __name__ == "__main__":
    raise SystemExit(main())
