"""What an operator does with a batch of `torch.vmap`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def over_tokens(
    overload: Callable[..., Any],
    batch: int,
    is_token: list[bool],
    in_dims: tuple[int | None, ...],
    args: tuple[Any, ...],
) -> tuple[Any, Any]:
    """An operator of a batch of tokens, which are tokens of one call: its results, and where the batch is in each."""
    flat = [
        _batch_first(arg, dim, batch).flatten(0, 1) if token and arg is not None else arg
        for arg, dim, token in zip(args, in_dims, is_token, strict=True)
    ]
    outputs = overload(*flat)
    if isinstance(outputs, Tensor):
        return outputs.unflatten(0, (batch, -1)), 0
    return tuple(out.unflatten(0, (batch, -1)) for out in outputs), (0,) * len(outputs)


def _batch_first(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    return tensor.expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def one_by_one(
    overload: Callable[..., Any], batch: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The same of any batch: a call for each element."""
    results = []
    for index in range(batch):
        picked = [
            arg if dim is None else arg.select(dim, index) for arg, dim in zip(args, in_dims, strict=True)
        ]
        results.append(overload(*picked))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])
