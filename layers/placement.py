"""Which rank holds which expert: maps for expert parallelism, and placements that follow the load.

Letters: E logical experts, P physical ones (logical experts and their replicas), L layers.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from layers._checks import expect_choice, expect_positive

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ExpertMapStrategy = Literal["balanced", "linear", "round_robin"]


class ExpertPlacement(NamedTuple):
    """Where `rebalance_experts` puts every replica; [E] loads give tensors without the dimension L.

    Attributes:
        physical_to_logical: [L, P] int64: the expert that every slot holds, -1 for none; rank r holds the r-th
            P / num_ranks.
        logical_to_physical: [L, E, R] int64, R the largest replica count: the slots of an expert, ascending, then -1.
        replica_count: [L, E] int64, each at least 1.
    """

    physical_to_logical: Tensor
    logical_to_physical: Tensor
    replica_count: Tensor

    @classmethod
    def of(cls, physical_to_logical: Tensor, num_experts: int) -> "ExpertPlacement":
        """The one that has these experts in its slots, [L, P] or [P] integers, -1 for a slot that holds none.

        Raises:
            TypeError, ValueError: they are no integers, or one is no expert; `num_experts` is no positive int.
        """
        expect_positive("num_experts", num_experts)
        held = _experts_in_slots(physical_to_logical, num_experts)
        last = held.masked_fill(held < 0, num_experts)  # slots that hold none
        count = torch.zeros((*held.shape[:-1], num_experts + 1), dtype=torch.int64)
        count = count.scatter_add(-1, last, torch.ones_like(held))[..., :num_experts].contiguous()
        return cls(held, _slots_of_experts(last, count), count)


def _experts_in_slots(held: object, num_experts: int) -> Tensor:
    if not isinstance(held, Tensor) or held.dtype not in _INTEGERS:
        raise TypeError(f"physical_to_logical={held!r}: expected a tensor of integers")
    if held.dim() not in (1, 2):
        raise ValueError(f"physical_to_logical has shape {list(held.shape)}: expected [P] or [L, P]")
    if held.is_meta:
        raise ValueError("physical_to_logical is on the meta device: expected experts")
    held = held.cpu().long()
    if held.numel() and (int(held.min()) < -1 or int(held.max()) >= num_experts):
        raise ValueError(
            f"physical_to_logical={held.tolist()}: expected experts in [0, {num_experts}), or -1"
        )
    return held


def determine_expert_map(
    ep_size: int, ep_rank: int, global_num_experts: int, strategy: ExpertMapStrategy = "balanced"
) -> tuple[int, Tensor | None]:
    """How many experts a rank of an expert-parallel group holds, and which.

    Args:
        ep_size, ep_rank: size of the group, and the rank in it.
        global_num_experts: E, counted over all ranks.
        strategy: "balanced" and "linear" give every rank neighbouring experts: of E mod ep_size left-over ones the
            first ranks take one each, or the last rank takes all. "round_robin" deals expert e to rank e mod ep_size.

    Returns:
        E_local, and the map [E] int32 for `FusedMoE(expert_map=...)`: local index of every expert, -1 for those of
        other ranks. The map is None for one rank, which holds all.

    Raises:
        TypeError, ValueError: a size is no positive int, the rank is not in the group, or a rank would hold no expert.

    Example:
        >>> determine_expert_map(ep_size=2, ep_rank=1, global_num_experts=5)
        (2, tensor([-1, -1, -1,  0,  1], dtype=torch.int32))
    """
    expect_positive("ep_size", ep_size)
    expect_positive("global_num_experts", global_num_experts)
    expect_choice("strategy", strategy, ExpertMapStrategy)
    if not isinstance(ep_rank, int) or not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank={ep_rank!r}: expected an int in [0, ep_size={ep_size})")
    if global_num_experts < ep_size:
        raise ValueError(f"global_num_experts={global_num_experts}: expected at least ep_size={ep_size}")
    if ep_size == 1:
        return global_num_experts, None
    held = _experts_of(ep_rank, ep_size, global_num_experts, strategy)
    expert_map = torch.full((global_num_experts,), -1, dtype=torch.int32)
    expert_map[held.start : held.stop : held.step] = torch.arange(len(held), dtype=torch.int32)
    return len(held), expert_map


def _experts_of(rank: int, size: int, num_experts: int, strategy: ExpertMapStrategy) -> range:
    each, left_over = divmod(num_experts, size)
    if strategy == "round_robin":
        return range(rank, num_experts, size)
    if strategy == "linear":
        return range(rank * each, num_experts if rank == size - 1 else (rank + 1) * each)
    start = rank * each + min(rank, left_over)
    return range(start, start + each + (rank < left_over))


def rebalance_experts(
    load: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int
) -> ExpertPlacement:
    """Replicates loaded experts and spreads the replicas, so that ranks have about equal work (DeepSeek's EPLB).

    Groups of experts are packed onto nodes, experts are replicated within their node, replicas are packed onto its
    ranks. When the groups do not divide among the nodes, all ranks count as one node. Each step is greedy: the
    replica goes to the expert with the largest load per replica, the heaviest item to the lightest pack with room.

    Args:
        load: [L, E] or [E], tokens or any other measure of work per expert, on any device.
        num_replicas: P, physical experts over all ranks; at least E, and a multiple of `num_ranks`.
        num_groups: groups of neighbouring experts that routing keeps together (`RoutingConfig.num_groups`).
        num_nodes: hosts; a divisor of `num_ranks`.
        num_ranks: devices over all hosts.

    Returns:
        An `ExpertPlacement` on the CPU.

    Raises:
        TypeError, ValueError: a count is no positive int or does not divide as it must, or the load has another
            rank, or entries that are negative or not finite.

    Example:
        >>> physical_to_logical, logical_to_physical, replica_count = rebalance_experts(load, 160, 1, 1, 4)
    """
    _check_counts(load, num_replicas, num_groups, num_nodes, num_ranks)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    layers = load.detach().to("cpu", torch.float64).reshape(-1, load.shape[-1]).tolist()
    placed = [_place(layer, num_replicas, num_groups, num_nodes, num_ranks) for layer in layers]
    return ExpertPlacement.of(torch.tensor(placed).view(*load.shape[:-1], num_replicas), load.shape[-1])


def spread_experts(
    num_experts: int,
    num_replicas: int,
    num_ranks: int,
    strategy: Literal["linear", "round_robin"] = "linear",
) -> ExpertPlacement:
    """A placement before any load is known: of P slots, those past E hold the first experts again.

    Args:
        num_experts: E.
        num_replicas: P, a multiple of `num_ranks`, at least E.
        num_ranks: devices over all hosts.
        strategy: "linear" gives neighbouring experts to a rank, "round_robin" deals them out.

    Returns:
        An `ExpertPlacement` of one layer, on the CPU.

    Raises:
        TypeError, ValueError: a count is no positive int or does not divide as it must, or the strategy is none.

    Example:
        >>> spread_experts(num_experts=4, num_replicas=6, num_ranks=2, strategy="round_robin").physical_to_logical
        tensor([0, 2, 0, 1, 3, 1])
    """
    expect_positive("num_experts", num_experts)
    expect_choice("strategy", strategy, Literal["linear", "round_robin"])
    _check_counts(torch.ones(num_experts), num_replicas, 1, 1, num_ranks)
    held = torch.arange(num_replicas) % num_experts
    if strategy == "round_robin":
        held = held.view(-1, num_ranks).T.flatten()
    return ExpertPlacement.of(held, num_experts)


def _check_counts(load: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int) -> None:
    if not isinstance(load, Tensor) or load.dtype == torch.bool or load.is_complex():
        raise TypeError(f"load={load!r}: expected a tensor of numbers")
    if load.dim() not in (1, 2) or 0 in load.shape:
        raise ValueError(f"load has shape {tuple(load.shape)}: expected [E] or [L, E]")
    if load.is_meta:
        raise ValueError("load is on the meta device: expected work per expert")
    if not load.isfinite().all() or (load < 0).any():
        raise ValueError("load has entries that are negative or not finite: expected work per expert")
    counts = {
        "num_replicas": num_replicas,
        "num_groups": num_groups,
        "num_nodes": num_nodes,
        "num_ranks": num_ranks,
    }
    for name, count in counts.items():
        expect_positive(name, count)
    num_experts = load.shape[1] if load.dim() == 2 else load.shape[0]
    if num_replicas < num_experts:
        raise ValueError(f"num_replicas={num_replicas}: expected at least E={num_experts}")
    if num_replicas % num_ranks:
        raise ValueError(f"num_replicas={num_replicas}: expected a multiple of num_ranks={num_ranks}")
    if num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups}: expected a divisor of E={num_experts}")
    if num_ranks % num_nodes:
        raise ValueError(f"num_nodes={num_nodes}: expected a divisor of num_ranks={num_ranks}")


def _place(
    load: list[float], num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int
) -> list[int]:
    """The expert of every physical slot, one layer."""
    size = len(load) // num_groups
    groups = [range(group * size, (group + 1) * size) for group in range(num_groups)]
    slots: list[int] = []
    for node in _pack([sum(load[expert] for expert in group) for group in groups], num_nodes):
        experts = [expert for group in node for expert in groups[group]]
        replicas = _replicate([load[expert] for expert in experts], num_replicas // num_nodes)
        share = [load[experts[index]] / replicas.count(index) for index in replicas]
        for rank in _pack(share, num_ranks // num_nodes):
            slots.extend(experts[replicas[item]] for item in rank)
    return slots


def _pack(weights: Sequence[float], num_packs: int) -> list[list[int]]:
    """Equally many items in every pack: the heaviest goes to the lightest pack that has room."""
    room = len(weights) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    if room == 1:
        return [[item] for item in range(num_packs)]
    totals = [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        lightest = min((p for p in range(num_packs) if len(packs[p]) < room), key=totals.__getitem__)
        packs[lightest].append(item)
        totals[lightest] += weights[item]
    return packs


def _replicate(load: list[float], num_replicas: int) -> list[int]:
    """All experts once, then again the one with the largest load per replica; this minimises the largest share."""
    replicas, counts = list(range(len(load))), [1] * len(load)
    while len(replicas) < num_replicas:
        busiest = max(range(len(load)), key=lambda expert: load[expert] / counts[expert])
        replicas.append(busiest)
        counts[busiest] += 1
    return replicas


def _slots_of_experts(physical_to_logical: Tensor, replica_count: Tensor) -> Tensor:
    order = physical_to_logical.argsort(dim=-1, stable=True)  # slots by expert, ascending within one
    width = int(replica_count.max())
    first = replica_count.cumsum(-1) - replica_count
    position = first.unsqueeze(-1) + torch.arange(width)  # [L, E, R]
    slots = order.gather(-1, position.clamp_max(order.shape[-1] - 1).flatten(-2)).view_as(position)
    return slots.masked_fill(torch.arange(width) >= replica_count.unsqueeze(-1), -1)


def local_experts(expert_map: Any, num_experts: int) -> tuple[int, ...]:
    """An expert map as plain integers: they survive meta devices and `to_empty`, and size the weights.

    Raises TypeError or ValueError when it does not describe `num_experts` experts.
    """
    if not isinstance(expert_map, Tensor) or expert_map.is_floating_point() or expert_map.dtype == torch.bool:
        raise TypeError(f"expert_map={expert_map!r}: expected an integer tensor")
    if expert_map.is_meta:
        raise ValueError("expert_map is on the meta device: expected its values, on any other device")
    if expert_map.shape != (num_experts,):
        raise ValueError(
            f"expert_map has shape {tuple(expert_map.shape)}: expected ({num_experts},) = [num_experts]"
        )
    placement = tuple(int(local) for local in expert_map.tolist())
    local = sorted(index for index in placement if index >= 0)
    if not local or local != list(range(len(local))) or min(placement) < -1:
        raise ValueError(f"expert_map={list(placement)}: expected each of 0..E_local-1 once and -1 elsewhere")
    return placement
