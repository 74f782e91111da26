"""What the parts of a `ModularKernel` are, and the values that they hand each other.

Letters: T tokens, H hidden size, E experts held here, K experts per token, S = T*K slots, M rows set aside for each.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from layers.router import RouterOutput


class ActivationFormat(Enum):
    """How tokens lie before experts, and rows behind them."""

    Standard = "standard"
    """Tokens [T, H]; behind the experts rows [S, H] in expert order, or [T, H] where they are summed already."""
    BatchedExperts = "batched_experts"
    """[E, M, H], of which counts[e] rows of expert e hold tokens, before and behind the experts."""


class Prepared(NamedTuple):
    """What `PrepareAndFinalize.prepare` hands to experts.

    Attributes:
        hidden_states: [T, H] or [E, M, H], as the format says.
        topk_weights, topk_ids: [T, K], of the tokens that `finalize` sums up.
        counts: [E] int32, only of batched experts.
        inverse: [S] int32, only of batched experts: the row in [E*M, H] of each slot, -1 for one that is dropped.
        way_back: whatever `finalize` of the same exchange wants to know; experts pass over it.
        extra_tensors: what went with the tokens, of any dtypes: [R, ...] for hidden_states [R, H], [E, M, ...] for
            [E, M, H]. Scales of quantised rows come first, adapter ids last.
    """

    hidden_states: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    counts: Tensor | None = None
    inverse: Tensor | None = None
    way_back: Any = None
    extra_tensors: tuple[Tensor, ...] = ()


class ExpertOutput(NamedTuple):
    """What experts return.

    Attributes:
        rows: [S, H], [E, M, H], or [T, H] where the experts have weighed and summed.
        inverse: [S] int32, the row of each slot, -1 for one that is dropped; None for [T, H].
    """

    rows: Tensor
    inverse: Tensor | None = None


class TopKWeightAndReduce(Protocol):
    """Weighs the rows of a token's experts and sums them up."""

    @property
    def activation_format(self) -> ActivationFormat | None:
        """The format of the rows it takes; None for any."""
        ...

    def apply(self, output: ExpertOutput, topk_weights: Tensor, shared: Tensor | None) -> Tensor:
        """[T, H] from the rows and weights [T, K]; `shared` [T, H] is added to the sum."""
        ...


class TopKWeightAndReduceDelegate:
    """What experts say that leave it to the `PrepareAndFinalize`."""


class PrepareAndFinalize(Protocol):
    """Brings tokens to experts, and what they return back to tokens."""

    @property
    def activation_format(self) -> ActivationFormat:
        """The format of what `prepare` returns."""
        ...

    @property
    def weigh_and_reduce(self) -> TopKWeightAndReduce:
        """What it does with rows of experts that leave the choice to it (`TopKWeightAndReduceDelegate`)."""
        ...

    def prepare(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Prepared:
        """Tokens [T, H] and who is to see them [T, K], to what experts take. `num_experts` are held here.

        `extra_tensors` [T, ...] arrive in the rows that their tokens arrive in.
        """
        ...

    def finalize(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Tensor:
        """[T, H]: rows weighed, summed and brought back, `shared` [T, H] added."""
        ...


@runtime_checkable
class AsyncPrepareAndFinalize(PrepareAndFinalize, Protocol):
    """One that can return before its exchange is over."""

    def prepare_async(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> tuple[Callable[[], None], Callable[[], Prepared]]:
        """`prepare`, started: a hook and a receiver."""
        ...

    def finalize_async(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> tuple[Callable[[], None], Callable[[], Tensor]]:
        """`finalize`, started: a hook and a receiver."""
        ...


class PermuteExpertsUnpermute(Protocol):
    """Experts: a module that holds their weights."""

    @property
    def activation_formats(self) -> tuple[ActivationFormat, ActivationFormat]:
        """Of what they take and of what they return."""
        ...

    @property
    def weigh_and_reduce(self) -> TopKWeightAndReduce | TopKWeightAndReduceDelegate:
        """What is left to do with what they return."""
        ...

    @property
    def num_experts(self) -> int:
        """E, how many of them are here."""
        ...

    @property
    def expert_map(self) -> Tensor | None:
        """[E_global] int32, the local index of every expert, -1 for one that lives elsewhere; None if all are here."""
        ...

    @property
    def apply_router_weight_on_input(self) -> bool:
        """Whether what they are given is to be weighed instead of what they return."""
        ...

    def extra_tensors(self, num_tokens: int) -> tuple[Tensor, ...]:
        """[T, ...] that they want to get of each token besides what the caller gives: adapter ids."""
        ...

    def route(self, router_logits: Tensor, hidden_states: Tensor | None = None) -> RouterOutput:
        """Picks the logical experts of each token; functions of a user's may want to see the tokens."""
        ...

    def places_of(self, topk_ids: Tensor) -> Tensor:
        """[T, K]: where the chosen experts are, physical ones where experts have replicas. Called once a forward."""
        ...

    def reset_parameters(self) -> None:
        """Draws their parameters anew."""
        ...

    def __call__(self, prepared: Prepared) -> ExpertOutput:
        """Runs them."""
        ...
