"""What a layer is, as a model wrote it."""

from collections.abc import Mapping
from typing import NamedTuple

from torch.fx import Node

from inductor_passes.raising.evaluation import Cut
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.products import Product
from inductor_passes.raising.sums import WeightedSum


class Outcome(NamedTuple):
    """The output [S, B] of a product, with its bias and past masks."""

    product: Product
    bias: Node | None
    node: Node


class Experts(NamedTuple):
    """The routed experts of one layer."""

    indices: Indices
    hidden_states: Node
    firsts: tuple[Outcome, ...]
    """One product for gate and up, or one for each."""
    gate: Cut
    masks: Mapping[Node, bool]
    """What the gate reads besides, and what that is for ids in range."""
    activated: Node
    """[S, I]: what the gate gives."""
    second: Outcome
    sum: WeightedSum
