"""Collectives as functions of tensors: a compiler sees them, gradients pass through them, nothing is changed in place.

`start_*` returns a receiver. What stands between the two runs while tensors are on their way. W ranks are in the group.

The operators are torch's functional collectives, called by name: their Python wrappers have other names and other
types of results in torch 2.11 and 2.13, and only some of them a gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from layers.carried import as_bytes, of_bytes
from layers.parallel.group import Group

Receiver = Callable[[], Tensor]

_ops = torch.ops._c10d_functional


def start_all_gather(x: Tensor, group: Group) -> Receiver:
    """[R, ...] of each rank to [W*R, ...] in the order of ranks; R is the same on all. The gradient is summed."""
    x = x.contiguous()
    raw = _ops.all_gather_into_tensor(x.detach(), group.size, group.name)
    return lambda: _AllGather.apply(x, raw, group.size, group.name)  # type: ignore[return-value]


def start_all_gathers(tensors: Sequence[Tensor], group: Group) -> list[Receiver]:
    """`start_all_gather` of each, as one collective: to NCCL several small ones cost as much as a large one.

    They go as bytes: of tensors whose dtypes differ, gloo makes others.
    """
    rows = [x.contiguous() for x in tensors]
    raw = _ops.all_gather_into_tensor_coalesced([as_bytes(x) for x in rows], group.size, group.name)

    def receiver(x: Tensor, raw: Tensor) -> Receiver:
        return lambda: _AllGather.apply(x, raw, group.size, group.name)  # type: ignore[return-value]

    return [receiver(*each) for each in zip(rows, raw, strict=True)]


def start_reduce_scatter(x: Tensor, group: Group) -> Receiver:
    """[W*R, ...] to this rank's R rows of the sum over ranks."""
    x = x.contiguous()
    raw = _ops.reduce_scatter_tensor(x.detach(), "sum", group.size, group.name)
    return lambda: _ReduceScatter.apply(x, raw, group.size, group.name)  # type: ignore[return-value]


def start_all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Receiver:
    """Rows to each rank: `sent[r]` rows go to rank r, `received[r]` come from it, in the order of ranks."""
    x = x.contiguous()
    raw = _ops.all_to_all_single(x.detach(), received, sent, group.name)
    return lambda: _AllToAll.apply(x, raw, received, sent, group.name)  # type: ignore[return-value]


def start_all_reduce(x: Tensor, group: Group) -> Receiver:
    """The sum over ranks of what each has a part of. Every rank goes on with the same, so the gradient passes."""
    x = x.contiguous()
    raw = _ops.all_reduce(x.detach(), "sum", group.name)
    return lambda: _SumOfParts.apply(x, raw, group.size, group.name)  # type: ignore[return-value]


def start_broadcast(x: Tensor, group: Group) -> Receiver:
    """What the first rank has, without a gradient."""
    raw = _ops.broadcast(x.detach().contiguous(), 0, group.name)
    return lambda: _ops.wait_tensor(raw)


def shared_by_all(x: Tensor, group: Group) -> Tensor:
    """`x`, which every rank has and computes a part of the output from: gradients of the parts are summed."""
    return _PartsOfSame.apply(x, group.size, group.name)  # type: ignore[return-value]


def _all_gather(x: Tensor, size: int, name: str) -> Tensor:
    return start_all_gather(x, Group(name, size, 0))()


def _reduce_scatter(x: Tensor, size: int, name: str) -> Tensor:
    return start_reduce_scatter(x, Group(name, size, 0))()


# Each takes the tensor, for its gradient, and what is on its way, and waits.


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, raw: Tensor, size: int, name: str) -> Tensor:
        ctx.group = size, name
        rows = _ops.wait_tensor(raw)
        return rows if rows.dtype == x.dtype else of_bytes(rows, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _reduce_scatter(grad, *ctx.group), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, raw: Tensor, size: int, name: str) -> Tensor:
        ctx.group = size, name
        return _ops.wait_tensor(raw)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _all_gather(grad, *ctx.group), None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, raw: Tensor, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Tensor:
        ctx.splits, ctx.name = (received, sent), name
        return _ops.wait_tensor(raw)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        received, sent = ctx.splits
        back = start_all_to_all(grad, sent, received, Group(ctx.name, len(sent), 0))()
        return back, None, None, None, None


class _SumOfParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, raw: Tensor, size: int, name: str) -> Tensor:
        ctx.group = size, name
        return _ops.wait_tensor(raw)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _PartsOfSame.apply(grad, *ctx.group), None, None, None  # type: ignore[return-value]


class _PartsOfSame(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, name: str) -> Tensor:
        ctx.group = size, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        size, name = ctx.group
        return start_all_reduce(grad, Group(name, size, 0))(), None, None
