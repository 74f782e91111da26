"""What a layer is, as a model wrote it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor
from torch.fx import Node

from inductor_passes.raising.evaluation import Cut
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.products import Product
from inductor_passes.raising.stacks import Stack

Score = Callable[[Tensor, Tensor], Tensor]
"""What makes weights [T, K] of numbers, [T, K] or [T, E], and ids [T, K]."""


def as_they_are(numbers: Tensor, ids: Tensor) -> Tensor:
    """Where the numbers are the weights."""
    return numbers


def scaled(weights: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
    """Weights times the number of their expert; those of ids out of range are read by nobody."""
    return weights * scales.flatten()[ids.clamp(0, scales.numel() - 1)]


class Outcome(NamedTuple):
    """The output [S, B] of a product, with its bias and past masks."""

    product: Product
    bias: Stack | None
    node: Node


class Tokens(NamedTuple):
    """Rows: hidden_states [T, H], times topk_weights [T, K] where a model weighs what goes into its experts."""

    hidden_states: Node
    topk_weights: Node | None


class WeightedSum(NamedTuple):
    """`root` is the sum over a token's experts, each times its weight in `score(topk_weights)` [T, K]."""

    topk_weights: Node
    root: Node
    score: Score = as_they_are
    into: Node | None = None
    """What the sum is added to, if `root` has that in it."""
    scales: Node | None = None
    """E numbers, by which what experts give is multiplied as well."""


class Parts(NamedTuple):
    """What stands between the rows of a layer and what its experts give."""

    tokens: Tokens
    firsts: tuple[Outcome, ...]
    """One product for gate and up, or one for each."""
    gate: Cut
    masks: Mapping[Node, bool]
    """What the gate reads besides, and what that is for ids in range."""
    activated: Node
    """[S, I]: what the gate gives."""
    second: Outcome
    topk_weights: Node | None = None
    """By which a model weighs what goes into its experts, or into their second product."""


class Experts(NamedTuple):
    """The routed experts of one layer."""

    indices: Indices
    parts: Parts
    sum: WeightedSum
    others: tuple[Node, ...] = ()
    """First products of other experts, where each has its own."""
