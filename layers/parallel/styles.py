"""The way in: `ParallelStyle`s that shard a module of experts over a mesh, for `parallelize_module`.

Letters: E experts, K experts per token, W ranks.
"""

from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from layers._checks import expect_choice
from layers.fused_moe import FusedMoE
from layers.parallel.all_gather import AllGatherPrepareAndFinalize
from layers.parallel.all_reduce import AllReducePrepareAndFinalize
from layers.parallel.all_to_all import AllToAllPrepareAndFinalize, PaddedAllToAllPrepareAndFinalize
from layers.parallel.exchange import Exchange
from layers.parallel.group import ExpertRanks, Group, expect_agreement, process_group
from layers.parallel.layout import ExpertsLayout, experts_layout
from layers.parallel.portions import Portions
from layers.parallel.rank_experts import RankExperts
from layers.parallel.sharding import WHOLE_EXPERTS, parts_of_experts, shard_parameter
from layers.parallel.symmetric import SymmetricPrepareAndFinalize, fault_of_symmetric_memory
from layers.weights.shard import TensorShard

Dispatcher = Literal["auto", "allgather", "alltoall", "symmetric", "allreduce"]

# An all-to-all that moves more than this part of an all-gather's bytes is not worth its splits.
_WORTH_AN_ALL_TO_ALL = 0.5
# Up to so many tokens a rank, writing into the others' memory took 0.3 to 0.8 of the time of an all-gather and
# reduce-scatter, least for few tokens (docs/parallel.md); twice as many take as long either way.
_WORTH_SYMMETRIC_MEMORY = 4096
_MOST_CHOSEN = 32  # experts per token, for modules that do not know it


class ExpertParallel(ParallelStyle):
    """Whole experts on each rank, as many on every one; tokens go to them and come back.

    Parameters [E, ...] become DTensors, `Shard(0)`, so that a state dict has all experts; rank r of the mesh computes
    with the r-th E / W of them. Nothing else of the model is changed: routers and shared experts stay where they are.
    Scales of quantised experts are shared as their weights are; tokens are quantised where they arrive.

    Args:
        dispatcher: "allgather" brings every token to every rank, "alltoall" each to the ranks of its experts, once to
            each. "symmetric" does that by writing into the memory of the other GPUs, of one host, and needs
            `max_tokens`. "auto" takes it where it can and a rank has at most 4096 tokens; else the all-to-all where
            it moves at most half the bytes, which is for few experts per token and many ranks. "allreduce" is for
            ranks that have the same tokens, as behind tensor-parallel attention.
        max_tokens: the most tokens that a rank has in a forward. With it every shape is static and nothing waits for
            the host, as CUDA graphs require; without, ranks tell each other how many they have.
        batches: how many parts of the tokens are exchanged one behind the other, so that experts run one part while
            another is on its way. Two are enough to overlap; each is an exchange of its own.
        chunk_tokens: the most tokens of a rank that are exchanged at once, which bounds what an exchange takes of
            memory. All ranks exchange as many chunks as the one with most tokens, or as `max_tokens` makes; compiled
            code needs the latter.

    Raises:
        TypeError, ValueError: an option is none, `max_tokens` or `chunk_tokens` is given where ranks have the same
            tokens, or not given for "symmetric". When it is
            applied: the module is no module of experts, has an option that needs them all on one device, or more
            experts in one weight than in the other (LongCat-Flash), or E is no multiple of W; ranks of the mesh do
            not ascend; a module or a style differs between ranks, which the message names; "symmetric" where GPUs do
            not reach each other's memory.

    Example:
        >>> mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("ep",))
        >>> parallelize_module(block, mesh["ep"], {"experts": ExpertParallel()})
    """

    def __init__(
        self,
        dispatcher: Dispatcher = "auto",
        *,
        max_tokens: int | None = None,
        batches: int = 1,
        chunk_tokens: int | None = None,
    ) -> None:
        expect_choice("dispatcher", dispatcher, Dispatcher)
        self.dispatcher: Dispatcher = dispatcher
        self.max_tokens, self.portions = max_tokens, Portions(max_tokens, batches, chunk_tokens)
        _expect_own_tokens(self.portions, dispatcher)
        if dispatcher == "symmetric" and max_tokens is None:
            raise ValueError("max_tokens=None with dispatcher='symmetric': expected a number")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = Group.of(device_mesh)
        layout = _agreed_layout(device_mesh, module, self)
        owners = ExpertRanks(layout.num_experts, group.size)
        exchange = self._exchange(device_mesh, layout, owners)
        for name in layout.parameters:
            shard_parameter(module, name, device_mesh, WHOLE_EXPERTS, self.src_data_rank)
        parallel = RankExperts(exchange, group, self.portions)
        _put(module, parallel, owners.expert_map(group.rank), shared_by(device_mesh, self))
        return module

    def _expect_equal_shares(self, layout: ExpertsLayout, group: Group) -> None:
        """Raises ValueError unless ranks can have equal shares."""
        if layout.num_experts % group.size:
            raise ValueError(f"num_experts={layout.num_experts}: expected a multiple of {group.size} ranks")
        if group.size > 1:
            layout.expect_alike()

    def _exchange(self, mesh: DeviceMesh, layout: ExpertsLayout, owners: ExpertRanks) -> Exchange:
        dispatcher, most = self.dispatcher, self.portions.of_one_exchange
        if dispatcher == "auto":
            dispatcher = chosen_dispatcher(mesh, layout, owners, most)
        if dispatcher == "symmetric" and most is not None:
            return _symmetric_exchange(mesh, layout, owners, most)
        return exchange_of(dispatcher, mesh, owners, most)


class ExpertTensorParallel(ParallelStyle):
    """A part of every expert on each rank: rows of gate and up, columns of down. Outputs are summed over ranks.

    Parameters become DTensors. Gate rows followed by up rows, [E, 2I, H], become [E, 2, I, H], since DTensor has no
    other way to say which of them are here: so they are in a state dict, on any number of ranks. A bias behind the
    second product stays whole on all ranks and counts once. Scales of quantised experts are cut as weights are, but
    for those of all gate rows, or of whole rows of down, which every rank has. What is computed of tokens is quantised
    where it is: with scales of whole rows each part of a row between the products has its own.

    Args:
        dispatcher: "allreduce" is for ranks that have the same tokens, "allgather" for ranks with tokens of their own,
            as under sequence parallelism.
        max_tokens, batches, chunk_tokens: as in `ExpertParallel`; the first and the last with "allgather".

    Raises:
        TypeError, ValueError: as `ExpertParallel` does; the intermediate size is no multiple of W, or a part of it no
            multiple of what shares a scale.

    Example:
        >>> parallelize_module(block, mesh["tp"], {"experts": ExpertTensorParallel()})
    """

    def __init__(
        self,
        dispatcher: Literal["allreduce", "allgather"] = "allreduce",
        *,
        max_tokens: int | None = None,
        batches: int = 1,
        chunk_tokens: int | None = None,
    ) -> None:
        expect_choice("dispatcher", dispatcher, Literal["allreduce", "allgather"])
        self.dispatcher, self.max_tokens = dispatcher, max_tokens
        self.portions = Portions(max_tokens, batches, chunk_tokens)
        _expect_own_tokens(self.portions, dispatcher)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = Group.of(device_mesh)
        layout = _agreed_layout(device_mesh, module, self)
        exchange = self._exchange(device_mesh)
        for name, each in layout.parameters.items():
            shard_parameter(module, name, device_mesh, parts_of_experts(each), self.src_data_rank)
        _put(module, RankExperts(exchange, group, self.portions), None, shared_by(device_mesh, self))
        if isinstance(module, FusedMoE):
            module.shard = TensorShard(group.rank, group.size)
        return module

    def _expect_equal_shares(self, layout: ExpertsLayout, group: Group) -> None:
        """Raises ValueError unless ranks can have equal shares."""
        layout.expect_parts(TensorShard(group.rank, group.size))

    def _exchange(self, mesh: DeviceMesh) -> Exchange:
        if self.dispatcher == "allreduce":
            return AllReducePrepareAndFinalize(mesh)
        return AllGatherPrepareAndFinalize(mesh, max_tokens=self.portions.of_one_exchange)


def chosen_dispatcher(
    mesh: DeviceMesh, layout: ExpertsLayout, owners: ExpertRanks, max_tokens: int | None
) -> Dispatcher:
    """What "auto" is for these ranks, which all have to ask."""
    has_few = max_tokens is not None and max_tokens <= _WORTH_SYMMETRIC_MEMORY
    is_for_it = has_few and owners.num_ranks > 1
    if is_for_it and fault_of_symmetric_memory(mesh) is None:
        return "symmetric"
    moves = part_of_all_gather(owners, layout.top_k or layout.num_experts)
    return "alltoall" if moves <= _WORTH_AN_ALL_TO_ALL else "allgather"


def _symmetric_exchange(
    mesh: DeviceMesh, layout: ExpertsLayout, owners: ExpertRanks, max_tokens: int
) -> Exchange:
    return SymmetricPrepareAndFinalize(
        mesh,
        owners,
        max_tokens=max_tokens,
        hidden_size=layout.hidden_size,
        top_k=layout.top_k or min(_MOST_CHOSEN, layout.num_experts),
        dtype=layout.token_dtype,
    )


def exchange_of(
    dispatcher: Dispatcher, mesh: DeviceMesh, owners: ExpertRanks, max_tokens: int | None
) -> Exchange:
    """The exchange of this name, among the ranks of `mesh`."""
    if dispatcher == "allreduce":
        return AllReducePrepareAndFinalize(mesh)
    if dispatcher == "allgather":
        return AllGatherPrepareAndFinalize(mesh, max_tokens=max_tokens)
    if max_tokens is None:
        return AllToAllPrepareAndFinalize(mesh, owners)
    return PaddedAllToAllPrepareAndFinalize(mesh, owners, max_tokens=max_tokens)


def _expect_own_tokens(portions: Portions, dispatcher: str) -> None:
    for name in ("max_tokens", "chunk_tokens"):
        value = getattr(portions, name)
        if value is not None and dispatcher == "allreduce":
            raise ValueError(f"{name}={value} with dispatcher='allreduce': expected None")


def part_of_all_gather(owners: ExpertRanks, top_k: int) -> float:
    """Bytes that an all-to-all moves, of those of an all-gather: how likely a token is wanted by a given other rank.

    Of experts that are all as likely, K different ones.
    """
    num_experts, each = owners.num_experts, owners.num_experts // owners.num_ranks
    unwanted = 1.0
    for chosen in range(min(top_k, num_experts)):
        unwanted *= max(num_experts - each - chosen, 0) / (num_experts - chosen)
    return 1 - unwanted


def shared_by(mesh: DeviceMesh, style: ExpertParallel | ExpertTensorParallel) -> dict[str, str]:
    """What experts are shared by, in words: a module keeps it to tell whether it is asked for again."""
    options = f"{style.dispatcher!r}, {style.portions}"
    return {"mesh": f"ranks {mesh.mesh.tolist()}", "style": f"{type(style).__name__}({options})"}


def _put(module: Any, experts: RankExperts, expert_map: Tensor | None, by: dict[str, str]) -> None:
    if isinstance(module, FusedMoE):
        module.parallel = experts
        module.hold(expert_map)
        return
    module.moe_ops_parallel, module.moe_ops_shared_by = experts, by
    device = module.down_proj.device
    expert_map = None if expert_map is None else expert_map.to(device)
    module.register_buffer("moe_ops_expert_map", expert_map, persistent=False)


def _agreed_layout(
    mesh: DeviceMesh, module: nn.Module, style: ExpertParallel | ExpertTensorParallel
) -> ExpertsLayout:
    """Of `module`, before anything is sent: ranks with other layers would send each other tensors of other sizes.

    What is wrong on this rank is told to the others, which would wait for it otherwise.
    """
    processes = process_group(mesh)
    try:
        _expect_ascending(mesh)
        layout = experts_layout(module)
        style._expect_equal_shares(layout, Group.of(mesh))
    except Exception as error:
        expect_agreement(processes, {"error": error})
        raise
    expect_agreement(processes, {"error": None, **_facts_of_style(style), **_facts_of_module(module, layout)})
    return layout


def _expect_ascending(mesh: DeviceMesh) -> None:
    """Raises ValueError unless the mesh has the order of its group, by which parts are sent.

    By that of the mesh a checkpoint writes down where they lie, and a rank takes its own of a whole.
    """
    ranks = mesh.mesh.tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"mesh has ranks {ranks}: expected them in ascending order, that of a process group")


def _facts_of_style(style: ExpertParallel | ExpertTensorParallel) -> dict[str, Any]:
    return {"style": type(style).__name__} | {f"style.{name}": each for name, each in vars(style).items()}


def _facts_of_module(module: nn.Module, layout: ExpertsLayout) -> dict[str, Any]:
    kinds = {name: _kind(module.get_parameter(name)) for name in layout.parameters}
    config = module.config if isinstance(module, FusedMoE) else None
    return {"config": config, "experts": layout, "parameters": kinds}


def _kind(parameter: Any) -> tuple[Any, ...]:
    """What decides what is sent of it; placements are those of a DTensor."""
    shape, placements = tuple(parameter.shape), getattr(parameter, "placements", None)
    return shape, parameter.dtype, parameter.device.type, placements
