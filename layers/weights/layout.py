"""Which MoE layers a checkpoint has, and which of the known names each of them uses."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from layers.weights.formats import LATENT, Format, MatrixNames, alternatives
from layers.weights.slots import block_slots

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every tensor of a checkpoint, by name."""


def join(layer: str, name: str) -> str:
    """The full name of `name`, which is relative to the block at `layer`."""
    if name.startswith("^"):
        return join(layer.rpartition(".")[0], name.removeprefix("^"))
    return f"{layer}.{name}" if layer and name else layer or name


def find_layers(shapes: Shapes) -> list[str]:
    """The names of all blocks with experts, "" for one whose tensors have no prefix; in the order of their numbers."""
    pattern = _experts_pattern()
    layers: set[str] = set()
    for key, shape in shapes.items():
        match = pattern.fullmatch(key)
        # A dense MLP has some of these names too, its matrices two dimensions.
        if match and (len(shape) == 3 or "experts" in match["name"]):
            layers.add((match["layer"] or "").removesuffix("."))
    return sorted(layers, key=_by_number)


@cache
def _experts_pattern() -> re.Pattern[str]:
    names = {name for matrices in alternatives("experts") for name in matrices.all()}
    options = "|".join(re.escape(name).replace(r"\{e\}", r"\d+") for name in sorted(names))
    return re.compile(rf"(?P<layer>(?:.*?\.)??)(?P<name>{options})")


def _by_number(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def assign_layers(blocks: list[str], layers: list[str]) -> dict[str, str]:
    """The checkpoint's layer for each of the module's blocks.

    By name, where blocks stand in decoder layers of the names that the checkpoint has; else in order, when there are as
    many of one as of the other.

    Raises:
        ValueError: neither tells.
    """
    places = {block: [layer for layer in layers if _same_place(block, layer)] for block in blocks}
    if all(len(found) == 1 for found in places.values()):
        named = {block: found[0] for block, found in places.items()}
        if len(set(named.values())) == len(named):
            return named
    if len(blocks) == len(layers):
        return dict(zip(blocks, layers, strict=True))
    raise ValueError(
        f"the module has {len(blocks)} MoE layers ({_some(blocks)}), the checkpoint {len(layers)} ({_some(layers)}):"
        " expected equal names or as many; prefix='name of a layer' selects one"
    )


def _same_place(block: str, layer: str) -> bool:
    parent = block.rpartition(".")[0]
    return block == layer or (bool(parent) and parent in (layer, layer.rpartition(".")[0]))


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:4])
    return shown + (", ..." if len(names) > 4 else "")


def resolve(block: Any, layer: str, shapes: Shapes) -> Format:
    """The names that the checkpoint's tensors of one layer have, the usual ones where there are none."""
    experts, shared = getattr(block, "experts", block), getattr(block, "shared_experts", None)
    config = experts.config
    shared_activation = config.activation if shared is None else shared.activation

    def first(field: str) -> str:
        options: list[str] = alternatives(field)
        return next((name for name in options if join(layer, name) in shapes), options[0])

    def found(names: MatrixNames) -> float:
        there = [any(join(layer, name.format(e=e)) in shapes for e in range(_LOOK)) for name in names.all()]
        return sum(there) / len(there)

    def found_and_fits(names: MatrixNames) -> tuple[float, bool]:
        return found(names), found(names) == 1 and _fits(experts, names, layer, shapes)

    of_experts = _options("experts", config.activation.is_gated, biases=config.has_bias)
    return Format(
        experts=max(of_experts, key=found_and_fits),
        gate=first("gate"),
        correction=first("correction"),
        shared=max(_options("shared", shared_activation.is_gated), key=found),
        shared_gate=first("shared_gate"),
        latent=LATENT,
    )


_LOOK = 8
"""Experts that are looked for: one of the first may be missing, and is then named as missing."""


def _options(field: str, gated: bool, *, biases: bool = False) -> list[MatrixNames]:
    return [names for names in alternatives(field) if names.gated == gated and (names.biases or not biases)]


def _fits(experts: Any, names: MatrixNames, layer: str, shapes: Shapes) -> bool:
    """Whether the shapes are those of the names' layout: names of stacked matrices have several."""
    if names.is_per_expert:
        return True
    slots = block_slots(experts, Format(experts=names))
    matrices = [slot for slot in slots if slot.ours in ("w13_weight", "w2_weight")]
    return all(shapes.get(join(layer, slot.stored), slot.shape) == slot.shape for slot in matrices)


def unexpected(block: Any, layer: str, names: Format, keys: set[str], known: set[str]) -> list[str]:
    """What the checkpoint has inside this layer's block that nothing takes."""
    experts = getattr(block, "experts", block)
    inside = _inside(layer, whole=experts is not block)
    found = {key for key in keys - known if inside.match(key)}
    of_any_rank = {
        name.format(e=e) for name in names.experts.all() for e in range(experts.config.num_experts)
    }
    if experts.config.has_bias:
        of_any_rank |= {f"{name}_bias" for name in names.experts.all()}
    return sorted(found - {join(layer, name) for name in of_any_rank})


def _inside(layer: str, *, whole: bool) -> re.Pattern[str]:
    """What belongs to the block: everything below its name, or its parts where it has none of its own."""
    last = layer.rpartition(".")[2]
    prefix = re.escape(f"{layer}." if layer else "")
    if not whole:
        return re.compile(rf"{prefix}experts\.")
    parts = r"(?:experts|gate|router|shared_\w+)\." if last.isdigit() else ""
    return re.compile(prefix + parts)
