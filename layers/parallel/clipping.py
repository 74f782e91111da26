"""The norm of gradients that lie on different meshes, which torch does not add up."""

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from layers._checks import expect_type


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters on several meshes, such as experts and the rest of a model.

    Every rank has to call it. Gradients that are no DTensors have to be the same on all ranks, reduced already.

    Args:
        parameters: plain ones and DTensors of any meshes.
        max_norm: of all gradients together; infinity to know the norm alone. Of a tensor on a GPU nobody asks whether
            it is negative, which would wait for the device.
        norm_type: p of the norm, or infinity.

    Returns:
        The norm before, a plain tensor [] and the same on all ranks.

    Raises:
        TypeError, ValueError: `parameters` are no tensors, `max_norm` is no number, or a negative one, which would turn
            gradients around, or `norm_type` is no number above 0. It is raised before ranks tell each other anything.

    Example:
        >>> clip_grad_norm_(model.parameters(), max_norm=1.0)
    """
    every = _expected(parameters)
    _expect_max_norm(max_norm)
    _expect_number("norm_type", norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: expected a number above 0, or infinity")
    groups: dict[object, list[Tensor]] = {}
    for parameter in every:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    grads = [[each.grad for each in group if each.grad is not None] for group in groups.values()]
    norms = [_whole(get_total_norm(group, norm_type)) for group in grads or [[]]]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _expected(parameters: Any) -> list[Tensor]:
    expect_type("parameters", parameters, (Tensor, Iterable))
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for index, each in enumerate(every):
        expect_type(f"parameters[{index}]", each, Tensor)
    return every


def _expect_max_norm(max_norm: Any) -> None:
    if not isinstance(max_norm, Tensor):
        _expect_number("max_norm", max_norm)
    elif max_norm.numel() != 1:
        raise ValueError(f"max_norm has shape {list(max_norm.shape)}: expected one number")
    is_here = not isinstance(max_norm, Tensor) or max_norm.device.type == "cpu"
    if is_here and not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}: expected at least 0")


def _expect_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected a number, got {type(value).__name__}")


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
