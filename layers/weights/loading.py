"""Whole checkpoints into modules and back, in the format of their model family."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layers._checks import expect_type
from layers.config import MoEConfig
from layers.families import moe_config
from layers.fused_moe import FusedMoE
from layers.moe_block import MoEBlock
from layers.weights.expert_loader import is_distributed, part_here
from layers.weights.files import inside
from layers.weights.layout import assign_layers, find_layers, join, resolve, unexpected
from layers.weights.slots import Slot, block_slots, expect_all_have_slots, same
from layers.weights.sources import Copy, Source, open_source
from moe_ops import RoutingConfig

_SHOWN = 100


@dataclass
class _Plan:
    """What goes where, and everything that is wrong with the checkpoint."""

    copies: list[Copy] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshaped: dict[str, str] = field(default_factory=dict)

    def add(self, slot: Slot, stored: str, ours: Tensor, source: Source) -> None:
        """Takes one slot in, or what keeps it from being filled."""
        if stored in self.known and stored not in source.shapes:
            return
        self.known.add(stored)
        if stored not in source.shapes:
            self.missing.append(stored)
        elif problem := _problem(slot, ours, source.shapes[stored], source.dtypes[stored]):
            self.misshaped[stored] = f"{stored} {problem}"
        else:
            self.copies.append((stored, slot.of_stored, slot.of_ours(ours)))

    def check(self) -> None:
        """Raises ValueError with all problems."""
        problems = (
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of wrong shape or dtype", list(self.misshaped.values())),
        )
        lines = [_listed(kind, names) for kind, names in problems if names]
        if lines:
            raise ValueError(
                "the checkpoint does not fit the module, which is unchanged\n" + "\n".join(lines)
            )


def _problem(slot: Slot, ours: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    if shape != slot.shape:
        return f"has shape {shape}: expected {slot.shape}"
    is_kept_wide = slot.ours.endswith("e_score_correction_bias") and dtype in (torch.bfloat16, torch.float16)
    if dtype != ours.dtype and not is_kept_wide:
        return f"has dtype {dtype}: expected {ours.dtype}, that of {slot.ours}"
    return None


def _listed(kind: str, names: list[str]) -> str:
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return "\n".join([f"  {kind} ({len(names)}):", *(f"    {name}" for name in names[:_SHOWN] + more)])


def load_checkpoint(
    module: nn.Module,
    path_or_state_dict: str | os.PathLike[str] | Mapping[str, Tensor],
    *,
    prefix: str = "",
    progress: bool = True,
) -> None:
    """Fills the module's MoE layers, and whatever else it holds, from a checkpoint of a model family.

    Everything is checked before the first byte is written: files, names, shapes and dtypes. Tensors go from the file
    to their place one by one, so that there is never a second copy of the weights.

    Args:
        module: a `MoEBlock` or a `FusedMoE`, or a module with some inside. Layers are found by the name of their
            decoder layer, or in order when there are as many as in the checkpoint. What a module has beside them is
            loaded under its own names. Experts that a style of `layers.parallel` has shared among ranks get what is
            theirs here; every rank reads it for itself.
        path_or_state_dict: a folder with safetensors, one file or an index of shards as `save_pretrained` writes them;
            such a file; or tensors by name. Names are those of any family that `MoEConfig.from_hf` takes, on disk or in
            memory. The config.json of a folder must describe the module's layers, when transformers is installed.
        prefix: reads only what is below this name, as in "model.layers.3".
        progress: shows a progress bar, when tqdm is installed.

    Raises:
        TypeError, ValueError: no MoE layer on either side; a file is no safetensors, corrupt, truncated or outside the
            folder; another family's checkpoint; or names that are missing or unexpected and tensors of another shape
            or dtype, all of them listed. The module is unchanged.

    Example:
        >>> config = MoEConfig.from_hf(AutoConfig.from_pretrained(folder))
        >>> block = MoEBlock(config, dtype=torch.bfloat16)
        >>> load_checkpoint(block, folder, prefix="model.layers.3")
    """
    expect_type("prefix", prefix, str)
    blocks = moe_layers(module)
    _check_module(module, blocks)
    source = open_source(path_or_state_dict, prefix)
    if isinstance(path_or_state_dict, str | os.PathLike):  # config.json is looked for in a folder only
        _check_family(Path(path_or_state_dict), blocks)
    plan = _plan(module, blocks, source)
    plan.check()
    with torch.no_grad():
        _copy_all(plan, source, progress)
        for block in blocks.values():
            _clear_repeated_bias(getattr(block, "experts", block))


def moe_layers(module: nn.Module) -> dict[str, Any]:
    """The `MoEBlock`s of a module and the `FusedMoE`s outside of one, by name. Raises ValueError without any."""
    expect_type("module", module, nn.Module)
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(child, MoEBlock | FusedMoE) and not is_inside:
            found[name] = child
    if not found:
        raise ValueError(f"module={type(module).__name__}: expected a MoEBlock or FusedMoE in it")
    return found


def beside_layers(module: nn.Module, blocks: dict[str, Any]) -> dict[tuple[str, ...], Tensor]:
    """The parameters and buffers of a module that are in none of its MoE layers, by name; tied ones have several."""
    prefixes = tuple(f"{block}." if block else "" for block in blocks)
    inside = {id(each) for block in blocks.values() for each in block.state_dict(keep_vars=True).values()}
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not name.startswith(prefixes) and id(tensor) not in inside:  # a layer may have two names
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return {tuple(names): tensor for tensor, names in found.values()}


def _check_module(module: nn.Module, blocks: dict[str, Any]) -> None:
    shared = {id(tensor) for block in blocks.values() for tensor in _on_ranks(block).values()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device: expected memory to load into, as to_empty() gives it"
            )
        if is_distributed(tensor) and id(tensor) not in shared:
            raise TypeError(f"{name} is a DTensor: expected plain tensors, load before the module is sharded")


def _on_ranks(block: Any) -> dict[str, Any]:
    """DTensors of experts that a style of `layers.parallel` shared among ranks, and that nothing has split further."""
    experts = getattr(block, "experts", block)
    prefix = "" if experts is block else "experts."
    if experts.parallel is None:
        return {}
    own = ((f"{prefix}{name}", each) for name, each in experts.named_parameters(recurse=False))
    return {name: each for name, each in own if is_distributed(each) and each.device_mesh.ndim == 1}


def tensors_here(block: Any) -> dict[str, Tensor]:
    """A block's state dict; of experts shared among ranks the parts that are here, gate rows followed by up rows."""
    ours = block.state_dict(keep_vars=True)
    for name, parameter in _on_ranks(block).items():
        ours[name] = part_here(parameter, 2 if name.endswith("bias") else 3)
    return ours


def _plan(module: nn.Module, blocks: dict[str, Any], source: Source) -> _Plan:
    layers = find_layers(source.shapes)
    if not layers:
        names = ", ".join(sorted(source.shapes)[:5])
        raise ValueError(f"the checkpoint has no MoE layer of a known family; it begins with {names}")
    plan, keys = _Plan(), set(source.shapes)
    layer_of = assign_layers(list(blocks), layers)
    for name, block in blocks.items():
        layer = layer_of[name]
        names = resolve(block, layer, source.shapes)
        ours, slots = tensors_here(block), block_slots(block, names)
        expect_all_have_slots(ours, slots)
        for slot in slots:
            plan.add(slot, join(layer, slot.stored), ours[slot.ours].data, source)
        strays = unexpected(block, layer, names, keys, plan.known)
        plan.known.update(strays)
        plan.unexpected.extend(strays)
    _plan_others(plan, module, blocks, source)
    return plan


def _plan_others(plan: _Plan, module: nn.Module, blocks: dict[str, Any], source: Source) -> None:
    """Slots for what a module has beside its MoE layers; then it is a model, and every stored tensor has a place."""
    others = beside_layers(module, blocks)
    for names, tensor in others.items():
        stored = next((name for name in names if name in source.shapes), names[0])
        plan.add(Slot(stored, stored, tuple(tensor.shape), same, same), stored, tensor.data, source)
        plan.known.update(names)
    if others:
        ignored = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
        strays = sorted(set(source.shapes) - plan.known)
        plan.unexpected.extend(name for name in strays if not any(re.search(each, name) for each in ignored))


def _copy_all(plan: _Plan, source: Source, progress: bool) -> None:
    total = sum(target.nbytes for _, _, target in plan.copies)
    with _bar(total, progress) as advance:
        for done in source.copy(plan.copies):
            advance(done)


@contextmanager
def _bar(total: int, progress: bool) -> Iterator[Callable[[int], object]]:
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda done: None
    else:
        options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "desc": "loading weights"}
        with tqdm(total=total, disable=not progress, **options) as bar:
            yield bar.update


def _clear_repeated_bias(experts: FusedMoE) -> None:
    """The ranks' outputs are summed, and w2's bias counts once. A DTensor is whole on all, and computed with on one."""
    if experts.w2_bias is not None and experts.shard.rank > 0 and not _on_ranks(experts):
        experts.w2_bias.zero_()


def _check_family(folder: Path, blocks: dict[str, Any]) -> None:
    """Whether the config beside the weights describes the module's layers."""
    if not (folder / "config.json").is_file():
        return
    try:
        from transformers import AutoConfig
    except ImportError:
        return
    file = inside(folder, "config.json")
    try:
        described = moe_config(
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )
    except Exception as error:  # a broken file raises whatever transformers makes of it
        raise ValueError(f"{file}: no family that a MoE layer can be made of: {error}") from error
    for name, block in blocks.items():
        if difference := _difference(described, block.config):
            raise ValueError(f"{file} describes another layer than the module's {name!r}: {difference}")


def _difference(described: MoEConfig, ours: MoEConfig) -> str | None:
    """The first option that makes another layer of the same weights."""
    sizes = ("num_experts", "top_k", "hidden_size", "intermediate_size", "activation", "has_bias")
    routing = [each.name for each in fields(RoutingConfig) if each.compare and each.name != "renorm_eps"]
    pairs = [(name, getattr(described, name), getattr(ours, name)) for name in sizes]
    pairs += [(name, getattr(described.routing, name), getattr(ours.routing, name)) for name in routing]
    pairs.append(("weight_on", described.router.weight_on, ours.router.weight_on))
    if described.shared_experts is not None and ours.shared_experts is not None:  # else their names tell
        pairs.append(("shared activation", _shared_activation(described), _shared_activation(ours)))
        combinations = described.shared_experts.combination, ours.shared_experts.combination
        pairs.append(("shared combination", *combinations))
    return next((f"{name} is {a!r} there and {b!r} here" for name, a, b in pairs if a != b), None)


def _shared_activation(config: Any) -> Any:
    return config.shared_experts.activation or config.activation
