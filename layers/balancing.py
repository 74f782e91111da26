"""Expert balancing inside a layer: where the replicas of each expert are, and how often each one is chosen.

Letters: L layers, E logical experts, P physical ones (experts and their replicas), R the most replicas that one may
have, K experts per token.

The state is tensors that are changed in place and never replaced, so compiled code and captured graphs see a new
placement as they see new weights. `layers.rebalance_experts` finds placements, `ExpertBalancing.place` applies them.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layers._checks import expect_count, expect_positive, expect_type
from layers.given_tensors import GivenTensors
from layers.placement import ExpertPlacement
from moe_ops import map_replicas
from moe_ops._checks import expect_tensor
from moe_ops.arguments import LoadRecord, Replicas, Router
from moe_ops.route_and_record import route_and_record


class EplbState(NamedTuple):
    """Maps and load of all balanced layers of a model; `experts.set_eplb_state(layer, *state)` gives a layer its rows.

    Attributes:
        expert_load_view: [L, P] int32, slots that each physical expert got.
        logical_to_physical_map: [L, E, R] int32, the physical experts that hold a logical one, then -1.
        logical_replica_count: [L, E] int32, how many of these there are.

    Example:
        >>> state = EplbState.initial(len(blocks), num_experts=128, num_redundant_experts=32)
        >>> for layer, block in enumerate(blocks):
        ...     block.experts.set_eplb_state(layer, *state)
    """

    expert_load_view: Tensor
    logical_to_physical_map: Tensor
    logical_replica_count: Tensor

    @classmethod
    def initial(
        cls,
        num_layers: int,
        num_experts: int,
        num_redundant_experts: int = 0,
        device: torch.device | str | None = None,
    ) -> "EplbState":
        """No load, and expert e at e: redundant places stand empty until a placement fills them.

        Raises:
            TypeError, ValueError: a size is no positive int (`num_redundant_experts`: or 0).
        """
        expect_positive("num_layers", num_layers)
        expect_positive("num_experts", num_experts)
        expect_count("num_redundant_experts", num_redundant_experts)
        made: dict[str, Any] = {"dtype": torch.int32, "device": device}
        experts = torch.full((num_layers, num_experts, num_redundant_experts + 1), -1, **made)
        experts[:, :, 0] = torch.arange(num_experts, **made)
        load = torch.zeros(num_layers, num_experts + num_redundant_experts, **made)
        return cls(load, experts, torch.ones(num_layers, num_experts, **made))


class ExpertBalancing(GivenTensors):
    """Chooses physical experts for logical ones, and records the choices; see `moe_ops.map_replicas`.

    Its tensors are those it is given, not copies, and no part of a state dict: who saves one after experts have moved
    saves `held` with it, and commits that where it is loaded. A move to another device makes copies: set the state
    after it.

    Args:
        load: [P] int32 or int64.
        logical_to_physical: [E, R] int32.
        replica_count: [E] int32.
        num_real_tokens: [] int32 or int64: only so many tokens of a forward count; the rest is padding.
        is_recording: [] bool: whether load is recorded.
        seed: [] int32 or int64: replicas are chosen at random, but alike for the same seed.

    Raises:
        TypeError, ValueError: as `moe_ops.map_replicas` does.
    """

    load: Tensor
    logical_to_physical: Tensor
    replica_count: Tensor
    num_real_tokens: Tensor | None
    is_recording: Tensor | None
    seed: Tensor | None

    def __init__(
        self,
        load: Tensor,
        logical_to_physical: Tensor,
        replica_count: Tensor,
        *,
        num_real_tokens: Tensor | None = None,
        is_recording: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("load", load, persistent=False)
        self.register_buffer("logical_to_physical", logical_to_physical, persistent=False)
        self.register_buffer("replica_count", replica_count, persistent=False)
        self.register_buffer("num_real_tokens", num_real_tokens, persistent=False)
        self.register_buffer("is_recording", is_recording, persistent=False)
        self.register_buffer("seed", seed, persistent=False)
        self(torch.zeros((0, 1), dtype=torch.int32, device=load.device))  # raises what a forward would

    def forward(self, topk_ids: Tensor) -> Tensor:
        """[T, K] logical experts to physical ones, int32."""
        return map_replicas(
            topk_ids,
            self.logical_to_physical,
            self.replica_count,
            seed=self.seed,
            load=self.load,
            num_real_tokens=self.num_real_tokens,
            is_recording=self.is_recording,
        )

    def route(self, router: Router) -> tuple[Tensor, Tensor, Tensor]:
        """`topk_routing`'s weights and ids [T, K], logical experts, and what `forward` makes of the ids, at once."""
        replicas = Replicas(self.logical_to_physical, self.replica_count)
        record = LoadRecord(self.load, self.num_real_tokens, self.is_recording)
        return route_and_record(router, replicas, record, self.seed)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.replica_count.shape[0]

    def load_per_expert(self) -> Tensor:
        """[E] int64: the recorded load of each logical expert, over all its replicas."""
        load = self.load.long()[self.logical_to_physical.clamp(min=0).long()]
        return load.masked_fill(~self._in_use(), 0).sum(1)

    def is_initial(self) -> bool:
        """Whether every expert e is at place e and nowhere else, as in `EplbState.initial`. Asks the device."""
        places = torch.arange(self.replica_count.shape[0], device=self.replica_count.device)
        return bool(((self.logical_to_physical[:, 0] == places) & (self.replica_count == 1)).all())

    def _in_use(self) -> Tensor:
        return self._columns() < self.replica_count.unsqueeze(1)

    def _columns(self) -> Tensor:
        return torch.arange(self.logical_to_physical.shape[1], device=self.logical_to_physical.device)

    @torch.no_grad()
    def place(self, placement: ExpertPlacement, expert_weights: Iterable[Tensor]) -> None:
        """Moves experts to where `placement` has them, then changes the maps and forgets the load. All in place.

        Args:
            placement: of this layer, as `layers.rebalance_experts` makes it of a load [E].
            expert_weights: [P, ...] each, what an expert consists of: `FusedMoE.get_expert_weights()`.

        Raises:
            TypeError: the placement is none, or the weights are no tensors.
            ValueError: the placement has other sizes, more replicas of an expert than R, or contradicts itself; the
                weights are not those of P experts: a layer that holds only some cannot move the others. Nothing has
                changed then.
        """
        expect_type("expert_weights", expert_weights, Iterable)
        weights = list(expert_weights)
        for index, weight in enumerate(weights):
            expect_tensor(f"expert_weights[{index}]", weight)
            if weight.shape[:1] != self.load.shape:
                found = f"shape {list(weight.shape)}: expected {self.load.shape[0]} experts first"
                raise ValueError(f"expert_weights[{index}] has {found}")
        source = self._source_of(self.checked(placement).physical_to_logical.to(self.load.device))
        moved = (source != torch.arange(source.shape[0], device=source.device)).nonzero().squeeze(1)
        for weight in weights:
            weight[moved] = weight[source[moved]]
        self.commit(placement)

    @torch.no_grad()
    def commit(self, placement: ExpertPlacement) -> None:
        """Changes the maps to `placement` and forgets the load, in place: for who has moved the weights already.

        Raises:
            TypeError, ValueError: as `checked` does; nothing has changed then.
        """
        _, experts, counts = self.checked(placement)
        self.logical_to_physical.fill_(-1)[:, : experts.shape[1]] = experts.to(self.load.device)
        self.replica_count.copy_(counts)
        self.load.zero_()

    def held(self) -> Tensor:
        """[P] int64: the expert at each place, -1 where there is none."""
        num_places = self.load.shape[0]
        places = self.logical_to_physical.masked_fill(~self._in_use(), num_places).long()
        experts = torch.arange(places.shape[0], device=places.device).unsqueeze(1).expand_as(places)
        held = torch.full((num_places + 1,), -1, device=places.device)
        return held.scatter_(0, places.flatten(), experts.flatten())[:num_places]

    def _source_of(self, held: Tensor) -> Tensor:
        """[P]: where the expert that each place is to hold lies now; there, if it is one of its replicas, or none."""
        places = torch.arange(held.shape[0], device=held.device)
        replicas = self.logical_to_physical.masked_fill(~self._in_use(), -1)[held.clamp(min=0)]
        stays = (replicas == places.unsqueeze(1)).any(1) | (held < 0)
        return torch.where(stays, places, replicas[:, 0].long())

    def checked(self, placement: ExpertPlacement) -> ExpertPlacement:
        """The placement on the CPU, if it is one of this layer.

        Raises:
            TypeError, ValueError: it is none, has other sizes, more replicas of one expert than R, or contradicts
                itself.
        """
        expect_type("placement", placement, ExpertPlacement)
        held, experts, counts = (tensor.cpu() for tensor in placement)
        E, R = self.logical_to_physical.shape
        sizes = list(held.shape), list(experts.shape[:-1]), list(counts.shape)
        if sizes != ([self.load.shape[0]], [E], [E]):
            raise ValueError(f"placement has shapes {sizes}: expected [{self.load.shape[0]}], [{E}], [{E}]")
        if experts.shape[-1] > R:
            raise ValueError(f"placement has up to {experts.shape[-1]} replicas of an expert: expected {R}")
        in_use = torch.arange(experts.shape[-1]) < counts.unsqueeze(1)
        named = held[experts.clamp(0, held.shape[0] - 1).long()] == torch.arange(E).unsqueeze(1)
        in_places = int((held >= 0).sum())
        if int(counts.min()) < 1 or int(counts.sum()) != in_places or not bool(named[in_use].all()):
            raise ValueError(
                "placement contradicts itself: expected each place once, with the expert it holds"
            )
        return ExpertPlacement(held.long(), experts, counts)


def experts_at(balancing: ExpertBalancing | None, num_places: int, num_given: int) -> list[int]:
    """Of so many that were given in their order, E experts or P places, the one for each place.

    Experts are where they have moved to. Where nothing has been placed, replicas are those of the first experts.
    """
    usual = [place % num_given for place in range(num_places)]
    if balancing is None or num_given != balancing.num_experts:
        return usual
    return [usual[place] if expert < 0 else expert for place, expert in enumerate(balancing.held().tolist())]


def balancing_of_layer(
    sizes: tuple[int, int], moe_layer_idx: int, state: EplbState, **options: Tensor | None
) -> ExpertBalancing:
    """The rows of one layer with (E, P) = `sizes`; see `FusedMoE.set_eplb_state`."""
    for name, tensor, rank in zip(EplbState._fields, state, (2, 3, 2), strict=True):
        expect_type(name, tensor, Tensor)
        if tensor.dim() != rank:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected rank {rank}, layers first")
    found = state.logical_to_physical_map.shape[1], state.expert_load_view.shape[1]
    if found != sizes:
        raise ValueError(
            f"logical_to_physical_map and expert_load_view have {found} experts: expected {sizes}, logical and physical"
        )
    layers = min(tensor.shape[0] for tensor in state)
    is_number = isinstance(moe_layer_idx, int) and not isinstance(moe_layer_idx, bool)
    if not is_number or not 0 <= moe_layer_idx < layers:
        raise ValueError(f"moe_layer_idx={moe_layer_idx!r}: expected an int in [0, {layers})")
    return ExpertBalancing(*(tensor[moe_layer_idx] for tensor in state), **options)
