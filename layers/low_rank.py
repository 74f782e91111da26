"""A low-rank change of one weight of every expert, and how that of gate and up becomes one of both.

Letters: E experts, r rank, A input and B output features, H hidden, I intermediate size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops._checks import expect_shape
from moe_ops.errors import describe


class LowRank(NamedTuple):
    """A change of one weight of every expert, b @ a.

    Attributes:
        a: [E, r, A], of A input features. In `ExpertLora` [E, N, r, A].
        b: [E, B, r], of B output features. In `ExpertLora` [E, N, B, r].
    """

    a: Tensor
    b: Tensor


def join_gate_up(gate: LowRank, up: LowRank, *, interleaved: bool = False) -> LowRank:
    """The change of w13, of rank 2r, from those of gate and up projection that have each an `a` of their own.

    Args:
        gate, up: [E, r, H] and [E, I, r], as checkpoints of linear projections have them, stacked over experts.
        interleaved: whether rows of w13 alternate.

    Returns:
        [E, 2r, H] and [E, 2I, 2r], in which half of `b` is zero.

    Raises:
        TypeError, ValueError: one of both is none, or shapes do not fit.

    Example:
        >>> lora.load_adapter(0, join_gate_up(gate, up), down, scaling=alpha / rank)
    """
    expect_low_rank("gate", gate)
    expect_low_rank("up", up)
    (num_experts, rank, hidden_size), size, others = gate.a.shape, gate.b.shape[1], up.a.shape[1]
    expect_shape("gate.b", gate.b, (num_experts, size, rank))
    expect_shape("up.a", up.a, (num_experts, others, hidden_size))
    expect_shape("up.b", up.b, (num_experts, size, others))
    b = gate.b.new_zeros(num_experts, 2 * size, rank + others)
    gate_rows, up_rows = (b[:, ::2], b[:, 1::2]) if interleaved else b.chunk(2, dim=1)
    gate_rows[:, :, :rank], up_rows[:, :, rank:] = gate.b, up.b
    return LowRank(torch.cat([gate.a, up.a], dim=1), b)


def expect_low_rank(name: str, given: object) -> None:
    """Raises TypeError or ValueError unless these are matrices of experts, of any sizes."""
    if not isinstance(given, LowRank):
        raise TypeError(f"{name}={describe(given)}: expected LowRank, got {type(given).__name__}")
    for part, matrix, shape in zip(("a", "b"), given, ("ErA", "EBr"), strict=True):
        expect_shape(f"{name}.{part}", matrix, tuple(shape))
        if not matrix.dtype.is_floating_point:
            raise TypeError(f"{name}.{part} has dtype {matrix.dtype}: expected a floating point dtype")
