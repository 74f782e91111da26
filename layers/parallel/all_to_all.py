"""Each token to the ranks that hold its experts, once to each, and the ranks' sums back.

A token goes to as many ranks as its K experts live on, at most min(K, W) of W: ranks are to it what experts are to a
rank, so the plan of `build_dispatch` and its stages bring rows in order and back. Behind the exchange its row has all
its ids, of which the `expert_map` of that rank keeps those that live there.

Letters: T tokens of a rank, R rows that a rank gets, K experts per token, D = min(K, W) ranks per token.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layers._checks import expect_positive, expect_type
from layers.carried import in_slot_order, moved_as_bytes, placed
from layers.modular_parts import ExpertOutput, Prepared, TopKWeightAndReduce
from layers.parallel.collectives import Receiver, start_all_to_all
from layers.parallel.exchange import Exchange, Started, nothing, start_tokens
from layers.parallel.group import ExpertRanks, Group
from layers.parallel.sizes import expect_same_sizes, sizes_of_tokens
from layers.prepare_finalize import batched_places
from moe_ops import build_dispatch, combine


class _WayBack(NamedTuple):
    """Rows that this rank sent and got, of each rank, and where those of its tokens [T*D] are among what comes back."""

    sent: Sequence[int]
    received: Sequence[int]
    inverse: Tensor
    ranks: Tensor  # [T, D]


class _AllToAll(Exchange):
    def __init__(self, group: dist.ProcessGroup | DeviceMesh, owners: ExpertRanks, **facts: Any) -> None:
        expect_owners(owners, group)
        super().__init__(group, owners=owners, **facts)
        self.owners = owners

    def finalize_async(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Started:
        """Sums [T, H] of what the ranks have summed, in their order; `shared` joins before they are rounded."""
        way: _WayBack = prepared.way_back
        sums = weigh_and_reduce.apply(output, prepared.topk_weights, None)
        rows = start_all_to_all(sums, way.sent, way.received, self.group)
        ones = torch.ones(way.ranks.shape, dtype=torch.float32, device=way.ranks.device)
        return nothing, lambda: combine(rows(), ones, way.inverse, shared)

    def _send(
        self, given: Prepared, slots: Tensor, way: _WayBack, arranged: Callable[[Tensor, int], Tensor]
    ) -> Started:
        """Starts what tokens have, in the order of `slots` [T*D], as many rows to each rank as `arranged` makes."""

        def move(x: Tensor, fill: int = 0) -> Receiver:
            rows = arranged(in_slot_order(x, slots, way.ranks.shape[1]), fill)
            return start_all_to_all(rows, way.received, way.sent, self.group)

        def moved(x: Tensor, fill: int) -> Receiver:
            return move(x, fill) if fill else moved_as_bytes(move, x)

        return start_tokens(given, lambda filled: [moved(*each) for each in filled], way)


class PaddedAllToAllPrepareAndFinalize(_AllToAll):
    """With `max_tokens` rows set aside for each pair of ranks: static shapes, nothing asks the host.

    Args:
        group: ranks with tokens and experts of their own.
        owners: which rank holds which expert.
        max_tokens: rows for each pair of ranks. As many as a rank has tokens are always enough. With fewer, tokens
            that find no row there, the last ones first, do without the experts of that rank: nothing is raised,
            since nobody looks.

    Raises:
        TypeError, ValueError: an argument is not as described, or not the same on all ranks.

    Example:
        >>> owners = ExpertRanks(num_experts=64, num_ranks=4)
        >>> layer = FusedMoE(config, owners.expert_map(rank))
        >>> exchange = PaddedAllToAllPrepareAndFinalize(group, owners, max_tokens=256)
        >>> kernel = ModularKernel(exchange, StandardExperts(layer))
    """

    def __init__(
        self, group: dist.ProcessGroup | DeviceMesh, owners: ExpertRanks, *, max_tokens: int
    ) -> None:
        expect_positive("max_tokens", max_tokens)
        super().__init__(group, owners, max_tokens=max_tokens)
        self.max_tokens = self._rows = max_tokens

    def prepare_async(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Started:
        """Tokens [W*max_tokens, H]; rows without one have the ids -1."""
        size, each = self.group.size, self._rows
        ranks = ranks_of_tokens(topk_ids, self.owners)
        plan = build_dispatch(ranks, size)
        places = batched_places(plan, each)  # [T*D], size * each for those that stay here
        row = places.to(torch.int32).masked_fill(places == size * each, -1)
        inverse = row[plan.inverse.clamp(min=0).long()].masked_fill(plan.inverse < 0, -1)
        given = Prepared(hidden_states, topk_weights, topk_ids, extra_tensors=tuple(extra_tensors))
        way = _WayBack([each] * size, [each] * size, inverse, ranks)
        return self._send(given, plan.sorted_slots, way, lambda x, fill: placed(x, places, size * each, fill))


class AllToAllPrepareAndFinalize(_AllToAll):
    """As many rows as there are: the fewest bytes, for tokens of any number. Not for CUDA graphs, since hosts wait.

    Args:
        group: ranks with tokens and experts of their own.
        owners: which rank holds which expert.

    Raises:
        TypeError, ValueError: an argument is not as described, or not the same on all ranks; later, hidden size or
            top_k differs between ranks, before any token is sent.

    Example:
        >>> kernel = ModularKernel(AllToAllPrepareAndFinalize(group, owners), StandardExperts(layer))
    """

    def prepare_async(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Started:
        """Tokens [R, H] that have an expert here, those of rank 0 first, each rank's in its order."""
        ranks = ranks_of_tokens(topk_ids, self.owners)
        plan = build_dispatch(ranks, self.group.size)
        given = Prepared(hidden_states, topk_weights, topk_ids, extra_tensors=tuple(extra_tensors))
        sent, received = self._splits(plan.expert_offsets.diff(), sizes_of_tokens(given))
        way = _WayBack(sent, received, plan.inverse, ranks)
        return self._send(given, plan.sorted_slots, way, lambda x, fill: x.narrow(0, 0, sum(sent)))

    def _splits(self, counts: Tensor, alike: list[int]) -> tuple[list[int], list[int]]:
        """Rows to each rank and from each, which tell each other."""
        size = self.group.size
        facts = torch.tensor(alike, dtype=torch.int64, device=counts.device).expand(size, len(alike))
        told = torch.cat([counts.long().unsqueeze(1), facts], dim=1)  # [W, 4]
        heard = start_all_to_all(told, [1] * size, [1] * size, self.group)()
        expect_same_sizes(heard, alike, "top_k")
        sent, received = counts.tolist(), heard[:, 0].tolist()
        for rows in (*sent, *received):
            torch._check(rows >= 0)
        return sent, received


def expect_owners(owners: ExpertRanks, group: dist.ProcessGroup | DeviceMesh) -> None:
    """Raises TypeError or ValueError unless `owners` are of the ranks of `group`."""
    expect_type("owners", owners, ExpertRanks)
    size = Group.of(group).size
    if owners.num_ranks != size:
        raise ValueError(f"owners.num_ranks={owners.num_ranks}: expected {size}, the ranks of the group")


def ranks_of_tokens(topk_ids: Tensor, owners: ExpertRanks) -> Tensor:
    """[T, D] int32: the ranks that each token's ids [T, K] are on, each once, ascending, -1 where there are fewer."""
    ranks, size = owners.of(topk_ids).to(torch.int32), owners.num_ranks
    if topk_ids.shape[1] <= size:
        ranks = ranks.sort(dim=1).values
        again = torch.zeros_like(ranks, dtype=torch.bool)
        again[:, 1:] = ranks[:, 1:] == ranks[:, :-1]
        return ranks.masked_fill(again, -1)
    every = torch.arange(size, dtype=torch.int32, device=ranks.device)
    is_asked = (ranks.unsqueeze(2) == every).any(dim=1)
    return every.where(is_asked, -1)
