"""Checks of operator arguments. They read metadata only and never compare symbolic sizes, so they add no guards.

Every message names the argument, what it is, and what was expected.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.types import RoutingConfig

INDEX_DTYPES = (torch.int32, torch.int64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype we accumulate, route and combine in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def expect_floating(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless `tensor` is a floating point tensor."""
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected a floating point dtype")


def expect_index(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype] = INDEX_DTYPES) -> None:
    """Raises TypeError unless `tensor` has one of the index `dtypes`."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected {' or '.join(map(str, dtypes))}")


def expect_shape(name: str, tensor: Tensor, expected: Sequence[int | torch.SymInt | str]) -> None:
    """Raises ValueError unless `tensor` has the rank and sizes of `expected`; a string there is a free dimension."""
    shape = tensor.shape
    if len(shape) != len(expected) or any(map(_differ, shape, expected)):
        wanted = ", ".join(map(str, expected))
        raise ValueError(f"{name} has shape {list(shape)}: expected [{wanted}]")


def _differ(size: int | torch.SymInt, wanted: int | torch.SymInt | str) -> bool:
    return isinstance(size, int) and isinstance(wanted, int) and size != wanted


def expect_same_dtype(dtype: torch.dtype, reference: str, **tensors: Tensor | None) -> None:
    """Raises TypeError unless every tensor has `dtype`, the dtype of the argument called `reference`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected {dtype}, the dtype of {reference}")


def expect_same_device(device: torch.device, reference: str, **tensors: Tensor | None) -> None:
    """Raises ValueError unless every tensor is on `device`, the device of the argument called `reference`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}: expected {device}, the device of {reference}")


def expect_weight_strides(name: str, weight: Tensor) -> None:
    """Raises ValueError unless a [E, B, A] weight has stride 1 in one of its last two dimensions."""
    if weight.numel() == 0 or any(size == 1 or step == 1 for size, step in _last_two(weight)):
        return
    raise ValueError(
        f"{name} has strides {list(weight.stride())}: expected stride 1 in one of the last two dimensions"
    )


def _last_two(weight: Tensor) -> list[tuple[int, int]]:
    return list(zip(weight.shape[-2:], weight.stride()[-2:], strict=True))


def expect_routing(routing: RoutingConfig, num_experts: int | torch.SymInt) -> None:
    """Raises ValueError unless `routing` can choose from `num_experts` experts, if that is a plain number."""
    if not isinstance(num_experts, int):
        return
    if routing.top_k > num_experts:
        raise ValueError(f"top_k={routing.top_k}: expected at most num_experts={num_experts}")
    if num_experts % routing.num_groups:
        raise ValueError(f"num_groups={routing.num_groups}: expected a divisor of num_experts={num_experts}")
    group_size = num_experts // routing.num_groups
    if routing.group_score == "top2_sum" and routing.num_groups > 1 and group_size < 2:
        raise ValueError(
            f"group_score='top2_sum' with groups of {group_size} expert: expected at least 2 in a group"
        )
    if routing.top_k > routing.topk_groups * group_size:
        raise ValueError(
            f"top_k={routing.top_k}: expected at most {routing.topk_groups * group_size}, "
            f"the experts in topk_groups={routing.topk_groups} groups of {group_size}"
        )
