"""Parts for ranks, one of which fails on one of them."""

import torch
import torch.distributed as dist


def start(rank, size, options):
    return rank


def total(rank):
    told = torch.tensor([rank + 1.0])
    dist.all_reduce(told)
    return told.item()


def broken(rank):
    if rank == 1:
        raise ZeroDivisionError("of rank 1")
    dist.barrier()


PARTS = {"first": total, "broken": broken, "last": total}
