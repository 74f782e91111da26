"""A transformers MoE block as ours, around the weights it has."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from layers._checks import expect_type
from layers.config import MoEConfig
from layers.weights.layout import resolve
from layers.weights.slots import Slot, block_slots, same


def stock_config(block: nn.Module, config: Any) -> MoEConfig:
    """What the block computes: its config's, without the shared expert that its family may have elsewhere.

    Raises:
        TypeError, ValueError: `block` is no module, no config is given and the block has none, or it is not
            expressible.
    """
    expect_type("block", block, nn.Module)
    for holder in (block, *(getattr(block, name, None) for name in ("experts", "gate", "router"))):
        config = config if config is not None else getattr(holder, "config", None)
    if config is None:
        raise ValueError(f"block={type(block).__name__}: expected config=, the block holds none")
    has_shared = any(name.startswith("shared") for name, _ in block.named_children())
    ours = MoEConfig.from_hf(config)
    return ours if has_shared else replace(ours, shared_experts=None)


def share_weights(ours: Any, stock: nn.Module) -> None:
    """Fills `ours`, a `MoEBlock` on the meta device, with the tensors of `stock`.

    A parameter that is one tensor there is that tensor here, or a view of it; what lies in several is copied.

    Raises:
        ValueError: the block has tensors of another shape than its config says, lacks some, or has others.
    """
    tensors = {**dict(stock.named_parameters()), **dict(stock.named_buffers())}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    slots = block_slots(ours, resolve(ours, "", shapes))
    _check(type(stock).__name__, slots, shapes)
    for path in dict.fromkeys(slot.ours for slot in slots):
        owner, _, name = path.rpartition(".")
        holder = ours.get_submodule(owner)
        parts = [slot for slot in slots if slot.ours == path]
        setattr(holder, name, _joined(parts, tensors, getattr(holder, name)))
    experts = ours.experts
    if experts.e_score_correction_bias is not None:
        experts.e_score_correction_bias = experts.e_score_correction_bias.float()
    ours.train(stock.training)


def _check(kind: str, slots: list[Slot], shapes: dict[str, tuple[int, ...]]) -> None:
    expected = {slot.stored: slot.shape for slot in slots}
    pairs = [(name, shapes.get(name), shape) for name, shape in expected.items()]
    if wrong := [f"{name} is {found}, expected {shape}" for name, found, shape in pairs if found != shape]:
        raise ValueError(f"block={kind}: does not fit its config: {'; '.join(wrong)}")
    if unknown := sorted(shapes.keys() - expected.keys()):
        raise ValueError(f"block={kind}: has tensors that MoEBlock cannot express: {', '.join(unknown)}")


def _joined(parts: list[Slot], tensors: dict[str, Tensor], ours: Tensor) -> Tensor:
    first = tensors[parts[0].stored]
    is_parameter = isinstance(ours, nn.Parameter)
    if len(parts) == 1:
        if parts[0].of_stored is same and isinstance(first, nn.Parameter) == is_parameter:
            return first
        joined = parts[0].of_stored(first.data)
    else:
        joined = torch.empty(ours.shape, dtype=first.dtype, device=first.device)
        for slot in parts:
            slot.of_ours(joined).copy_(slot.of_stored(tensors[slot.stored].data))
    return nn.Parameter(joined, first.requires_grad) if is_parameter else joined
