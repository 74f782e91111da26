"""What the exchanges of this package share: each is a start and a receiver, on the way there and on the way back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from layers.modular_parts import ActivationFormat, ExpertOutput, Prepared, TopKWeightAndReduce
from layers.parallel.collectives import Receiver
from layers.parallel.group import Group, expect_agreement, process_group
from layers.weigh_and_reduce import TopKWeightAndReduceContiguous

Started = tuple[Callable[[], None], Callable[[], Any]]


class TwoSteps:
    """An `AsyncPrepareAndFinalize` says how each step starts; here both are started and waited for."""

    def prepare_async(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Started:
        """`prepare`, started. The receiver waits, on the device where that can."""
        raise NotImplementedError

    def finalize_async(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Started:
        """`finalize`, started."""
        raise NotImplementedError

    def prepare(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Prepared:
        """Tokens that experts of this rank are to see, and maybe others, whose ids `expert_map` drops."""
        args = hidden_states, topk_weights, topk_ids, num_experts, expert_map, extra_tensors
        return self.prepare_async(*args)[1]()

    def finalize(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Tensor:
        """[T, H]: the sums of all ranks for the tokens of this one."""
        return self.finalize_async(output, prepared, weigh_and_reduce, shared)[1]()


class Exchange(TwoSteps):
    """An `AsyncPrepareAndFinalize` over a group of ranks, which gives experts tokens [R, H] of any rank.

    Every rank has to call it as often as the others, with no tokens too: a rank that stays away makes the others
    wait until the group's timeout.

    Args:
        group: whose ranks exchange tokens.
        facts: what the ranks have to agree on besides the kind of exchange.

    Attributes:
        group: a `Group`.
        ranks: those of the group, among all processes.
        max_tokens: the most tokens a rank may have, or None.
        owners: `ExpertRanks`, of those that send tokens to the ranks of their experts.

    Raises:
        ValueError: the ranks do not agree; all of them raise, and the message names them.
    """

    activation_format = ActivationFormat.Standard
    weigh_and_reduce = TopKWeightAndReduceContiguous()
    max_tokens: int | None = None

    def __init__(self, group: dist.ProcessGroup | DeviceMesh, **facts: Any) -> None:
        self.group = Group.of(group)
        self.ranks = frozenset(dist.get_process_group_ranks(process_group(group)))
        expect_agreement(group, {"dispatcher": type(self).__name__, **facts})

    def expect_experts(self, num_experts: int, expert_map: Tensor | None) -> None:
        """Raises ValueError unless the experts of this rank are those that `owners` say; a `ModularKernel` asks."""
        owners: Any = getattr(self, "owners", None)
        if owners is not None:
            owners.expect_held(owners.expert_map(self.group.rank), num_experts, expert_map)

    def expect_apart(self, name: str, other: "Exchange") -> None:
        """Raises ValueError if `other`, called `name`, is over more ranks of this group than this one.

        What is sent or summed twice among the same ranks is not where its experts are, or counts twice.
        """
        if len(again := self.ranks & other.ranks) > 1:
            raise ValueError(
                f"{name} is over ranks {sorted(other.ranks)}: expected one of {sorted(again)}, which exchange already"
            )

    @property
    def num_dispatchers(self) -> int:
        """W, how many ranks send tokens here."""
        return self.group.size

    @property
    def max_num_tokens_per_rank(self) -> int | None:
        """The most tokens that one rank sends another; None for any number."""
        return self.max_tokens

    @property
    def output_is_reduced(self) -> bool:
        """Whether `finalize` returns sums over all ranks: shared experts that ranks share are reduced on their own."""
        return True


Start = Callable[[Sequence[tuple[Tensor, int]]], list[Receiver]]
"""Starts to move tensors [T, ...] to [R, ...], each with what fills its rows of no token."""


def start_tokens(given: Prepared, start: Start, way_back: Any) -> Started:
    """Moves what tokens [T, H] have to [R, H]."""
    others = ((each, 0) for each in (given.topk_weights, *given.extra_tensors))
    tokens, ids, weights, *extras = start(((given.hidden_states, 0), (given.topk_ids, -1), *others))

    def received() -> Prepared:
        prepared = Prepared(tokens(), weights(), ids(), way_back=way_back)
        return prepared._replace(extra_tensors=tuple(extra() for extra in extras))

    return nothing, received


def nothing() -> None:
    """The hook of an exchange whose receiver waits."""


def of_rows(x: Tensor, num_rows: int, fill: int = 0) -> Tensor:
    """Brought to so many rows by some of `fill`."""
    missing = num_rows - x.shape[0]
    if not torch.compiler.is_compiling() and missing == 0:  # padding by nothing copies
        return x
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=fill)
