"""Who weighs the rows of experts and sums them up: the `TopKWeightAndReduce`s there are, as values."""

from dataclasses import dataclass

from torch import Tensor

from layers._checks import present
from layers.modular_parts import ActivationFormat, ExpertOutput
from moe_ops import combine
from moe_ops._library import autocast
from moe_ops.combine import check_shared


@dataclass(frozen=True, slots=True)
class TopKWeightAndReduceContiguous:
    """Rows [S, H] in expert order: the sum of `moe_ops.combine`, in the compute dtype and in slot order."""

    activation_format = ActivationFormat.Standard

    def apply(self, output: ExpertOutput, topk_weights: Tensor, shared: Tensor | None) -> Tensor:
        """[T, H]."""
        return combine(output.rows, topk_weights, present("inverse", output.inverse), shared)


@dataclass(frozen=True, slots=True)
class TopKWeightAndReduceNaiveBatched:
    """Rows [E, M, H]: the same sum, each slot's row where `BatchedPrepareAndFinalize` has put it."""

    activation_format = ActivationFormat.BatchedExperts

    def apply(self, output: ExpertOutput, topk_weights: Tensor, shared: Tensor | None) -> Tensor:
        """[T, H]."""
        return combine(output.rows.flatten(0, 1), topk_weights, present("inverse", output.inverse), shared)


@dataclass(frozen=True, slots=True)
class TopKWeightAndReduceNoOp:
    """[T, H] from experts that have weighed and summed themselves."""

    activation_format = None

    def apply(self, output: ExpertOutput, topk_weights: Tensor, shared: Tensor | None) -> Tensor:
        """[T, H]; a shared output is rounded once more than by the others."""
        return plus(output.rows, shared)


def plus(sums: Tensor, shared: Tensor | None) -> Tensor:
    """The output of shared experts [T, H], added to sums that are rounded already."""
    if shared is None:
        return sums
    routed, addend = autocast((sums, shared))
    check_shared(addend, routed.shape[0], routed.shape[1], "hidden_states", routed)
    return routed + addend
