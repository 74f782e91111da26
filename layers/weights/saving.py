"""A module's weights under the names and in the layout of a model family's checkpoints."""

from typing import Any

import torch
from torch import Tensor, nn

from layers._checks import expect_type
from layers.families import family_config
from layers.fused_moe import FusedMoE
from layers.weights.expert_loader import is_distributed
from layers.weights.formats import Format, format_of
from layers.weights.layout import join
from layers.weights.loading import beside_layers, moe_layers, tensors_here
from layers.weights.slots import Slot, block_slots, expect_all_have_slots, same


def checkpoint_state_dict(module: nn.Module, config: Any, *, prefix: str = "") -> dict[str, Tensor]:
    """What `load_checkpoint` loads, ready for `safetensors.torch.save_file`: byte for byte what the family writes.

    Args:
        module: as for `load_checkpoint`, with all experts and whole ones.
        config: of a transformers model; its `model_type` chooses the names.
        prefix: put before every name. A lone block is the one of a decoder layer: "model.layers.3".

    Returns:
        Contiguous tensors by name: views of the parameters where these lie as the checkpoint's tensors do, else copies.
        The selection bias is float32, as in the layer.

    Raises:
        TypeError, ValueError: no MoE layer in the module, one that holds a part of the experts or of each, one that
            the family has no names for, a `model_type` that `MoEConfig.from_hf` does not take, or a DTensor: of
            `fully_shard`, say. A style of `layers.parallel` on one rank leaves experts whole.

    Example:
        >>> save_file(checkpoint_state_dict(model, config), folder / "model.safetensors", {"format": "pt"})
    """
    expect_type("prefix", prefix, str)
    family = family_config(config).model_type
    names = format_of(config.model_type, family)
    blocks = moe_layers(module)
    beside = beside_layers(module, blocks)
    saved = {tied[0]: _plain(tied[0], tensor).contiguous() for tied, tensor in beside.items()}
    for name, block in blocks.items():
        _check(name or "module", block, names, family)
        layer = join(_decoder_layer(name, block), names.block)
        stored = {join(layer, each): tensor for each, tensor in _stored_tensors(block, names).items()}
        if twice := sorted(saved.keys() & stored.keys()):
            raise ValueError(f"{name}: another layer is saved as {twice[0]} too: expected numbers for names")
        saved |= stored
    return {join(prefix, name): tensor for name, tensor in saved.items()}


def _check(name: str, block: nn.Module, names: Format, family: str) -> None:
    experts: Any = getattr(block, "experts", block)
    shared: Any = getattr(block, "shared_experts", None)
    if experts.expert_map is not None or experts.shard.size > 1:
        raise ValueError(f"{name} holds a part of the experts: expected expert_map=None and no shard")
    pairs = [(experts.config.activation, names.experts)]
    pairs += [] if shared is None else [(shared.activation, names.shared)]
    for activation, matrices in pairs:
        if activation.is_gated != matrices.gated:
            has = "a gate" if matrices.gated else "none"
            raise ValueError(f"{name} has activation {activation.name!r}: experts of {family!r} have {has}")
    if experts.config.has_bias and not names.experts.biases:
        raise ValueError(f"{name} has_bias=True: experts of {family!r} have no biases")


def _decoder_layer(name: str, block: nn.Module) -> str:
    """The name of the decoder layer around a block: numbers are layers, other names are blocks in them."""
    parts = name.split(".") if name else []
    if isinstance(block, FusedMoE) and parts:
        parts.pop()
    if parts and not parts[-1].isdigit():
        parts.pop()
    return ".".join(parts)


def _plain(name: str, tensor: Tensor) -> Tensor:
    if is_distributed(tensor):
        raise TypeError(f"{name} is a DTensor: expected plain tensors, of a module that is not sharded")
    return tensor.detach()


def _stored_tensors(block: nn.Module, names: Format) -> dict[str, Tensor]:
    ours = {name: _plain(name, tensor) for name, tensor in tensors_here(block).items()}
    slots = block_slots(block, names)
    expect_all_have_slots(ours, slots)
    return {
        slot.stored: _stored(slot, slot.of_ours(ours[slot.ours])) for slot in slots
    }  # one each in a whole layer


def _stored(slot: Slot, part: Tensor) -> Tensor:
    if slot.of_stored is same:
        return part.contiguous()
    stored = torch.empty(slot.shape, dtype=part.dtype, device=part.device)
    slot.of_stored(stored).copy_(part)
    return stored
