"""Parameters of experts as DTensors, made of whole ones or of the parts that a loader has read."""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from layers.adapted_experts import AdaptedExperts
from layers.fused_moe import FusedMoE
from layers.parallel.group import process_group
from layers.parallel.layout import ParameterLayout


class Split(NamedTuple):
    """How ranks share a parameter.

    Attributes:
        placement: of the DTensor.
        blocks: the dimension of gate rows, then up rows, for which these get a dimension each; None for none.
    """

    placement: Placement
    blocks: int | None = None


WHOLE_EXPERTS = Split(Shard(0))
"""As many on each rank."""


def parts_of_experts(layout: ParameterLayout) -> Split:
    """Of each expert: a part of gate rows and the same of up rows, or of columns."""
    if layout.dim is None:
        return Split(Replicate())
    return Split(Shard(layout.dim + 1), layout.dim) if layout.has_blocks else Split(Shard(layout.dim))


def adapter_splits(experts: AdaptedExperts) -> dict[str, Split]:
    """Of adapters' parameters [E, N, ., .], by name: those of whole experts, or of the parts of each."""
    names, down = ("a13", "b13", "a2", "b2"), cast(DTensor, experts.weight)
    if down.placements == (Shard(0),):  # a single rank has parts of experts too, all of them
        return dict.fromkeys(names, WHOLE_EXPERTS)
    rows = Split(Shard(3), 2) if experts.has_blocks else Split(Shard(2))
    return dict(zip(names, (Split(Replicate()), rows, Split(Shard(3)), Split(Replicate()))))


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, split: Split, source: int | None) -> None:
    """Registers a parameter as a DTensor. Rank `source` sends the others their part; with None each takes its own.

    Raises:
        TypeError: it is a DTensor already, of a `FusedMoE`.
        ValueError: it is one of other ranks, or another part of it is here.
    """
    parameter = module.get_parameter(name)
    if isinstance(parameter, DTensor):
        distributed = _loaded_part(module, name, parameter, mesh, split)
    else:
        distributed = _distributed(_with_blocks(parameter.data, split), mesh, split.placement, source)
    sharded = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    vars(sharded).update(vars(parameter))  # what loaders look for
    module.register_parameter(name, sharded)


def _distributed(tensor: Any, mesh: DeviceMesh, placement: Placement, source: int | None) -> DTensor:
    if tensor.dtype.itemsize > 1:
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=source)
    # gloo sends few dtypes
    as_bytes = distribute_tensor(tensor.view(torch.uint8), mesh, [placement], src_data_rank=source)
    return DTensor.from_local(as_bytes.to_local().view(tensor.dtype), mesh, [placement], run_check=False)


def _loaded_part(module: nn.Module, name: str, loaded: DTensor, mesh: DeviceMesh, split: Split) -> DTensor:
    """The same memory as another DTensor: transformers keeps gate and up rows in one dimension."""
    if isinstance(module, FusedMoE):
        raise TypeError(f"{name} is a DTensor: expected a plain parameter, shard experts first")
    theirs, ours = (dist.get_process_group_ranks(process_group(each)) for each in (loaded.device_mesh, mesh))
    if theirs != ours:
        raise ValueError(f"{name} is shared by ranks {theirs}: expected {ours}, those of the mesh")
    if _part(loaded.placements[0]) != _part_loaded_for(split):
        raise ValueError(f"{name} is placed {loaded.placements}: expected a part for {split.placement}")
    return DTensor.from_local(
        _with_blocks(loaded.to_local(), split), mesh, [split.placement], run_check=False
    )


def _with_blocks(tensor: Any, split: Split) -> Any:
    return tensor if split.blocks is None else tensor.unflatten(split.blocks, (2, -1))


def _part(placement: Any) -> tuple[int | None, int]:
    """The dimension that is split, and of how many blocks each."""
    return getattr(placement, "dim", None), getattr(placement, "split_factor", 1)


def _part_loaded_for(split: Split) -> tuple[int | None, int]:
    return _part(split.placement) if split.blocks is None else (split.blocks, 2)
