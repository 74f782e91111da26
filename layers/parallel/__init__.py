"""Experts on many devices: styles for `parallelize_module`, and exchanges of tokens for `layers.ModularKernel`."""

from layers.parallel.all_gather import AllGatherPrepareAndFinalize
from layers.parallel.all_reduce import AllReducePrepareAndFinalize
from layers.parallel.all_to_all import AllToAllPrepareAndFinalize, PaddedAllToAllPrepareAndFinalize
from layers.parallel.batched import BatchedExchange
from layers.parallel.clipping import clip_grad_norm_
from layers.parallel.config import ParallelConfig
from layers.parallel.group import ExpertRanks, Group
from layers.parallel.hierarchical import HierarchicalPrepareAndFinalize
from layers.parallel.monolithic import AllGatherMonolithic
from layers.parallel.ranks_own import names_of_ranks_own
from layers.parallel.rebalancing import ExpertRebalancer
from layers.parallel.styles import ExpertParallel, ExpertTensorParallel
from layers.parallel.symmetric import SymmetricPrepareAndFinalize

__all__ = [
    "AllGatherMonolithic",
    "AllGatherPrepareAndFinalize",
    "AllReducePrepareAndFinalize",
    "AllToAllPrepareAndFinalize",
    "BatchedExchange",
    "ExpertParallel",
    "ExpertRanks",
    "ExpertRebalancer",
    "ExpertTensorParallel",
    "Group",
    "HierarchicalPrepareAndFinalize",
    "PaddedAllToAllPrepareAndFinalize",
    "ParallelConfig",
    "SymmetricPrepareAndFinalize",
    "clip_grad_norm_",
    "names_of_ranks_own",
]
