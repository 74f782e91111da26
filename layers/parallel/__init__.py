"""Experts on many devices: exchanges of tokens over a process group, for `layers.ModularKernel`."""

from layers.parallel.all_gather import AllGatherPrepareAndFinalize
from layers.parallel.all_reduce import AllReducePrepareAndFinalize
from layers.parallel.all_to_all import AllToAllPrepareAndFinalize, PaddedAllToAllPrepareAndFinalize
from layers.parallel.group import ExpertRanks, Group

__all__ = [
    "AllGatherPrepareAndFinalize",
    "AllReducePrepareAndFinalize",
    "AllToAllPrepareAndFinalize",
    "ExpertRanks",
    "Group",
    "PaddedAllToAllPrepareAndFinalize",
]
