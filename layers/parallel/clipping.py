"""The norm of gradients that lie on different meshes, which torch does not add up."""

from collections.abc import Iterable
from numbers import Real

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
        max_norm: of all gradients together.
        norm_type: p of the norm, or infinity.

    Returns:
        The norm before, a plain tensor [] and the same on all ranks.

    Raises:
        TypeError, ValueError: `max_norm` is no number, or a negative one, which would turn gradients around.

    Example:
        >>> clip_grad_norm_(model.parameters(), max_norm=1.0)
    """
    expect_type("max_norm", max_norm, (Real, Tensor))
    if isinstance(max_norm, Real) and not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}: expected at least 0")
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    groups: dict[object, list[Tensor]] = {}
    for parameter in every:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    grads = [[each.grad for each in group if each.grad is not None] for group in groups.values()]
    norms = [_whole(get_total_norm(group, norm_type)) for group in grads or [[]]]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
