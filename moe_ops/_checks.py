"""Checks of operator arguments. They read metadata only.

Every message names the argument, what it is, and what was expected. Two symbolic sizes that must be equal are guarded
to be so: otherwise other sizes would give a wrong answer. A symbolic size is never guarded to be a number.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops.errors import describe, type_error, value_error
from moe_ops.types import RoutingConfig

INDEX_DTYPES = (torch.int32, torch.int64)
FLOATING_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype we accumulate, route and combine in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def expect_tensor(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        type_error("{}={}: expected a torch.Tensor", name, describe(value))


def expect_dense(name: str, tensor: Tensor | None) -> None:
    """Raises TypeError for a tensor of a kind that the dispatcher knows no operator of ours for."""
    if tensor is None:
        return
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
        type_error("{} is {}: expected a dense tensor", name, kind)


def expect_floating(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless `tensor` is a floating point tensor of a dtype that can be computed in."""
    expect_tensor(name, tensor)
    if tensor.dtype not in FLOATING_DTYPES:
        type_error("{} has dtype {}: expected a floating point dtype of 16 bits or more", name, tensor.dtype)


def expect_int(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is an int, be it symbolic: a schema takes what can be made one, or says less."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        type_error("{}={}: expected an int", name, describe(value))


def expect_index(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype] = INDEX_DTYPES) -> None:
    """Raises TypeError unless `tensor` has one of the index `dtypes`."""
    expect_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        type_error("{} has dtype {}: expected {}", name, tensor.dtype, " or ".join(map(str, dtypes)))


def expect_shape(name: str, tensor: Tensor, expected: Sequence[int | torch.SymInt | str]) -> None:
    """Raises ValueError unless `tensor` has the rank and sizes of `expected`; a string there is a free dimension."""
    expect_tensor(name, tensor)
    shape = tensor.shape
    if len(shape) != len(expected) or not all(map(_fits, shape, expected)):
        value_error("{} has shape {}: expected {}", name, list(shape), list(expected))


def _fits(size: int | torch.SymInt, wanted: int | torch.SymInt | str) -> bool:
    return isinstance(wanted, str) or are_equal(size, wanted)


def are_equal(size: int | torch.SymInt, wanted: int | torch.SymInt) -> bool:
    """Whether two sizes are equal, as far as a tracer can know; two symbols are taken for equal from here on."""
    if isinstance(size, Tensor) or isinstance(wanted, Tensor):
        return int(size) == int(wanted)  # in torch.jit.trace
    if torch.compiler.is_compiling():
        return _are_equal_symbols(size, wanted)  # Dynamo takes symbols for int
    if isinstance(size, int) and isinstance(wanted, int):
        return size == wanted
    if isinstance(size, int) or isinstance(wanted, int):
        return not _is_known_to_differ(size, wanted)
    return _are_equal_symbols(size, wanted)


def _is_known_to_differ(size: int | torch.SymInt, wanted: int | torch.SymInt) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size != wanted)


def _are_equal_symbols(size: int | torch.SymInt, wanted: int | torch.SymInt) -> bool:
    # Imported where something is symbolic: it takes 0.4 s.
    from torch.fx.experimental.symbolic_shapes import guard_or_true, statically_known_true

    if not guard_or_true(size == wanted):
        return False
    if not statically_known_true(size == wanted):
        torch._check(size == wanted)  # unbacked: only the run can tell
    return True


def asks_for_invariance(emit: str) -> bool:
    """Whether `emit` is "batch_invariant". Raises ValueError unless it is that or "auto"."""
    if emit not in ("auto", "batch_invariant"):
        value_error("emit={!r}: expected 'auto' or 'batch_invariant'", emit)
    return emit == "batch_invariant"


def expect_same_dtype(dtype: torch.dtype, reference: str, **tensors: Tensor | None) -> None:
    """Raises TypeError unless every tensor has `dtype`, the dtype of the argument called `reference`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != dtype:
            type_error("{} has dtype {}: expected {}, the dtype of {}", name, tensor.dtype, dtype, reference)


def expect_dtype(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is a dtype."""
    if not isinstance(value, torch.dtype):
        type_error("{}={}: expected a torch.dtype", name, describe(value))


def as_device(name: str, device: object) -> torch.device:
    """`device` as torch knows it. Raises TypeError or ValueError for what names none."""
    try:
        return torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"{name}={device!r}: expected a torch.device, or the name of one such as 'cuda:0'"
        ) from None


def expect_floating_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises TypeError unless results can be in `dtype`."""
    if dtype not in FLOATING_DTYPES:
        type_error("{}={}: expected a floating point dtype of 16 bits or more", name, dtype)


def expect_result_dtype(name: str, dtype: torch.dtype, given: torch.dtype) -> None:
    """Raises TypeError unless a result of `given` can be in `dtype`: the same, or what sums are in."""
    expect_dtype(name, dtype)
    allowed = dict.fromkeys((given, compute_dtype(given)))
    if dtype not in allowed:
        type_error("{}={}: expected {}", name, dtype, " or ".join(map(str, allowed)))


def expect_same_device(device: torch.device, reference: str, **tensors: Tensor | None) -> None:
    """Raises ValueError unless every tensor is on `device`, the device of the argument called `reference`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            value_error("{} is on {}: expected {}, the device of {}", name, tensor.device, device, reference)


def expect_weight_strides(name: str, weight: Tensor) -> None:
    """Raises ValueError unless a [E, B, A] weight has stride 1 in one of its last two dimensions."""
    if weight.numel() == 0 or any(size == 1 or step == 1 for size, step in _last_two(weight)):
        return
    value_error(
        "{} has strides {}: expected stride 1 in one of the last two dimensions", name, list(weight.stride())
    )


def _last_two(weight: Tensor) -> list[tuple[int, int]]:
    return list(zip(weight.shape[-2:], weight.stride()[-2:], strict=True))


def expect_routing(routing: RoutingConfig, num_experts: int | torch.SymInt) -> None:
    """Raises ValueError unless `routing` can choose from `num_experts` experts, if that is a plain number."""
    if not isinstance(num_experts, int):
        return
    if routing.top_k > num_experts:
        value_error("top_k={}: expected at most num_experts={}", routing.top_k, num_experts)
    if num_experts % routing.num_groups:
        value_error("num_groups={}: expected a divisor of num_experts={}", routing.num_groups, num_experts)
    group_size = num_experts // routing.num_groups
    if routing.group_score == "top2_sum" and routing.num_groups > 1 and group_size < 2:
        value_error(
            "group_score='top2_sum' with groups of {} expert: expected at least 2 in a group", group_size
        )
    if routing.top_k > routing.topk_groups * group_size:
        value_error(
            "top_k={}: expected at most {}, the experts in topk_groups={} groups of {}",
            routing.top_k,
            routing.topk_groups * group_size,
            routing.topk_groups,
            group_size,
        )
