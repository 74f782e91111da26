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
