"""What every operator takes, declared once: schemas, checks, gradients, `torch.vmap`, launch plans and graph passes
read it here, by name.

T tokens, H hidden size, E experts held here, K experts per token, S = T*K slots, I intermediate size. What each
argument means stands in the public function of its operator.
"""

from typing import Annotated, NamedTuple

from torch import Tensor

from moe_ops.records import Role

Index = Annotated[Tensor, Role.INDEX]
PerToken = Annotated[Tensor, Role.PER_TOKEN]
PerTokenOrNone = Annotated[Tensor | None, Role.PER_TOKEN]
Ids = Annotated[Tensor, Role.PER_TOKEN, Role.CONSTANT]


# Values: what always travels together


class GroupedLinear(NamedTuple):
    """A product of each expert: weight [E, B, A], bias [E, B]."""

    NAMED_AFTER_FIELD = True

    weight: Tensor
    bias: Tensor | None = None


class ExpertWeights(NamedTuple):
    """The two products of each expert: gate and up [E, 2I, H] ([E, I, H] without a gate), down [E, H, I]."""

    w13: GroupedLinear
    w2: GroupedLinear


class SharedExpert(NamedTuple):
    """The expert that every token visits: gate and up [2J, H], down [H, J], weight [T, 1], and its activation."""

    shared_w13: Tensor
    shared_w2: Tensor
    shared_weights: PerTokenOrNone
    shared_activation: str


class Gate(NamedTuple):
    """A gate captured from PyTorch: tensors that it reads besides gate and up, and the spec of its `Formula`."""

    operand0: Annotated[Tensor | None, Role.WHOLE]
    operand1: Annotated[Tensor | None, Role.WHOLE]
    operand2: Annotated[Tensor | None, Role.WHOLE]
    operand3: Annotated[Tensor | None, Role.WHOLE]
    formula: str

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Those that there are."""
        return tuple(each for each in self[:-1] if each is not None)


class Router(NamedTuple):
    """What chooses experts: logits [T, E_global], correction bias [E_global], and the spec of a `RoutingConfig`."""

    router_logits: PerToken
    correction_bias: Annotated[Tensor | None, Role.WHOLE, Role.CONSTANT]
    routing: str


class Placement(NamedTuple):
    """Where experts are: [E_global], the local index of each."""

    expert_map: Annotated[Tensor | None, Role.WHOLE, Role.INDEX] = None

    def num_ids(self, num_experts: int) -> int:
        """How many experts ids may name, of which `num_experts` are here."""
        return num_experts if self.expert_map is None else self.expert_map.shape[0]


class Replicas(NamedTuple):
    """Where the replicas of each expert are: [E_global, R] physical experts, and [E_global], how many of them count."""

    logical_to_physical: Annotated[Tensor, Role.WHOLE, Role.CONSTANT]
    replica_count: Annotated[Tensor, Role.WHOLE, Role.INDEX]


class LoadRecord(NamedTuple):
    """Where load is recorded: [P] counts, and on the device of how many tokens [], and whether at all []."""

    load: Annotated[Tensor, Role.WHOLE, Role.MUTATED]
    num_real_tokens: Annotated[Tensor | None, Role.WHOLE, Role.CONSTANT] = None
    is_recording: Annotated[Tensor | None, Role.WHOLE, Role.CONSTANT] = None


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
    weight: GroupedLinear
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


class GatedActivation(NamedTuple):
    """Of `gated_activation`."""

    gate_up: PerToken
    activation: str


class GatedActivationBackward(NamedTuple):
    """Of `gated_activation_backward`: gradient [S, I]."""

    grad: PerToken
    gate_up: PerToken
    activation: str


class Combine(NamedTuple):
    """Of `combine`."""

    expert_out: Tensor
    topk_weights: Tensor
    inverse: Index
    shared: Tensor | None


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
    w13: GroupedLinear
    sorted_slots: Index
    expert_offsets: Index
    activation: str


class GatherGemmFormula(NamedTuple):
    """Of `gather_gemm_formula`."""

    hidden_states: Tensor
    w13: GroupedLinear
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


class GatherGemm(NamedTuple):
    """Of `gather_gemm`."""

    hidden_states: Tensor
    w13: GroupedLinear
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


class FusedExperts(NamedTuple):
    """Of `fused_experts`."""

    hidden_states: PerToken
    experts: ExpertWeights
    topk_weights: PerToken
    topk_ids: Ids
    placement: Placement
    shared: PerTokenOrNone
    activation: str

    def first_half(self, sorted_slots: Tensor, expert_offsets: Tensor) -> GatherGemmAct:
        """Up to the second product, with this plan."""
        w13 = self.experts.w13
        return GatherGemmAct(self.hidden_states, w13, sorted_slots, expert_offsets, self.activation)


class FusedExpertsFormula(NamedTuple):
    """Of `fused_experts_formula`."""

    hidden_states: PerToken
    experts: ExpertWeights
    topk_weights: PerToken
    topk_ids: Ids
    placement: Placement
    shared: PerTokenOrNone
    gate: Gate

    def first_half(self, sorted_slots: Tensor, expert_offsets: Tensor) -> GatherGemmFormula:
        """Up to the second product, with this plan."""
        w13 = self.experts.w13
        return GatherGemmFormula(self.hidden_states, w13, sorted_slots, expert_offsets, self.gate)


class FusedExpertsWithShared(NamedTuple):
    """Of `fused_experts_with_shared`."""

    hidden_states: PerToken
    experts: ExpertWeights
    topk_weights: PerToken
    topk_ids: Ids
    placement: Placement
    shared: SharedExpert
    activation: str


class SharedAlone(NamedTuple):
    """Of no operator: what `fused_experts_with_shared` launches beside its routed experts."""

    hidden_states: PerToken
    shared: SharedExpert


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
