"""What adapters have to know of the experts that they change, whichever module these are in.

Letters: P experts of all ranks, H hidden, I intermediate size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from layers.balancing import ExpertBalancing, experts_at
from layers.expert_parameters import ExpertParameters, weight_shapes
from layers.weights.shard import WHOLE, TensorShard

if TYPE_CHECKING:
    from layers.parallel.rank_experts import RankExperts

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """Those of one layer.

    Args:
        shapes: of w13 [P, 2I, H] and w2 [P, H, I] over all ranks.
        held: the experts whose weights are here, in their order.
        has_blocks: whether rows of w13 are gate rows, then up rows.
        weight: w2, or what is here of it.
        balancing: what the module has of it now: says where experts are.
        shard: the part of each expert that is here.
        parallel: the layer's `RankExperts`, or None.
        num_experts: E, where some of the P are places for replicas.
    """

    shapes: tuple[Shape, Shape]
    held: list[int]
    has_blocks: bool
    weight: Tensor
    balancing: Callable[[], ExpertBalancing | None]
    shard: TensorShard = WHOLE
    parallel: "RankExperts | None" = None
    num_experts: int | None = None

    @classmethod
    def of(cls, layer: ExpertParameters) -> "AdaptedExperts":
        """Of a `FusedMoE`."""
        config = layer.config
        activation: Any = config.activation
        return cls(
            weight_shapes(config, config.num_physical_experts),
            layer.held_experts(),
            activation.is_gated and not activation.interleaved,
            layer.w2_weight,
            partial(getattr, layer, "balancing", None),
            layer.shard,
            getattr(layer, "parallel", None),
            config.num_experts,
        )

    @property
    def shapes_here(self) -> tuple[Shape, Shape]:
        """Of the parts of w13 and w2 that are here."""
        (_, rows, hidden), (_, _, columns) = self.shapes
        rows, columns = (self.shard.local_size("intermediate_size", size) for size in (rows, columns))
        return (len(self.held), rows, hidden), (len(self.held), hidden, columns)

    def num_given(self, num_adapters: int) -> int:
        """Of how many experts adapters may be, best as many as these: of the P places, or of the E experts."""
        return num_adapters if num_adapters == self.num_experts else self.shapes[0][0]

    def given_here(self, num_given: int) -> list[int]:
        """Of adapters of so many, those of the experts that are here."""
        at = experts_at(self.balancing(), self.shapes[0][0], num_given)
        return [at[place] for place in self.held]
