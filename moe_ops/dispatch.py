"""build_dispatch: expert ids to the order in which experts process slots.

    expert(slot)   = expert_map[id] or id; a slot whose id, or mapped id, is out of range is dropped
    sorted_slots   = slots stably sorted by expert, dropped slots last
    inverse[slot]  = row of the slot in sorted_slots, -1 if dropped
    expert_offsets = exclusive prefix sum of the number of slots per expert

T tokens, K experts per token, S = T*K slots, E experts held here. `permute`, `grouped_gemm` and `combine` consume
the plan. All outputs are integers of static shape: no gradient, no host sync.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import BuildDispatch, Placement
from moe_ops.errors import describe, type_error, value_error
from moe_ops.types import DispatchPlan


def build_dispatch(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None = None) -> DispatchPlan:
    """Sorts routed slots by expert.

    Args:
        topk_ids: [T, K] int32 or int64. Ids outside the range are dropped, whatever their size.
        num_experts: E, the experts held here (`w13.shape[0]`).
        expert_map: [E_global] int32: ids are global and map to a local id in [0, E), or -1 for an expert held
            elsewhere. Without it ids are in [0, E).

    Returns:
        DispatchPlan(sorted_slots [S], inverse [S], expert_offsets [E+1]), all int32.

    Raises:
        ValueError: wrong rank, num_experts < 1, tensors on different devices.
        TypeError: ids or map of another dtype.

    Example:
        >>> plan = moe_ops.build_dispatch(topk_ids, num_experts=8)
        >>> rows_of_expert_3 = plan.sorted_slots[plan.expert_offsets[3] : plan.expert_offsets[4]]
    """
    _checks.expect_int("num_experts", num_experts)
    return DispatchPlan(*_library.call(BuildDispatch(topk_ids, Placement(expert_map), num_experts)))


def expect_plan(plan: Any) -> None:
    """Raises TypeError unless `plan` is a DispatchPlan."""
    if not isinstance(plan, DispatchPlan):
        type_error("plan={}: expected a DispatchPlan", describe(plan))


def check_ids(args: BuildDispatch) -> None:
    """The checks every operator that takes expert ids shares."""
    topk_ids = args.topk_ids
    _checks.expect_index("topk_ids", topk_ids)
    _checks.expect_shape("topk_ids", topk_ids, ("T", "K"))
    if isinstance(topk_ids.shape[1], int) and topk_ids.shape[1] < 1:
        value_error("topk_ids has shape {}: expected at least one expert per token", list(topk_ids.shape))
    check_placement(args.placement, args.num_experts)
    expert_map = args.placement.expert_map
    _checks.expect_same_device(topk_ids.device, "topk_ids", topk_ids=topk_ids, expert_map=expert_map)


def check_placement(placement: Placement, num_experts: int) -> None:
    """The checks of an expert map and a local expert count."""
    expert_map = placement.expert_map
    if num_experts < 1:
        value_error("num_experts={}: expected at least 1", num_experts)
    if expert_map is not None:
        _checks.expect_index("expert_map", expert_map, (torch.int32,))
        _checks.expect_shape("expert_map", expert_map, ("E_global",))


def reference(args: BuildDispatch) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `build_dispatch`, in plain PyTorch."""
    num_experts = args.num_experts
    expert = local_experts(args.topk_ids.flatten(), args.placement, num_experts)
    ranked, order = expert.sort(stable=True)
    offsets = torch.searchsorted(ranked, torch.arange(num_experts + 1, device=ranked.device), out_int32=True)
    rows = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    inverse = torch.empty_like(rows).index_copy_(0, order, rows)
    kept = int(offsets[-1])
    if kept < order.numel():
        inverse[order[kept:]] = -1
    return order.to(torch.int32), inverse, offsets


def local_experts(ids: Tensor, placement: Placement, num_experts: int) -> Tensor:
    """Local expert of each id as int64, `num_experts` for an id that is dropped. Checked before any narrowing."""
    ids, expert_map = ids.long(), placement.expert_map
    if expert_map is not None:
        remote = (ids < 0) | (ids >= expert_map.shape[0])
        mapped = expert_map[ids.masked_fill(remote, 0)] if expert_map.numel() else torch.zeros_like(ids)
        ids = mapped.long().masked_fill(remote, -1)
    return ids.masked_fill((ids < 0) | (ids >= num_experts), num_experts)


def _cuda(args: BuildDispatch) -> tuple[Tensor, Tensor, Tensor]:
    if args.topk_ids.numel() == 0:
        slots, inverse, offsets = fake(args)
        return slots, inverse, offsets.zero_()
    return _library.launch(args)


def fake(args: BuildDispatch) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the right metadata, uninitialised."""
    ids, num_slots = args.topk_ids, args.topk_ids.shape[0] * args.topk_ids.shape[1]
    return (
        ids.new_empty((num_slots,), dtype=torch.int32),
        ids.new_empty((num_slots,), dtype=torch.int32),
        ids.new_empty((args.num_experts + 1,), dtype=torch.int32),
    )


_library.define(
    BuildDispatch,
    "(Tensor sorted_slots, Tensor inverse, Tensor expert_offsets)",
    check=check_ids,
    cpu=reference,
    cuda=_cuda,
    fake=fake,
)
_autograd.define_no_gradient(BuildDispatch)
_library.define_vmap(BuildDispatch)
