"""Mixture-of-experts modules. They are right with no compiler pass installed, and never import one.

`layers.huggingface` plugs the same operators into transformers models; it is imported by name only, so that
these layers need no transformers.
"""

from layers.balancing import EplbState, ExpertBalancing
from layers.config import ExpertsConfig, MoEConfig, RouterConfig, SharedExpertConfig
from layers.cuda_graphs import CudaGraphRunner, GraphMemory
from layers.fused_moe import FusedMoE
from layers.graph_capture import CaptureError
from layers.local_experts import BatchedExperts, LocalExperts, StandardExperts
from layers.lora import ExpertLora
from layers.low_rank import LowRank, join_gate_up
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
from layers.placement import ExpertPlacement, determine_expert_map, rebalance_experts, spread_experts
from layers.prepare_finalize import BatchedPrepareAndFinalize, LocalPrepareAndFinalize
from layers.quantising import add_weight_scales, quantise_experts
from layers.routed_experts import HashRouting, RoutedExpertsCapture, RoutedExpertsReplay
from layers.router import Router, RouterOutput
from layers.runner import MoERunner, Reduction
from layers.shared_experts import SharedExperts
from layers.simulator import SimulatedRouting, register_routing_strategy, sample_experts
from layers.weigh_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOp,
)
from layers.weight_decay import weight_decay_groups
from layers.weights.loading import load_checkpoint
from layers.weights.packed_integers import (
    PackedIntegers,
    integers_of_awq,
    integers_of_gptq,
    zeros_of_compressed_tensors,
)
from layers.weights.saving import checkpoint_state_dict
from layers.weights.scales import WeightScale
from layers.weights.shard import TensorShard

__all__ = [
    "CaptureError",
    "CudaGraphRunner",
    "GraphMemory",
    "EplbState",
    "ExpertLora",
    "ExpertBalancing",
    "ExpertPlacement",
    "ExpertsConfig",
    "ActivationFormat",
    "AsyncPrepareAndFinalize",
    "BatchedExperts",
    "BatchedPrepareAndFinalize",
    "ExpertOutput",
    "FusedMoE",
    "HashRouting",
    "LocalExperts",
    "LowRank",
    "join_gate_up",
    "LocalPrepareAndFinalize",
    "ModularKernel",
    "MoEBlock",
    "MoEConfig",
    "RoutedExpertsCapture",
    "RoutedExpertsReplay",
    "MoERunner",
    "PackedIntegers",
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
    "SimulatedRouting",
    "TensorShard",
    "WeightScale",
    "add_weight_scales",
    "checkpoint_state_dict",
    "determine_expert_map",
    "integers_of_awq",
    "integers_of_gptq",
    "load_checkpoint",
    "quantise_experts",
    "rebalance_experts",
    "register_routing_strategy",
    "sample_experts",
    "spread_experts",
    "StandardExperts",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOp",
    "weight_decay_groups",
    "zeros_of_compressed_tensors",
]
