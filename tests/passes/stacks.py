"""Rows of layers that are alike, for tests of what they share."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import moe_ops
from tests.passes.moe import EXPERTS, HIDDEN, INTERMEDIATE, ROUTING

Weights = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of one layer: mixing [H, H], router [E, H], w13, w2."""


def weights(layers: int, dtype: torch.dtype = torch.float32) -> list[Weights]:
    """Seeded, other ones for each layer."""
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (HIDDEN, HIDDEN),
        (EXPERTS, HIDDEN),
        (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        (EXPERTS, HIDDEN, INTERMEDIATE),
    )
    return [
        tuple((torch.randn(shape, generator=generator) / 4).to(dtype) for shape in shapes)
        for _ in range(layers)
    ]  # type: ignore[return-value]


def tokens(number: int = 9, dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, H], seeded."""
    return torch.randn(number, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


def block(x: Tensor, weights: Weights) -> Tensor:
    """A norm and a product in the place of attention, then an MoE layer, both added."""
    mixing, router, w13, w2 = weights
    x = x + normed(x) @ mixing
    y = normed(x)
    return x + moe_ops.fused_moe(y, y @ router.T, w13, w2, ROUTING)


def normed(x: Tensor) -> Tensor:
    """x over its root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def stack(x: Tensor, layers: Sequence[Weights], block: Callable[[Tensor, Weights], Tensor] = block) -> Tensor:
    """One after the other."""
    for each in layers:
        x = block(x, each)
    return x


def exact(x: Tensor, layers: Sequence[Weights]) -> Tensor:
    """`stack` in float64, eagerly."""
    return stack(x.double(), [tuple(each.double() for each in layer) for layer in layers])  # type: ignore[misc]


def paged(
    x: Tensor,
    layers: Sequence[Weights],
    caches: Sequence[tuple[Tensor, Tensor]],
    write: Tensor,
    read: Tensor,
    used: Callable[[Tensor], object] = lambda keys: None,
    keys_at: Tensor | None = None,
) -> Tensor:
    """A stack that attends to cached keys and values [N, H]: written at `write`, gathered at `read`, as servers do."""
    for each, (keys, values) in zip(layers, caches, strict=True):
        y = normed(x)
        keys.index_copy_(0, write, y @ each[0])
        k = keys.index_select(0, read if keys_at is None else keys_at).T
        values.index_copy_(0, write, y @ each[0].T)
        x = x + (y @ k).softmax(-1) @ values.index_select(0, read)
        used(k)
        x = block(x, each)
    return x


def cached(layers: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Caches of so many layers, where nine tokens are written, and what they read."""
    caches = [(torch.zeros(24, HIDDEN), torch.zeros(24, HIDDEN)) for _ in range(layers)]
    return caches, torch.arange(9) + 12, torch.arange(20).flip(0)
