"""Tokens that several ranks have, as behind tensor-parallel attention: each computes its part, parts are summed."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layers._checks import expect_type
from layers.modular_parts import ExpertOutput, Prepared, TopKWeightAndReduce
from layers.parallel.collectives import shared_by_all, start_all_reduce
from layers.parallel.exchange import Exchange, Started, nothing
from layers.parallel.sizes import expect_same_tokens
from layers.weigh_and_reduce import plus


class AllReducePrepareAndFinalize(Exchange):
    """Nothing is sent to the experts, and their outputs are all-reduced.

    The ranks' experts may be shards of the same ones (`FusedMoE(shard=...)`) or different ones (an `expert_map` on
    each). Tokens, weights and ids have to be the same on all ranks. How many there are is compared in eager
    forwards on CPUs; on GPUs, where the host would have to wait for it, and in compiled code nobody does.

    Args:
        group: ranks with the same tokens.
        others: how these tokens are exchanged with those of other ranks, none of `group`, or None: the sums that it
            returns are what is all-reduced.

    Raises:
        TypeError, ValueError: an argument is not as described, or not the same kind of exchange on all ranks; later, on
            CPUs, ranks have other numbers of tokens, or tokens of other sizes, before anything is summed.

    Example:
        >>> layer = FusedMoE(config, shard=TensorShard(rank, size))
        >>> kernel = ModularKernel(AllReducePrepareAndFinalize(group), StandardExperts(layer))
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh, others: Exchange | None = None) -> None:
        if others is not None:
            expect_type("others", others, Exchange)
        super().__init__(group, others=None if others is None else type(others).__name__)
        if others is not None:
            self.expect_apart("others", others)
        self.others = others

    def expect_experts(self, num_experts: int, expert_map: Tensor | None) -> None:
        """Raises ValueError for an expert that `others` sends no token to; ranks of `group` share those of it."""
        owners: Any = getattr(self.others, "owners", None)
        if self.others is not None and owners is not None:
            owners.expect_sent(self.others.group.rank, num_experts, expert_map)

    @property
    def num_dispatchers(self) -> int:
        """How many ranks send tokens here: this one, and those that `others` says."""
        return 1 if self.others is None else self.others.num_dispatchers

    @property
    def max_num_tokens_per_rank(self) -> int | None:
        """The most tokens that one rank sends another, as `others` says; None for any number."""
        return None if self.others is None else self.others.max_num_tokens_per_rank

    def prepare_async(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Started:
        """What it is given; its gradients are summed over the ranks."""
        given = Prepared(hidden_states, topk_weights, topk_ids, extra_tensors=tuple(extra_tensors))
        expect_same_tokens(given, self.group)
        tokens, weights = shared_by_all(hidden_states, self.group), shared_by_all(topk_weights, self.group)
        extras = tuple(shared_by_all(each, self.group) for each in extra_tensors)
        if self.others is not None:
            args = tokens, weights, topk_ids, num_experts, expert_map, extras
            return self.others.prepare_async(*args)
        prepared = Prepared(tokens, weights, topk_ids, extra_tensors=extras)
        return nothing, lambda: prepared

    def finalize_async(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Started:
        """Sums [T, H], the same on all ranks; `shared`, which every rank has whole, is added once."""
        if self.others is None:
            parts = weigh_and_reduce.apply(output, prepared.topk_weights, None)
        else:
            parts = self.others.finalize(output, prepared, weigh_and_reduce, None)
        sums = start_all_reduce(parts, self.group)
        return nothing, lambda: plus(sums(), shared)
