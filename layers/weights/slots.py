"""Which part of which checkpoint tensor belongs to which part of a block's tensors.

One list of slots serves loading, saving and sharing: each pairs a view of a stored tensor with a view of one of ours.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layers.weights.expert_loader import gate_or_up
from layers.weights.formats import Format, MatrixNames
from layers.weights.shard import WHOLE, TensorShard

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


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Gate, up and down of routed experts or of a shared one."""

    names: MatrixNames
    gate_up: str
    down: str
    hidden_size: int
    intermediate_size: int
    num_experts: int | None  # None for a shared expert
    is_gated: bool
    interleaved: bool
    shard: TensorShard
    experts: tuple[_Expert, ...]


def same(tensor: Tensor) -> Tensor:
    """The whole of it."""
    return tensor


def block_slots(block: Any, names: Format) -> list[Slot]:
    """The slots of a `MoEBlock`, or of a `FusedMoE` inside a block of these names."""
    experts = getattr(block, "experts", block)
    prefix = "" if experts is block else "experts."
    slots = [*_expert_slots(experts, names, prefix), *_correction_slots(experts, names, prefix)]
    if experts is not block:
        slots.extend(_gate_slots(block, names))
        if block.shared_experts is not None:
            slots.extend(_shared_slots(block, names))
    return slots


def expert_names(names: MatrixNames, num_experts: int) -> set[str]:
    """The names of all experts' matrices and stacked biases, of other ranks' too."""
    if names.is_per_expert:
        return {name.format(e=expert) for name in names.all() for expert in range(num_experts)}
    return {*names.all(), *(f"{name}_bias" for name in names.all())}


def _gate_slots(block: Any, names: Format) -> Iterator[Slot]:
    E, H = block.gate.weight.shape
    yield Slot("gate.weight", names.gate, (E, H), same, same)
    if block.gate.bias is not None:
        yield Slot("gate.bias", names.gate_bias, (E,), same, same)


def _correction_slots(experts: Any, names: Format, prefix: str) -> Iterator[Slot]:
    if experts.e_score_correction_bias is None:
        return
    E = experts.config.num_experts
    ours = f"{prefix}e_score_correction_bias"
    if names.correction_is_row:
        yield Slot(ours, names.correction, (1, E), lambda row: row[0], same)
    else:
        yield Slot(ours, names.correction, (E,), same, same)


def _shared_slots(block: Any, names: Format) -> Iterator[Slot]:
    shared = block.shared_experts
    yield from _matrix_slots(
        _Matrices(
            names.shared, "shared_experts.gate_up_proj.weight", "shared_experts.down_proj.weight",
            block.config.hidden_size, shared.down_proj.in_features, None, shared.activation.is_gated,
            shared.activation.interleaved, WHOLE, (_Expert(None, same, same),),
        )
    )  # fmt: skip
    if shared.gate is not None:
        H = block.config.hidden_size
        yield Slot("shared_experts.gate.weight", names.shared_gate, (1, H), same, same)


def _expert_slots(experts: Any, names: Format, prefix: str) -> Iterator[Slot]:
    config = experts.config
    matrices = _Matrices(
        names.experts, f"{prefix}w13_weight", f"{prefix}w2_weight",
        config.hidden_size, config.intermediate_size, config.num_experts, config.activation.is_gated,
        config.activation.interleaved, experts.shard, _experts_of(experts, names.experts),
    )  # fmt: skip
    yield from _matrix_slots(matrices)
    if experts.w13_bias is not None:
        yield from _bias_slots(matrices, f"{prefix}w13_bias", f"{prefix}w2_bias")


def _experts_of(experts: Any, names: MatrixNames) -> tuple[_Expert, ...]:
    if experts.expert_map is None and not names.is_per_expert:
        return (_Expert(None, same, same),)
    places = range(experts.config.num_experts) if experts.expert_map is None else experts.expert_map.tolist()
    return tuple(
        _Expert(number, same if names.is_per_expert else _pick(number), _pick(local))
        for number, local in enumerate(places)
        if local >= 0
    )


def _pick(index: int) -> View:
    return lambda tensor: tensor[index]


def _matrix_slots(matrices: _Matrices) -> Iterator[Slot]:
    names, H, I = matrices.names, matrices.hidden_size, matrices.intermediate_size
    lift = _lift(matrices, transposed=names.transposed)
    lift_down = _lift(matrices, transposed=names.transposed or names.flat)
    for expert in matrices.experts:
        for name, rows, of_stored, of_ours in _gate_up_parts(matrices, expert):
            shape = _stored_shape(matrices, (rows, H), names.transposed)
            yield Slot(
                matrices.gate_up, _numbered(name, expert), shape,
                _chain(lift, expert.of_stored, of_stored), _chain(expert.of_ours, of_ours),
            )  # fmt: skip
        shape = _stored_shape(matrices, (H, I), names.transposed or names.flat)
        yield Slot(
            matrices.down, _numbered(names.down, expert), shape,
            _chain(lift_down, expert.of_stored, _part(matrices.shard, -1)), expert.of_ours,
        )  # fmt: skip


def _gate_up_parts(matrices: _Matrices, expert: _Expert) -> Iterator[tuple[str, int, View, View]]:
    """(name, rows on disk, part of a stored matrix, part of ours) for gate and up, together where they lie alike."""
    names, I = matrices.names, matrices.intermediate_size
    stored_interleaved = matrices.interleaved if names.interleaved is None else names.interleaved
    whole, rows = _part(matrices.shard, -2), 2 * I if matrices.is_gated else I
    if not matrices.is_gated:
        yield names.gate_up[0], rows, whole, same
    elif len(names.gate_up) == 2:
        for is_up, name in enumerate(names.gate_up):
            yield name, I, whole, _half(bool(is_up), matrices.interleaved, -2)
    elif stored_interleaved == matrices.interleaved and matrices.shard.size == 1:
        yield names.gate_up[0], rows, same, same
    else:
        for is_up in (False, True):
            of_stored = _chain(_half(is_up, stored_interleaved, -2), whole)
            yield names.gate_up[0], rows, of_stored, _half(is_up, matrices.interleaved, -2)


def _bias_slots(matrices: _Matrices, gate_up: str, down: str) -> Iterator[Slot]:
    names, E, shard = matrices.names, matrices.num_experts or 1, matrices.shard
    gate_up_shape = (E, 2 * matrices.intermediate_size if matrices.is_gated else matrices.intermediate_size)
    halves = [same]
    if matrices.is_gated and shard.size > 1:
        halves = [_half(is_up, matrices.interleaved, -1) for is_up in (False, True)]
    for expert in matrices.experts:
        for half in halves:
            of_stored = _chain(expert.of_stored, half, _part(shard, -1))
            of_ours = _chain(expert.of_ours, half)
            yield Slot(gate_up, f"{names.gate_up[0]}_bias", gate_up_shape, of_stored, of_ours)
        yield Slot(down, f"{names.down}_bias", (E, matrices.hidden_size), expert.of_stored, expert.of_ours)


def _stored_shape(matrices: _Matrices, shape: tuple[int, int], transposed: bool) -> tuple[int, ...]:
    """What the checkpoint has for one matrix [rows, columns] of ours."""
    if transposed:
        shape = (shape[1], shape[0])
    E = matrices.num_experts
    if E is None or matrices.names.is_per_expert:
        return shape
    return (E * shape[0], shape[1]) if matrices.names.flat else (E, *shape)


def _lift(matrices: _Matrices, *, transposed: bool) -> View:
    """Stacks of experts out of flat ones, and rows where columns were."""
    flat, E = matrices.names.flat, matrices.num_experts or 1

    def lift(stored: Tensor) -> Tensor:
        stacked = stored.unflatten(0, (E, -1)) if flat else stored
        return stacked.mT if transposed else stacked

    return lift if flat or transposed else same


def _numbered(name: str, expert: _Expert) -> str:
    return name if expert.number is None else name.format(e=expert.number)


def _part(shard: TensorShard, dim: int) -> View:
    return same if shard.size == 1 else lambda tensor: shard.of(tensor, dim)


def _half(is_up: bool, interleaved: bool, dim: int) -> View:
    return lambda tensor: gate_or_up(tensor, dim, is_up=is_up, interleaved=interleaved)


def _chain(*views: View) -> View:
    steps = [view for view in views if view is not same]
    if len(steps) < 2:
        return steps[0] if steps else same

    def chained(tensor: Tensor) -> Tensor:
        for step in steps:
            tensor = step(tensor)
        return tensor

    return chained
