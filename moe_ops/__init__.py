"""Mixture-of-Experts operators for PyTorch that the compiler can see through.

Importing this package registers `torch.ops.moe.*` and adds the hash of its sources to the compile cache key.
"""

from moe_ops import (
    batch_invariant as _batch_invariant,  # noqa: F401  # for public functions
    exchange_plan as _plans,  # noqa: F401  # for layers
    fused_moe_formula as _fused_moe_formula,  # noqa: F401  # for passes
    pull_sums as _pulls,  # noqa: F401  # for layers
    push_rows as _pushes,  # noqa: F401  # for layers
    route_and_record as _registered,  # noqa: F401  # for layers
)
from moe_ops._cache_key import source_hash, tag_compile_caches
from moe_ops.act_gemm_combine import act_gemm_combine
from moe_ops.activation import gated_activation
from moe_ops.batched import batched_gemm
from moe_ops.combine import combine
from moe_ops.dense_gemm import dense_gemm
from moe_ops.dequantise_weight import dequantise_weight
from moe_ops.dispatch import build_dispatch
from moe_ops.fused_experts import fused_experts
from moe_ops.fused_moe import fused_moe
from moe_ops.gather_gemm import gather_gemm
from moe_ops.gather_gemm_act import gather_gemm_act
from moe_ops.gemm_combine import gemm_combine
from moe_ops.grouped_gemm import grouped_gemm
from moe_ops.permute import permute
from moe_ops.placement import map_replicas
from moe_ops.quantise_rows import quantise_rows
from moe_ops.routing import routing_weights, topk_routing
from moe_ops.routing_dispatch import routing_dispatch
from moe_ops.scaled import scaled_grouped_gemm
from moe_ops.scaled_experts import scaled_fused_experts
from moe_ops.shared import fused_experts_with_shared
from moe_ops.tuning import Tuning, tuning_key, use_tuning
from moe_ops.types import Activation, DispatchPlan, InputScales, RoutingConfig, ScaledWeight
from moe_ops.warmup import warmup
from moe_ops.warmup_step import warmup_step

__all__ = [
    "Activation",
    "DispatchPlan",
    "InputScales",
    "RoutingConfig",
    "ScaledWeight",
    "Tuning",
    "act_gemm_combine",
    "batched_gemm",
    "build_dispatch",
    "combine",
    "dense_gemm",
    "dequantise_weight",
    "fused_experts",
    "fused_experts_with_shared",
    "fused_moe",
    "gated_activation",
    "gather_gemm",
    "gather_gemm_act",
    "gemm_combine",
    "grouped_gemm",
    "map_replicas",
    "permute",
    "quantise_rows",
    "routing_dispatch",
    "routing_weights",
    "scaled_fused_experts",
    "scaled_grouped_gemm",
    "source_hash",
    "topk_routing",
    "tuning_key",
    "use_tuning",
    "warmup",
    "warmup_step",
]

tag_compile_caches()
