"""Which function makes the launch plan of an operator, by the record of its arguments."""

from collections.abc import Callable
from typing import Any

from moe_ops import arguments as of, invariant_arguments as invariant, scaled_arguments
from moe_ops.kernels import (
    activation,
    batched,
    combine,
    dense,
    dequantise_weight,
    dispatch,
    exchange_planning,
    fused,
    grouped_gemm,
    permute,
    placement,
    quantise_rows,
    routing,
    scaled,
    scaled_fused,
    weight_gradient,
)
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Program
from moe_ops.values import SharedAlone

PROGRAMS: dict[type, Callable[[Any, Gpu], Program]] = {
    of.TopkRouting: routing.topk_routing_program,
    of.TopkRoutingBackward: routing.topk_routing_backward_program,
    of.PlanExchange: exchange_planning.plan_exchange_program,
    of.BuildDispatch: dispatch.build_dispatch_program,
    of.MapReplicas: placement.map_replicas_program,
    of.MapAndRecord: placement.map_and_record_program,
    of.RouteAndRecord: placement.route_and_record_program,
    of.Permute: permute.permute_program,
    of.PermuteBackward: permute.permute_backward_program,
    of.GroupedGemm: grouped_gemm.grouped_gemm_program,
    of.GroupedGemmWeightBackward: weight_gradient.grouped_gemm_weight_backward_program,
    scaled_arguments.QuantiseRows: quantise_rows.quantise_rows_program,
    scaled_arguments.DequantiseWeight: dequantise_weight.dequantise_weight_program,
    scaled_arguments.ScaledGroupedGemm: scaled.scaled_grouped_gemm_program,
    scaled_arguments.ScaledFusedExperts: scaled_fused.scaled_fused_experts_program,
    of.BatchedGemm: batched.batched_gemm_program,
    of.DenseGemm: dense.dense_gemm_program,
    of.GatedActivation: activation.gated_activation_program,
    of.GatedActivationBackward: activation.gated_activation_backward_program,
    of.WeightedActivationBackward: activation.weighted_activation_backward_program,
    of.Combine: combine.combine_program,
    of.CombineBackward: combine.combine_backward_program,
    of.RoutingDispatch: fused.routing_dispatch_program,
    of.GatherGemm: fused.gather_gemm_program,
    of.ActGemmCombine: fused.act_gemm_combine_program,
    of.GatherGemmAct: fused.gather_gemm_act_program,
    of.GatherGemmFormula: fused.gather_gemm_act_program,
    of.GemmCombine: fused.gemm_combine_program,
    of.FusedExperts: fused.fused_experts_program,
    of.FusedExpertsFormula: fused.fused_experts_program,
    of.FusedExpertsWithShared: fused.fused_experts_with_shared_program,
    of.FusedMoe: fused.fused_moe_program,
    of.FusedMoeFormula: fused.fused_moe_program,
    SharedAlone: dense.shared_alone_program,
    invariant.BatchInvariantRouting: routing.topk_routing_program,
    invariant.BatchInvariantGemm: grouped_gemm.batch_invariant_gemm_program,
    invariant.BatchInvariantExperts: fused.batch_invariant_experts_program,
}

TAKES: dict[type, Callable[[Any, Gpu], bool]] = {
    SharedAlone: dense.takes,
    of.FusedExpertsWithShared: fused.has_shared_inside,
    of.DenseGemm: dense.takes_product,
    scaled_arguments.DequantiseWeight: dequantise_weight.takes,
    scaled_arguments.ScaledGroupedGemm: scaled.takes,
    scaled_arguments.ScaledFusedExperts: scaled_fused.takes,
}
"""Whether the launches are for such arguments, of operators that a library's products run otherwise."""
