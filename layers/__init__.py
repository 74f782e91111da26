"""Mixture-of-experts modules. They are right with no compiler pass installed, and never import one.

`layers.huggingface` plugs the same operators into transformers models; it is imported by name only, so that
these layers need no transformers.
"""

from layers.config import MoEConfig, RouterConfig, SharedExpertConfig
from layers.fused_moe import FusedMoE
from layers.local_experts import BatchedExperts, LocalExperts, StandardExperts
from layers.modular_kernel import ModularKernel, Pending
from layers.modular_parts import (
    ActivationFormat,
    AsyncPrepareAndFinalize,
    ExpertOutput,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Prepared,
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
)
from layers.moe_block import MoEBlock
from layers.prepare_finalize import BatchedPrepareAndFinalize, LocalPrepareAndFinalize
from layers.router import Router, RouterOutput
from layers.runner import MoERunner, Reduction
from layers.shared_experts import SharedExperts
from layers.weigh_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOp,
)
from layers.weight_decay import weight_decay_groups

__all__ = [
    "ActivationFormat",
    "AsyncPrepareAndFinalize",
    "BatchedExperts",
    "BatchedPrepareAndFinalize",
    "ExpertOutput",
    "FusedMoE",
    "LocalExperts",
    "LocalPrepareAndFinalize",
    "ModularKernel",
    "MoEBlock",
    "MoEConfig",
    "MoERunner",
    "Pending",
    "PermuteExpertsUnpermute",
    "PrepareAndFinalize",
    "Prepared",
    "Reduction",
    "Router",
    "RouterConfig",
    "RouterOutput",
    "SharedExpertConfig",
    "SharedExperts",
    "StandardExperts",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOp",
    "weight_decay_groups",
]
