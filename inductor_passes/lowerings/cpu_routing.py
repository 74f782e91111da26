"""Routing and dispatch as ATen that Inductor turns into C++ loops."""

import torch
from torch import Tensor

from moe_ops import routing
from moe_ops.arguments import BuildDispatch, RoutingDispatch, TopkRouting, TopkRoutingBackward
from moe_ops.dispatch import local_experts

_MOST_COUNTED = 64
"""Slots, up to which comparing each with every other costs less than calls that sort and search."""


def route(args: TopkRouting) -> tuple[Tensor, Tensor]:
    """`topk_routing`."""
    weights, ids = routing.reference(args.router, largest_in_turns, in_memory)
    return in_memory(weights), ids


def routing_gradient(args: TopkRoutingBackward) -> Tensor:
    """`topk_routing_backward`."""
    return routing.reference_backward(args)


def largest_in_turns(scores: Tensor, count: int) -> Tensor:
    """`largest_by_sorting`, one column after the other: reductions of a row, where a sort is a call.

    What is left for a turn is what comes after the last winner in the order of the sort.
    """
    scores = in_memory(scores)
    columns = torch.arange(scores.shape[1], dtype=scores.dtype)  # reductions of integers are not vectorised
    is_left, winners = torch.ones_like(scores, dtype=torch.bool), []
    for _ in range(count):
        best = scores.where(is_left, -torch.inf).amax(1, keepdim=True)
        winner = columns.where(is_left & (scores == best), scores.shape[1]).amin(1, keepdim=True)
        is_left = (scores < best) | ((scores == best) & (columns > winner))
        winners.append(winner)
    return torch.cat(winners, 1).long()


def in_memory(values: Tensor) -> Tensor:
    """`values`, computed once.

    What takes few loads Inductor computes again wherever it is read: in a router for each of K experts, behind it for
    each column of a token. A view by strides is one of memory, so there has to be some.
    """
    return values.as_strided(values.shape, values.stride())


def plan(args: BuildDispatch) -> tuple[Tensor, Tensor, Tensor]:
    """`build_dispatch`."""
    bounds = torch.arange(args.num_experts + 1)
    ranked, order, inverse = sort_by_expert(args)
    if is_counted(ranked):
        offsets = _count(in_memory(ranked) < bounds.unsqueeze(1)).to(torch.int32)
    else:
        offsets = torch.searchsorted(ranked, bounds, out_int32=True)
    return order.to(torch.int32), inverse, offsets


def sort_by_expert(args: BuildDispatch) -> tuple[Tensor, Tensor, Tensor]:
    """[S] each: the expert of each row, its slot, and the row of each slot, -1 for a dropped one."""
    expert = local_experts(args.topk_ids.flatten(), args.placement, args.num_experts)
    ranked, order = _sorted_by_counting(expert) if is_counted(expert) else expert.sort(stable=True)
    rows = torch.arange(order.shape[0], dtype=torch.int32).masked_fill(ranked == args.num_experts, -1)
    return ranked, order, torch.empty_like(rows).scatter(0, order, rows)


def is_counted(slots: Tensor) -> bool:
    """Whether the rows of slots are counted and not sorted."""
    return isinstance(slots.shape[0], int) and 1 <= slots.shape[0] <= _MOST_COUNTED


def _sorted_by_counting(expert: Tensor) -> tuple[Tensor, Tensor]:
    """A stable sort and its order: the row of a slot is how many slots come before it."""
    expert, slots = in_memory(expert), torch.arange(expert.shape[0])
    earlier = (expert == expert.unsqueeze(1)) & (slots < slots.unsqueeze(1))
    rows = _count((expert < expert.unsqueeze(1)) | earlier)
    order = torch.empty_like(slots).scatter(0, rows, slots)
    return expert[order], order


def _count(condition: Tensor) -> Tensor:
    """How often each row of `condition` [N, S] holds, in memory; reductions of integers are not vectorised."""
    return in_memory(condition.to(torch.float32).sum(1).long())


def route_and_plan(args: RoutingDispatch) -> tuple[Tensor, ...]:
    """`routing_dispatch`."""
    weights, ids = route(TopkRouting(args.router))
    return weights, ids, *plan(BuildDispatch(ids, args.placement, args.num_experts))
