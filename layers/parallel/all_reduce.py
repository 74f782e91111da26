"""Tokens that every rank has, such as behind tensor-parallel attention: each computes its part, parts are summed."""

from torch import Tensor

from layers.modular_parts import ExpertOutput, Prepared, TopKWeightAndReduce
from layers.parallel.collectives import shared_by_all, start_all_reduce
from layers.parallel.exchange import Exchange, Started, nothing, plus


class AllReducePrepareAndFinalize(Exchange):
    """Nothing is sent to the experts, and their outputs are all-reduced.

    The ranks' experts may be shards of the same ones (`FusedMoE(shard=...)`) or different ones (an `expert_map` on
    each). Tokens, weights and ids have to be the same on all ranks; nobody checks that they are.

    Args:
        group: ranks with the same tokens.

    Raises:
        TypeError, ValueError: it is no group, or not the same kind of exchange on all ranks.

    Example:
        >>> layer = FusedMoE(config, shard=TensorShard(rank, size))
        >>> kernel = ModularKernel(AllReducePrepareAndFinalize(group), StandardExperts(layer))
    """

    def prepare_async(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
    ) -> Started:
        """What it is given; its gradients are summed over the ranks."""
        tokens, weights = shared_by_all(hidden_states, self.group), shared_by_all(topk_weights, self.group)
        return nothing, lambda: Prepared(tokens, weights, topk_ids)

    def finalize_async(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Started:
        """Sums [T, H], the same on all ranks; `shared`, which every rank has whole, is added once."""
        parts = weigh_and_reduce.apply(output, prepared.topk_weights, None)
        sums = start_all_reduce(parts, self.group)
        return nothing, lambda: plus(sums(), shared)
