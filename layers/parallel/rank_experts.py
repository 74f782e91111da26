"""What a parallel style puts into a layer of experts: their exchange, and which part of each parameter is here."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from layers.lora import LowRank
from layers.modular_kernel import Pending
from layers.modular_parts import ExpertOutput
from layers.parallel.collectives import shared_by_all
from layers.parallel.exchange import Exchange
from layers.parallel.group import Group
from layers.weigh_and_reduce import TopKWeightAndReduceNoOp
from moe_ops.arguments import ExpertWeights, FusedExperts, GroupedLinear


class RankExperts:
    """Runs a layer's experts behind an exchange, on the local parts of parameters that are DTensors.

    Args:
        exchange: brings tokens here and sums back.
        group: the ranks that hold the parameters.
    """

    def __init__(self, exchange: Exchange, group: Group) -> None:
        self.exchange, self.group = exchange, group

    def run(
        self,
        args: FusedExperts,
        num_experts: int,
        run: Callable[..., Tensor],
        shared: Callable[[], Tensor] | None = None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Tensor:
        """The output [T, H] for tokens of this rank.

        Args:
            args: tokens [T, H], how they are routed, and `shared` [T, H] or None.
            num_experts: E_local.
            run: what this rank computes of any tokens, given to it in the place of these, without `shared`, and of
                what came with them.
            shared: computes `shared` while tokens are on their way, where `args` has none.
            extra_tensors: [T, ...] that go with the tokens.
        """
        tokens = args.hidden_states, args.topk_weights, args.topk_ids
        started = self.exchange.prepare_async(*tokens, num_experts, args.placement.expert_map, extra_tensors)
        addend = args.shared if shared is None else shared()
        prepared = Pending(*started).wait()
        received = args._replace(
            hidden_states=prepared.hidden_states,
            topk_weights=prepared.topk_weights,
            topk_ids=prepared.topk_ids,
            experts=self.local_weights(args.experts),
            shared=None,
        )
        output, summed = ExpertOutput(run(received, *prepared.extra_tensors)), TopKWeightAndReduceNoOp()
        return self.exchange.finalize(output, prepared, summed, addend)

    def adapters_of_parts(self, linears: tuple[LowRank, LowRank]) -> tuple[LowRank, LowRank]:
        """Of experts in parts, what every rank has whole: gradients of the parts of the output are summed."""
        w13, w2 = linears
        a13, b2 = shared_by_all(w13.a, self.group), shared_by_all(w2.b, self.group)
        return w13._replace(a=a13), w2._replace(b=b2)

    def local_weights(self, experts: ExpertWeights) -> ExpertWeights:
        """Their parts that are here."""
        w13, w2 = experts
        return ExpertWeights(
            GroupedLinear(self.local_part(w13.weight, 3), self.local_part(w13.bias, 2)),
            GroupedLinear(self.local_part(w2.weight, 3), self.local_part(w2.bias, 2)),
        )

    @staticmethod
    def stored_part(parameter: Any) -> Tensor:
        """The memory of a DTensor that is here: what is written to it is written to the parameter."""
        return parameter.detach().to_local()

    def local_part(self, parameter: Any, num_dims: int, split_dim: int = 1) -> Any:
        """The part of a DTensor that is here. What all ranks have whole counts on the first, for outputs are summed.

        Args:
            parameter: a DTensor; anything else is returned as it is.
            num_dims: of what is returned. A parameter with more has gate rows and up rows apart, in `split_dim`.
        """
        if not isinstance(parameter, DTensor):
            return parameter
        local = parameter.to_local()
        if all(placement.is_replicate() for placement in parameter.placements):
            return shared_by_all(local, self.group) * float(self.group.rank == 0)
        return local if local.dim() == num_dims else local.flatten(split_dim, split_dim + 1)
