"""Who exchanges tokens: a process group as a plain value, and what its ranks have to agree on.

Letters: E experts over all ranks, W ranks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layers._checks import expect_choice, expect_positive, expect_type
from layers.placement import ExpertMapStrategy, determine_expert_map

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function: each process has its own


@dataclass(frozen=True, slots=True)
class Group:
    """A process group by the name that operators know it by, which is the same on all ranks and in every launch.

    Args:
        name: of the process group.
        size: W.
        rank: of this process among them.
    """

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: "dist.ProcessGroup | DeviceMesh | Group") -> "Group":
        """Of a process group, or a mesh of one dimension.

        Raises:
            TypeError: it is something else.
            ValueError: the mesh has more dimensions, or this process is not in it.
        """
        if isinstance(group, Group):
            return group
        processes = process_group(group)
        return cls(processes.group_name, processes.size(), processes.rank())


def process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The process group of a mesh of one dimension. Raises as `Group.of` does."""
    expect_type("group", group, (dist.ProcessGroup, DeviceMesh))
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(f"group is a mesh of {group.ndim} dimensions: expected one, such as mesh['ep']")
    if group.get_coordinate() is None:
        ranks = group.mesh.tolist()
        raise ValueError(f"group is a mesh of ranks {ranks}: expected one with rank {dist.get_rank()}")
    return group.get_group()


def told_by_all(group: dist.ProcessGroup | DeviceMesh, fact: Any) -> list[Any]:
    """What each rank says, in their order. Every rank has to call it."""
    processes = process_group(group)
    told: list[Any] = [None] * processes.size()
    dist.all_gather_object(told, fact, group=processes)
    return told


def expect_agreement(group: dist.ProcessGroup | DeviceMesh, facts: Mapping[str, Any]) -> None:
    """Asks all ranks, and raises on all of them where they disagree. Every rank has to call it.

    Ranks that exchange tensors of other sizes than they expect hang, abort, or return nonsense; so this comes first.

    Raises:
        ValueError: a fact, compared by its `repr`, differs. The message has its name and the ranks of each value. The
            first that differs is told, in the order of the first rank that knows it.
    """
    told = told_by_all(group, {name: _ADDRESS.sub("", repr(value)) for name, value in facts.items()})
    ranks = dist.get_process_group_ranks(process_group(group))
    for name in dict.fromkeys(name for each in told for name in each):
        values = {rank: each.get(name, "not given") for rank, each in zip(ranks, told)}
        expect_alike(name, values)


def expect_alike(name: str, values: Mapping[int, Any]) -> None:
    """Raises ValueError that names the ranks, unless the value of each rank is the same."""
    holders: dict[Any, list[str]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(str(rank))
    if len(holders) > 1:
        told = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in holders.items())
        raise ValueError(f"{name} differs between ranks: {told}; expected the same on all")


def _ranks(ranks: list[str]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """Which rank holds which expert, as arithmetic on ids: no tensor that would have to follow a module's moves.

    Args:
        num_experts: E, physical ones where experts have replicas.
        num_ranks: W.
        strategy: see `determine_expert_map`.

    Raises:
        TypeError, ValueError: as `determine_expert_map` does.
    """

    num_experts: int
    num_ranks: int
    strategy: ExpertMapStrategy = "balanced"

    def __post_init__(self) -> None:
        expect_positive("num_experts", self.num_experts)
        expect_positive("num_ranks", self.num_ranks)
        expect_choice("strategy", self.strategy, ExpertMapStrategy)
        determine_expert_map(self.num_ranks, 0, self.num_experts, self.strategy)

    def expert_map(self, rank: int) -> Tensor | None:
        """[E] int32 of a rank, for `FusedMoE`; None where one rank holds all."""
        return determine_expert_map(self.num_ranks, rank, self.num_experts, self.strategy)[1]

    def expect_held(self, expected: Tensor | None, num_experts: int, expert_map: Tensor | None) -> None:
        """Raises ValueError unless a rank holds the experts of the map that is `expected`: tokens of others were lost.

        Args:
            num_experts, expert_map: how many the rank holds, and of all which; on the meta device nothing is known.
        """
        wanted = list(range(self.num_experts)) if expected is None else expected.tolist()
        for expert, place in enumerate(self._places(len(wanted), num_experts, expert_map)):
            if place != wanted[expert]:
                raise ValueError(
                    f"expert_map[{expert}]={place}: expected {wanted[expert]}, as {self} places experts"
                )

    def expect_sent(self, rank: int, num_experts: int, expert_map: Tensor | None) -> None:
        """Raises ValueError where experts are here that these do not place on `rank`: their tokens would not come."""
        owners = self.of(torch.arange(self.num_experts)).tolist()
        for expert, place in enumerate(self._places(len(owners), num_experts, expert_map)):
            if place >= 0 and owners[expert] != rank:
                raise ValueError(
                    f"expert_map[{expert}]={place}: expected -1 on rank {rank}, as {self} places experts"
                )

    def _places(self, in_all: int, num_experts: int, expert_map: Tensor | None) -> list[int]:
        """[E]: where a rank has each expert, -1 for those of others; none on the meta device, where nobody knows."""
        if expert_map is not None and expert_map.is_meta:
            return []
        held = list(range(num_experts)) if expert_map is None else expert_map.tolist()
        if len(held) != in_all:
            raise ValueError(f"experts are {len(held)} in all: expected {in_all}, as {self}")
        return held

    def of(self, ids: Tensor) -> Tensor:
        """The rank of each expert, in the dtype of `ids`; of an id out of range, -1."""
        rank = self._unchecked(ids.clamp(0, self.num_experts - 1))
        return rank.masked_fill((ids < 0) | (ids >= self.num_experts), -1)

    def _unchecked(self, ids: Tensor) -> Tensor:
        each, left_over = divmod(self.num_experts, self.num_ranks)
        if self.strategy == "round_robin":
            return ids % self.num_ranks
        if self.strategy == "linear":
            return (ids // each).clamp(max=self.num_ranks - 1)
        wide = left_over * (each + 1)  # experts of the ranks that hold one more
        in_narrow = (ids - wide).div(each, rounding_mode="floor") + left_over
        return in_narrow.where(ids >= wide, ids // (each + 1))
