"""Tensors that go with tokens: scales of quantised rows, adapter ids, whatever else has a row per token.

Letters: T tokens, R rows that an exchange makes of them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_ops import permute
from moe_ops.errors import describe, type_error, value_error


def expect_row_per_token(extra_tensors: Sequence[Tensor], num_tokens: int | torch.SymInt) -> None:
    """Raises TypeError or ValueError that names the first of `extra_tensors` that is no tensor [T, ...]."""
    for index, extra in enumerate(extra_tensors):
        name = f"extra_tensors[{index}]"
        if not isinstance(extra, Tensor):
            type_error("{}={}: expected a torch.Tensor", name, describe(extra))
        if extra.dim() == 0 or extra.shape[0] != num_tokens:
            value_error(
                "{} has shape {}: expected {} rows, one per token", name, list(extra.shape), num_tokens
            )


def moved_as_bytes(move: Callable[[Tensor], Callable[[], Tensor]], rows: Tensor) -> Callable[[], Tensor]:
    """`move` of rows [T, ...] of any dtype, started; the receiver returns rows [R, ...] of the same.

    What can have no gradient goes as bytes, which all backends take: gloo has no 16-bit integers and no 8-bit floats.
    """
    if rows.dtype.is_floating_point and rows.element_size() > 1:
        return move(rows)
    receiver = move(as_bytes(rows))
    return lambda: of_bytes(receiver(), rows)


def of_bytes(rows: Tensor, like: Tensor) -> Tensor:
    """[R, ...] in the dtype of `like` [T, ...], of its bytes [R, C]."""
    return rows.reshape(-1).view(like.dtype).view(rows.shape[0], *like.shape[1:])


def as_bytes(rows: Tensor) -> Tensor:
    """[T, C] uint8 of rows [T, ...], without a gradient."""
    num_bytes = rows.shape[1:].numel() * rows.element_size()
    return rows.detach().contiguous().view(-1).view(torch.uint8).view(rows.shape[0], num_bytes)


def in_slot_order(rows: Tensor, slots: Tensor, per_token: int | torch.SymInt) -> Tensor:
    """[T, ...] to [S, ...]: the token's row of every slot, of which each token has `per_token`."""
    if rows.dim() == 2 and rows.dtype.is_floating_point:
        return permute(rows, slots)  # its gradient is a sum in slot order
    return rows[slots.long() // max(per_token, 1)]


def placed(rows: Tensor, places: Tensor, num_rows: int, fill: int = 0) -> Tensor:
    """[num_rows, ...] with each of the rows at its place; one row more takes what has none."""
    empty = rows.new_full((num_rows + 1, *rows.shape[1:]), fill)
    return empty.index_copy(0, places, rows)[:num_rows]


def bytes_per_token(rows: Sequence[Tensor]) -> int:
    """Of tensors [T, ...], together."""
    return sum(each.shape[1:].numel() * each.element_size() for each in rows)
