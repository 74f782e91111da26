"""What every operator takes, declared once, by name: for schemas, checks, gradients, vmap, launch plans and passes.

T tokens, H hidden size, E experts held here, K experts per token, S = T*K slots, I intermediate size.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from moe_ops.records import Role
from moe_ops.values import (
    Epilogue,
    ExchangePlan,
    ExpertWeights,
    Gate,
    GroupedLinear,
    Ids,
    Index,
    LoadRecord,
    PairedLinear,
    PerToken,
    PerTokenOrNone,
    Placement,
    Replicas,
    Router,
    SharedExpert,
)

# Stages


class MapReplicas(NamedTuple):
    """Of `map_replicas`."""

    topk_ids: Ids
    replicas: Replicas
    seed: Annotated[Tensor | None, Role.WHOLE, Role.CONSTANT] = None


class MapAndRecord(NamedTuple):
    """Of `map_and_record`: a `map_replicas` that records."""

    choice: MapReplicas
    record: LoadRecord


class TopkRouting(NamedTuple):
    """Of `topk_routing`."""

    router: Router


class TopkRoutingBackward(NamedTuple):
    """Of `topk_routing_backward`: gradient, outputs [T, K] and logits of the forward."""

    grad_weights: PerToken
    router_logits: PerToken
    topk_weights: Annotated[Tensor, Role.PER_TOKEN, Role.CONSTANT]
    topk_ids: Ids
    routing: str


class BuildDispatch(NamedTuple):
    """Of `build_dispatch`."""

    topk_ids: Ids
    placement: Placement
    num_experts: int


class Permute(NamedTuple):
    """Of `permute`."""

    hidden_states: Tensor
    sorted_slots: Index


class PermuteBackward(NamedTuple):
    """Of `permute_backward`: gradient [S, H]."""

    grad: Tensor
    sorted_slots: Index
    num_tokens: Annotated[int, Role.SYMBOLIC]


class GroupedGemm(NamedTuple):
    """Of `grouped_gemm`."""

    x: Tensor
    weight: PairedLinear
    expert_offsets: Index


class GroupedGemmWeightBackward(NamedTuple):
    """Of `grouped_gemm_weight_backward`: gradient [S, B] and input [S, A]."""

    grad: Tensor
    x: Tensor
    expert_offsets: Index


class BatchedGemm(NamedTuple):
    """Of `batched_gemm`."""

    x: Tensor
    weight: GroupedLinear
    counts: Index


class DenseGemm(NamedTuple):
    """Of `dense_gemm`."""

    x: PerToken
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype


class GatedActivation(NamedTuple):
    """Of `gated_activation`."""

    gate_up: PerToken
    activation: str


class GatedActivationBackward(NamedTuple):
    """Of `gated_activation_backward`: gradient [S, I]."""

    grad: PerToken
    gate_up: PerToken
    activation: str


class WeightedActivationBackward(NamedTuple):
    """Of `weighted_activation_backward`: scale [S]."""

    rows: GatedActivationBackward
    scale: PerToken


class Combine(NamedTuple):
    """Of `combine`."""

    expert_out: Tensor
    topk_weights: Tensor
    inverse: Index
    shared: Tensor | None
    epilogue: Epilogue = Epilogue()


class CombineBackward(NamedTuple):
    """Of `combine_backward`: gradient [T, H]."""

    grad: Tensor
    expert_out: Tensor
    topk_weights: Tensor
    inverse: Index


# Fusion targets


class RouteAndRecord(NamedTuple):
    """Of `route_and_record`: a `topk_routing`, and a `map_and_record` of what it chooses."""

    router: Router
    replicas: Replicas
    record: LoadRecord
    seed: Annotated[Tensor | None, Role.WHOLE, Role.CONSTANT] = None


class RoutingDispatch(NamedTuple):
    """Of `routing_dispatch`."""

    router: Router
    placement: Placement
    num_experts: int


class GatherGemmAct(NamedTuple):
    """Of `gather_gemm_act`."""

    hidden_states: Tensor
    w13: PairedLinear
    sorted_slots: Index
    expert_offsets: Index
    activation: str


class GatherGemmFormula(NamedTuple):
    """Of `gather_gemm_formula`."""

    hidden_states: Tensor
    w13: PairedLinear
    sorted_slots: Index
    expert_offsets: Index
    gate: Gate


class GemmCombine(NamedTuple):
    """Of `gemm_combine`."""

    x: Tensor
    w2: GroupedLinear
    expert_offsets: Index
    topk_weights: Tensor
    inverse: Index
    shared: Tensor | None
    epilogue: Epilogue = Epilogue()


class GatherGemm(NamedTuple):
    """Of `gather_gemm`."""

    hidden_states: Tensor
    w13: PairedLinear
    sorted_slots: Index
    expert_offsets: Index


class ActGemmCombine(NamedTuple):
    """Of `act_gemm_combine`; only the gradient reads `sorted_slots`."""

    gate_up: Tensor
    w2: GroupedLinear
    expert_offsets: Index
    topk_weights: Tensor
    sorted_slots: Index
    inverse: Index
    shared: Tensor | None
    activation: str
    epilogue: Epilogue = Epilogue()


class FusedExperts(NamedTuple):
    """Of `fused_experts`."""

    hidden_states: PerToken
    experts: ExpertWeights
    topk_weights: PerToken
    topk_ids: Ids
    placement: Placement
    shared: PerTokenOrNone
    activation: str
    epilogue: Epilogue = Epilogue()

    def first_half(self, slots: Tensor, offsets: Tensor) -> GatherGemmAct:
        """Up to the second product, with this plan."""
        return GatherGemmAct(self.hidden_states, self.experts.w13, slots, offsets, self.activation)


class FusedExpertsFormula(NamedTuple):
    """Of `fused_experts_formula`."""

    hidden_states: PerToken
    experts: ExpertWeights
    topk_weights: PerToken
    topk_ids: Ids
    placement: Placement
    shared: PerTokenOrNone
    gate: Gate
    epilogue: Epilogue = Epilogue()

    def first_half(self, slots: Tensor, offsets: Tensor) -> GatherGemmFormula:
        """Up to the second product, with this plan."""
        return GatherGemmFormula(self.hidden_states, self.experts.w13, slots, offsets, self.gate)


class FusedExpertsWithShared(NamedTuple):
    """Of `fused_experts_with_shared`."""

    hidden_states: PerToken
    experts: ExpertWeights
    topk_weights: PerToken
    topk_ids: Ids
    placement: Placement
    shared: SharedExpert
    activation: str

    @property
    def routed(self) -> FusedExperts:
        """What is left without the shared expert."""
        return FusedExperts(*self[:5], None, self.activation)  # type: ignore[arg-type]  # a slice


class FusedMoe(NamedTuple):
    """Of `fused_moe`."""

    hidden_states: PerToken
    router: Router
    experts: ExpertWeights
    placement: Placement
    activation: str

    def routed(self, topk_weights: Tensor, topk_ids: Tensor) -> FusedExperts:
        """What is left when the router has chosen."""
        x, _, experts, placement, activation = self
        return FusedExperts(x, experts, topk_weights, topk_ids, placement, None, activation)


class FusedMoeFormula(NamedTuple):
    """Of `fused_moe_formula`."""

    hidden_states: PerToken
    router: Router
    experts: ExpertWeights
    placement: Placement
    gate: Gate

    def routed(self, topk_weights: Tensor, topk_ids: Tensor) -> FusedExpertsFormula:
        """What is left when the router has chosen."""
        x, _, experts, placement, gate = self
        return FusedExpertsFormula(x, experts, topk_weights, topk_ids, placement, None, gate)


# Between ranks


class PlanExchange(NamedTuple):
    """Of `plan_exchange`."""

    topk_ids: Ids
    owners: Index
    num_ranks: int
    max_tokens: int


class PushRows(NamedTuple):
    """Of `push_rows`."""

    hidden_states: Tensor
    topk_weights: Tensor | None
    topk_ids: Annotated[Tensor | None, Role.CONSTANT]
    extra: Annotated[Tensor | None, Role.CONSTANT]
    plan: ExchangePlan
    peers: str


class PullSums(NamedTuple):
    """Of `pull_sums`: rows [W*M, H]."""

    rows: Tensor
    plan: ExchangePlan
    received: Index
    shared: Tensor | None
    peers: str
