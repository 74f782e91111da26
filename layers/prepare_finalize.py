"""The `PrepareAndFinalize`s of one device, which exchange nothing: they bring tokens into the format experts take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layers._checks import expect_positive
from layers.carried import in_slot_order, moved_as_bytes, placed
from layers.modular_parts import ActivationFormat, ExpertOutput, Prepared, TopKWeightAndReduce
from layers.weigh_and_reduce import TopKWeightAndReduceContiguous, TopKWeightAndReduceNaiveBatched
from moe_ops import DispatchPlan, build_dispatch
from moe_ops.gate import expert_of_rows


class LocalPrepareAndFinalize:
    """Tokens as they are: the experts put them in order themselves.

    Example:
        >>> kernel = ModularKernel(LocalPrepareAndFinalize(), StandardExperts(FusedMoE(config)))
    """

    activation_format = ActivationFormat.Standard
    weigh_and_reduce = TopKWeightAndReduceContiguous()

    def prepare(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Prepared:
        """What it is given."""
        return Prepared(hidden_states, topk_weights, topk_ids, extra_tensors=tuple(extra_tensors))

    def finalize(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Tensor:
        """The weighed sum, in which `shared` takes part before it is rounded."""
        return weigh_and_reduce.apply(output, prepared.topk_weights, shared)


@dataclass(frozen=True)
class BatchedPrepareAndFinalize(LocalPrepareAndFinalize):
    """Tokens copied to [E, M, H], by static shapes and without a look at the counts on the host.

    Args:
        max_tokens: M, the rows set aside for each expert. None sets aside T, which is always enough: a token chooses
            an expert once. With less, the slots that find their expert full are dropped, the last tokens first:
            they contribute zero, and nothing is raised, since nobody looks.

    Raises:
        TypeError, ValueError: `max_tokens` is not None or an int of at least 1.

    Example:
        >>> kernel = ModularKernel(BatchedPrepareAndFinalize(max_tokens=64), BatchedExperts(FusedMoE(config)))
    """

    max_tokens: int | None = None
    activation_format = ActivationFormat.BatchedExperts
    weigh_and_reduce = TopKWeightAndReduceNaiveBatched()

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            expect_positive("max_tokens", self.max_tokens)

    def prepare(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Prepared:
        """Counts, the row of every slot, and the rows; those without a token are zero."""
        max_tokens = hidden_states.shape[0] if self.max_tokens is None else self.max_tokens
        plan = build_dispatch(topk_ids, num_experts, expert_map)
        places = batched_places(plan, max_tokens)
        num_rows = num_experts * max_tokens

        def place(x: Tensor) -> Callable[[], Tensor]:
            rows = in_slot_order(x, plan.sorted_slots, topk_ids.shape[1])
            return lambda: placed(rows, places, num_rows)

        batched, *extras = (
            moved_as_bytes(place, each)().unflatten(0, (num_experts, max_tokens))
            for each in (hidden_states, *extra_tensors)
        )
        counts = plan.expert_offsets.diff().clamp(max=max_tokens)
        row = torch.where(places < num_rows, places, -1).to(torch.int32)
        inverse = torch.where(plan.inverse < 0, -1, row[plan.inverse.clamp(min=0).long()])
        return Prepared(batched, topk_weights, topk_ids, counts, inverse, extra_tensors=tuple(extras))


def batched_places(plan: DispatchPlan, max_tokens: int) -> Tensor:
    """[S] int64: where each row of a plan goes among E * max_tokens; E * max_tokens for one that is dropped."""
    offsets, num_experts = plan.expert_offsets, plan.expert_offsets.shape[0] - 1
    expert = expert_of_rows(offsets, plan.sorted_slots.shape[0])
    rank = torch.arange(expert.shape[0], dtype=torch.int32, device=offsets.device) - offsets[expert]
    fits = (expert < num_experts) & (rank < max_tokens)
    return torch.where(fits, expert * max_tokens + rank, num_experts * max_tokens)
