"""All tokens to all ranks, and sums of what their experts return: all-gather and reduce-scatter.

For few ranks, or many experts per token, this moves less than sending each token to its experts' ranks, and with
`max_tokens` every shape is static. Letters: T tokens of a rank, M the most of any rank, W ranks, K experts per token.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layers._checks import expect_choice, expect_positive
from layers.modular_parts import ExpertOutput, Prepared, TopKWeightAndReduce
from layers.parallel.collectives import start_all_gathers, start_reduce_scatter
from layers.parallel.exchange import Exchange, Start, Started, nothing, of_rows, start_tokens
from layers.parallel.group import Group
from layers.parallel.sizes import expect_at_most, most_tokens
from layers.weigh_and_reduce import plus
from moe_ops import combine

CombineOrder = Literal["ranks", "slots"]


class Slots(NamedTuple):
    """What a rank keeps of its own tokens: how many, their weights and ids [T, K]."""

    num_tokens: int
    topk_weights: Tensor
    topk_ids: Tensor


class AllGatherPrepareAndFinalize(Exchange):
    """Every rank sees every token, its experts do their part, and each token's parts are summed where it came from.

    Args:
        group: ranks with tokens of their own. Their experts may be different ones (an `expert_map` on each), or a
            shard of all of them.
        max_tokens: M. None asks the ranks in every forward, which waits for the device; with a number nothing does,
            and every rank sends so many rows, those past T without experts.
        order: "ranks" sums what each rank has summed. "slots" brings back a row for each of a token's K experts, and
            sums them in the order of one device: the same to the bit for any W, if products are, for K times the
            bytes.

    Raises:
        TypeError, ValueError: an argument is not as described, or not the same on all ranks; later, a rank has more
            tokens than `max_tokens`.

    Example:
        >>> layer = FusedMoE(config, ExpertRanks(E, W).expert_map(rank))
        >>> kernel = ModularKernel(AllGatherPrepareAndFinalize(group, max_tokens=256), StandardExperts(layer))
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh,
        *,
        max_tokens: int | None = None,
        order: CombineOrder = "ranks",
    ) -> None:
        if max_tokens is not None:
            expect_positive("max_tokens", max_tokens)
        expect_choice("order", order, CombineOrder)
        super().__init__(group, max_tokens=max_tokens, order=order)
        self.max_tokens, self.order = max_tokens, order

    def prepare_async(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Started:
        """Tokens [W*M, H] of all ranks; past a rank's T come rows with the ids -1."""
        given = Prepared(hidden_states, topk_weights, topk_ids, extra_tensors=tuple(extra_tensors))
        num_rows = rows_of_each(given, "top_k", self.max_tokens, self.group)
        mine = Slots(hidden_states.shape[0], topk_weights, topk_ids)
        hook, receiver = start_tokens(given, gathering(num_rows, self.group), mine)
        return hook, receiver if self.order == "ranks" else lambda: _each_slot_a_token(receiver())

    def finalize_async(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Started:
        """Sums [T, H]; `shared` joins those in the order of slots before they are rounded."""
        mine: Slots = prepared.way_back
        parts = weigh_and_reduce.apply(output, prepared.topk_weights, None)
        rows = start_reduce_scatter(parts, self.group)
        if self.order == "slots":
            return nothing, lambda: _sum_in_slot_order(rows(), mine, shared)
        return nothing, lambda: plus(rows()[: mine.num_tokens], shared)


def rows_of_each(given: Prepared, name: str, max_tokens: int | None, group: Group) -> int:
    """M: `max_tokens`, or what the ranks say; see `most_tokens`."""
    if max_tokens is None:
        return most_tokens(given, name, group)
    expect_at_most(given.hidden_states.shape[0], max_tokens, group)
    return max_tokens


def gathering(num_rows: int, group: Group) -> Start:
    """What gathers tensors [T, ...] of each rank, brought to so many rows."""
    return lambda filled: start_all_gathers([of_rows(x, num_rows, fill) for x, fill in filled], group)


def _each_slot_a_token(prepared: Prepared) -> Prepared:
    """Tokens of one expert each, with the weight 1."""
    ids = prepared.topk_ids
    tokens, *extras = (
        each.repeat_interleave(ids.shape[1], dim=0)
        for each in (prepared.hidden_states, *prepared.extra_tensors)
    )
    ones = torch.ones(tokens.shape[0], 1, dtype=torch.float32, device=ids.device)
    each = prepared._replace(hidden_states=tokens, topk_weights=ones, topk_ids=ids.reshape(-1, 1))
    return each._replace(extra_tensors=tuple(extras))


def _sum_in_slot_order(rows: Tensor, mine: Slots, shared: Tensor | None) -> Tensor:
    ids = mine.topk_ids.flatten()
    place = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
    return combine(rows[: ids.shape[0]], mine.topk_weights, place.masked_fill(ids < 0, -1), shared)
