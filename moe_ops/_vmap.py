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
    batched = [
        _batch_first(arg, dim, batch) if token and arg is not None else None
        for arg, dim, token in zip(args, in_dims, is_token, strict=True)
    ]
    num_tokens = next(arg.shape[1] for arg in batched if arg is not None)
    outputs = overload(
        *(arg if own is None else own.flatten(0, 1) for arg, own in zip(args, batched, strict=True))
    )
    if isinstance(outputs, Tensor):
        return outputs.unflatten(0, (batch, num_tokens)), 0
    return tuple(out.unflatten(0, (batch, num_tokens)) for out in outputs), (0,) * len(outputs)


def _batch_first(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    return tensor.expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def one_by_one(
    overload: Callable[..., Any], batch: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The same of any batch: a call for each element."""
    if batch == 0:
        return _of_no_element(overload, in_dims, args)
    results = []
    for index in range(batch):
        picked = [
            arg if dim is None else arg.select(dim, index) for arg, dim in zip(args, in_dims, strict=True)
        ]
        results.append(overload(*picked))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])


def _of_no_element(
    overload: Callable[..., Any], in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> Any:
    """Of an empty batch: no element, of the shape that one would have; a gradient of it is zero."""
    outputs = overload(*(_element_on_meta(arg, dim) for arg, dim in zip(args, in_dims, strict=True)))
    like = next(arg for arg, dim in zip(args, in_dims, strict=True) if dim is not None)
    zero = sum(arg.flatten()[:0].sum() for arg in args if isinstance(arg, Tensor) and arg.is_floating_point())

    def empty(output: Tensor) -> Tensor:
        result = like.new_empty((0, *output.shape), dtype=output.dtype)
        return result + zero if output.is_floating_point() else result

    if isinstance(outputs, Tensor):
        return empty(outputs), 0
    return tuple(map(empty, outputs)), (0,) * len(outputs)


def _element_on_meta(arg: Any, dim: int | None) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    shape = [size for index, size in enumerate(arg.shape) if index != dim]
    return torch.empty(shape, dtype=arg.dtype, device="meta")
