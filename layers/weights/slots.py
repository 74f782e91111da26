"""Which part of which checkpoint tensor belongs to which part of a block's tensors.

One list of slots serves loading, saving and sharing: each pairs a view of a stored tensor with a view of one of ours.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor

from layers.config import gate_up_size
from layers.weights.expert_loader import gate_or_up
from layers.weights.formats import Format, MatrixNames
from layers.weights.shard import WHOLE, TensorShard
from moe_ops import Activation

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Slot:
    """`of_ours(our tensor)` holds `of_stored(the stored tensor)`.

    Attributes:
        ours: name of the parameter or buffer in the block.
        stored: name in the checkpoint, relative to the block.
        shape: of the whole stored tensor.
        of_stored, of_ours: views of one shape.
    """

    ours: str
    stored: str
    shape: tuple[int, ...]
    of_stored: View
    of_ours: View


@dataclass(frozen=True, slots=True)
class _Expert:
    """One expert, or all at once: what is put for "{e}", and the expert's part of a stacked tensor and of ours."""

    number: int | None
    of_stored: View
    of_ours: View

    def named(self, name: str) -> str:
        return name if self.number is None else name.format(e=self.number)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Gate, up and down of routed experts or of a shared one: names on disk, names of ours, sizes."""

    names: MatrixNames
    gate_up: str
    down: str
    hidden_size: int
    intermediate_size: int
    activation: Activation
    num_experts: int | None = None  # None for a shared expert
    shard: TensorShard = WHOLE

    def stored(self, rows: int, columns: int, *, transposed: bool) -> tuple[tuple[int, ...], View]:
        """The shape that the checkpoint has for matrices of ours, and the view of it that lies like ours."""
        shape = (columns, rows) if transposed else (rows, columns)
        turned = _turned if transposed else same
        E = self.num_experts
        if E is None or self.names.is_per_expert:
            return shape, turned
        if self.names.flat:
            return (E * shape[0], shape[1]), _chain(lambda flat: flat.unflatten(0, (E, -1)), turned)
        return (E, *shape), turned


def same(tensor: Tensor) -> Tensor:
    """The whole of it."""
    return tensor


def block_slots(block: Any, names: Format) -> list[Slot]:
    """The slots of a `MoEBlock`, or of a `FusedMoE` inside a block of these names.

    Raises ValueError for experts that are padded or have moved: checkpoints have neither.
    """
    experts = getattr(block, "experts", block)
    if (padded := experts.config.experts.padded_size) is not None:
        raise ValueError(
            f"experts.padded_size={padded}: expected None; `FusedMoE.weight_loader` fills padded experts"
        )
    prefix = "" if experts is block else "experts."
    slots = [*_expert_slots(experts, names.experts, prefix), *_correction_slots(experts, names, prefix)]
    if experts is not block:
        slots.extend(_gate_slots(block, names))
        slots.extend(_latent_slots(block, names))
        if block.shared_experts is not None:
            slots.extend(_shared_slots(block, names))
    return slots


_OF_EXPERTS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
"""A rank may have nothing but places for replicas."""


def expect_all_have_slots(ours: dict[str, Tensor], slots: list[Slot]) -> None:
    """Raises ValueError for a tensor that no checkpoint has: scales, say, which must not be left out without a word."""
    filled = {slot.ours for slot in slots}
    unfilled = (name for name in ours if name not in filled)
    others = [name for name in unfilled if name.removeprefix("experts.") not in _OF_EXPERTS]
    if others:
        elsewhere = "weight_loader loads scales, load_state_dict others, and lora is None meanwhile"
        raise ValueError(f"{', '.join(others)}: not part of a checkpoint's format; {elsewhere}")


def _expert_slots(experts: Any, names: MatrixNames, prefix: str) -> Iterator[Slot]:
    config = experts.config
    matrices = _Matrices(
        names, f"{prefix}w13_weight", f"{prefix}w2_weight", config.expert_hidden_size, config.intermediate_size,
        config.activation, config.num_experts, experts.shard,
    )  # fmt: skip
    places = _experts_of(experts, names)
    yield from _matrix_slots(matrices, places)
    if experts.w13_bias is not None:
        yield from _bias_slots(matrices, places, prefix)


def _experts_of(experts: Any, names: MatrixNames) -> list[_Expert]:
    if experts.balancing is not None and not experts.balancing.is_initial():
        raise ValueError(
            "experts have moved: expected a checkpoint to be loaded or saved while expert e is at place e, without "
            "replicas, as in `EplbState.initial`"
        )
    # Places past these are for replicas, which no checkpoint has.
    num_experts, has_replicas = experts.config.num_experts, experts.config.num_redundant_experts > 0
    if experts.expert_map is None and not names.is_per_expert:
        return [_Expert(None, same, _first(num_experts) if has_replicas else same)]
    places = range(num_experts) if experts.expert_map is None else experts.expert_map.tolist()[:num_experts]
    return [
        _Expert(number, same if names.is_per_expert else _pick(number), _pick(local))
        for number, local in enumerate(places)
        if local >= 0
    ]


def _matrix_slots(matrices: _Matrices, experts: list[_Expert]) -> Iterator[Slot]:
    names, H, I = matrices.names, matrices.hidden_size, matrices.intermediate_size
    rows = I if len(names.gate_up) == 2 else gate_up_size(I, matrices.activation)
    gate_up_shape, lift_gate_up = matrices.stored(rows, H, transposed=names.transposed)
    down_shape, lift_down = matrices.stored(H, I, transposed=names.transposed or names.flat)
    for expert in experts:
        for name, of_stored, of_ours in _gate_up_parts(matrices, -2):
            of_stored = _chain(lift_gate_up, expert.of_stored, of_stored)
            of_ours = _chain(expert.of_ours, of_ours)
            yield Slot(matrices.gate_up, expert.named(name), gate_up_shape, of_stored, of_ours)
        of_stored = _chain(lift_down, expert.of_stored, _part(matrices.shard, -1))
        yield Slot(matrices.down, expert.named(names.down), down_shape, of_stored, expert.of_ours)


def _bias_slots(matrices: _Matrices, experts: list[_Expert], prefix: str) -> Iterator[Slot]:
    names, E, H = matrices.names, matrices.num_experts or 1, matrices.hidden_size
    rows = gate_up_size(matrices.intermediate_size, matrices.activation)
    for expert in experts:
        for name, of_stored, of_ours in _gate_up_parts(matrices, -1):
            of_stored, of_ours = _chain(expert.of_stored, of_stored), _chain(expert.of_ours, of_ours)
            yield Slot(f"{prefix}w13_bias", f"{name}_bias", (E, rows), of_stored, of_ours)
        yield Slot(f"{prefix}w2_bias", f"{names.down}_bias", (E, H), expert.of_stored, expert.of_ours)


def _gate_up_parts(matrices: _Matrices, dim: int) -> Iterator[tuple[str, View, View]]:
    """(name, part of what is stored, part of ours) for gate and up, together where they lie alike."""
    names, activation, shard = matrices.names.gate_up, matrices.activation, matrices.shard
    part = _part(shard, dim)
    if not activation.is_gated or (len(names) == 1 and shard.size == 1):
        yield names[0], part, same
        return
    for is_up in (False, True):
        half = _half(is_up, activation.interleaved, dim)
        if len(names) == 2:
            yield names[is_up], part, half
        else:
            yield names[0], _chain(half, part), half


def _correction_slots(experts: Any, names: Format, prefix: str) -> Iterator[Slot]:
    if experts.e_score_correction_bias is None:
        return
    E = experts.config.router_size
    shape, of_stored = ((1, E), _pick(0)) if names.correction_is_row else ((E,), same)
    yield Slot(f"{prefix}e_score_correction_bias", names.correction, shape, of_stored, same)


def _gate_slots(block: Any, names: Format) -> Iterator[Slot]:
    E, H = block.gate.weight.shape
    yield Slot("gate.weight", names.gate, (E, H), same, same)
    if block.gate.bias is not None:
        yield Slot("gate.bias", names.gate_bias, (E,), same, same)


def _latent_slots(block: Any, names: Format) -> Iterator[Slot]:
    H, latent = block.config.hidden_size, block.config.experts.latent_size
    if latent is not None and names.latent is not None:
        into, back = names.latent
        yield Slot("routed_input_transform.weight", into, (latent, H), same, same)
        yield Slot("routed_output_transform.weight", back, (H, latent), same, same)


def _shared_slots(block: Any, names: Format) -> Iterator[Slot]:
    shared, H = block.shared_experts, block.config.hidden_size
    matrices = _Matrices(
        names.shared, "shared_experts.gate_up_proj.weight", "shared_experts.down_proj.weight",
        H, shared.down_proj.in_features, shared.activation,
    )  # fmt: skip
    yield from _matrix_slots(matrices, [_Expert(None, same, same)])
    if shared.gate is not None:
        yield Slot("shared_experts.gate.weight", names.shared_gate, (1, H), same, same)


def _turned(tensor: Tensor) -> Tensor:
    return tensor.mT


def _pick(index: int) -> View:
    return lambda tensor: tensor[index]


def _first(count: int) -> View:
    return lambda tensor: tensor[:count]


def _part(shard: TensorShard, dim: int) -> View:
    return same if shard.size == 1 else lambda tensor: shard.of(tensor, dim)


def _half(is_up: bool, interleaved: bool, dim: int) -> View:
    return lambda tensor: gate_or_up(tensor, dim, is_up=is_up, interleaved=interleaved)


def _chain(*views: View) -> View:
    steps = [view for view in views if view is not same]
    if len(steps) < 2:
        return steps[0] if steps else same
    return lambda tensor: reduce(lambda seen, step: step(seen), steps, tensor)
