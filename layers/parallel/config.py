"""How data, tensor and sequence parallelism around a layer decide where its experts are and how tokens reach them.

Letters: T tokens, I intermediate size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from layers._checks import expect_choice, expect_count, expect_positive, expect_type
from layers.parallel.all_gather import AllGatherPrepareAndFinalize
from layers.parallel.all_reduce import AllReducePrepareAndFinalize
from layers.parallel.exchange import Exchange
from layers.parallel.group import ExpertRanks
from layers.parallel.layout import ExpertsLayout
from layers.parallel.styles import Dispatcher, ExpertParallel, ExpertTensorParallel
from layers.weights.shard import WHOLE, TensorShard


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """dp * pcp * tp ranks: tensor-parallel ones are neighbours, then those that share a prefill's context.

    With `ep`, whole experts are spread over all of them; without, each rank holds a part of every expert, one of as
    many. The ranks of a tensor-parallel group have the same tokens, or with `sp` each a part of them.

    Args:
        dp: ranks, or groups of ranks, with tokens of their own.
        ep: whether experts stay whole.
        tp: ranks that share the model around the experts.
        sp: whether these split the tokens.
        pcp: groups of ranks that split the tokens of a data-parallel one (prefill context parallelism). To experts they
            are ranks with tokens of their own.

    Raises:
        TypeError, ValueError: a size is no int of at least 1, or the others are no bool.

    Example:
        >>> config = ParallelConfig(dp=2, ep=True, tp=4)
        >>> config.parallelize(block.experts, init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp")))
    """

    dp: int = 1
    ep: bool = False
    tp: int = 1
    sp: bool = False
    pcp: int = 1

    def __post_init__(self) -> None:
        expect_positive("dp", self.dp)
        expect_positive("tp", self.tp)
        expect_positive("pcp", self.pcp)
        expect_type("ep", self.ep, bool)
        expect_type("sp", self.sp, bool)

    @property
    def num_ranks(self) -> int:
        """Over which experts are spread."""
        return self.num_groups * self.tp

    @property
    def num_groups(self) -> int:
        """Of ranks that share the model: as many have tokens of their own."""
        return self.dp * self.pcp

    @property
    def ep_size(self) -> int:
        """Ranks that hold different experts."""
        return self.num_ranks if self.ep else 1

    @property
    def sp_size(self) -> int:
        """Ranks that split the tokens of one."""
        return self.tp if self.sp else 1

    def shard(self, rank: int) -> TensorShard:
        """The part of each expert that a rank holds."""
        return WHOLE if self.ep else TensorShard(rank, self.num_ranks)

    def num_tokens(self, of_each: Sequence[int]) -> tuple[int, ...]:
        """How many tokens every rank brings into an exchange, of T for each data-parallel one: a ceiling of its part.

        Raises:
            TypeError, ValueError: there are not `dp` numbers, or one is no int of at least 0.
        """
        expect_type("of_each", of_each, Sequence)
        if len(of_each) != self.dp:
            raise ValueError(f"of_each={list(of_each)}: expected dp={self.dp} numbers")
        for index, tokens in enumerate(of_each):
            expect_count(f"of_each[{index}]", tokens)
        of_groups = (-(-tokens // self.pcp) for tokens in of_each for _ in range(self.pcp))
        return tuple(-(-tokens // self.sp_size) for tokens in of_groups for _ in range(self.tp))

    def parallelize(
        self,
        experts: nn.Module,
        mesh: DeviceMesh,
        *,
        dispatcher: Dispatcher = "auto",
        max_tokens: int | None = None,
    ) -> nn.Module:
        """Shards a module of experts, as `ExpertParallel` and `ExpertTensorParallel` do.

        Args:
            experts: a `FusedMoE`, or experts of a patched model.
            mesh: of all ranks, [dp * pcp, tp], in any order: rank r holds the r-th part of the experts.
            dispatcher, max_tokens: of tokens that differ between ranks; see `ExpertParallel`. With experts in parts,
                or ranks that have the same tokens, it is always an all-gather.

        Raises:
            TypeError, ValueError: `mesh` is none, has other sizes or other ranks, `dispatcher` is none, or as the
                styles do.
        """
        expect_type("mesh", mesh, DeviceMesh)
        expect_choice("dispatcher", dispatcher, Dispatcher)
        if tuple(mesh.shape) != (sizes := (self.num_groups, self.tp)):
            raise ValueError(f"mesh has shape {tuple(mesh.shape)}: expected {sizes} = [dp * pcp, tp]")
        if mesh.size() != dist.get_world_size():
            raise ValueError(f"mesh has {mesh.size()} ranks: expected all {dist.get_world_size()}")
        every = DeviceMesh(mesh.device_type, list(range(mesh.size())), mesh_dim_names=("experts",))
        kind = _WholeExperts if self.ep else _PartsOfExperts
        return parallelize_module(experts, every, kind(self, mesh, dispatcher, max_tokens))

    def exchange(self, mesh: DeviceMesh, max_tokens: int | None) -> Exchange | None:
        """Of tokens that some ranks share. None if all have their own."""
        if self.tp == 1 or self.sp:
            return None
        groups, tp = mesh.get_all_groups()  # a mesh may have no names
        others = None if self.num_groups == 1 else AllGatherPrepareAndFinalize(groups, max_tokens=max_tokens)
        return AllReducePrepareAndFinalize(tp, others)


class _WholeExperts(ExpertParallel):
    def __init__(
        self, config: ParallelConfig, mesh: DeviceMesh, dispatcher: Dispatcher, max_tokens: int | None
    ):
        super().__init__(dispatcher, max_tokens=max_tokens)
        self.config, self.mesh = config, mesh

    def _exchange(self, mesh: DeviceMesh, layout: ExpertsLayout, owners: ExpertRanks) -> Exchange:
        shared = self.config.exchange(self.mesh, self.max_tokens)
        return super()._exchange(mesh, layout, owners) if shared is None else shared


class _PartsOfExperts(ExpertTensorParallel):
    def __init__(
        self, config: ParallelConfig, mesh: DeviceMesh, dispatcher: Dispatcher, max_tokens: int | None
    ):
        super().__init__("allgather", max_tokens=max_tokens)
        self.config, self.mesh = config, mesh

    def _exchange(self, mesh: DeviceMesh) -> Exchange:
        shared = self.config.exchange(self.mesh, self.max_tokens)
        return super()._exchange(mesh) if shared is None else shared
