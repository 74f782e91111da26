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
    holders = (
        block,
        *(child for name, child in block.named_children() if name in ("experts", "gate", "router")),
    )
    found = config or next(
        (held for each in holders if (held := getattr(each, "config", None)) is not None), None
    )
    if found is None:
        raise ValueError(f"block={type(block).__name__}: expected config=, the block holds none")
    config = MoEConfig.from_hf(found)
    has_shared = any(name.startswith("shared") for name, _ in block.named_children())
    return config if has_shared else replace(config, shared_experts=None)


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
    for name in dict.fromkeys(slot.ours for slot in slots):
        parts = [slot for slot in slots if slot.ours == name]
        owner = ours.get_submodule(name.rpartition(".")[0])
        setattr(
            owner, name.rpartition(".")[2], _joined(parts, tensors, getattr(owner, name.rpartition(".")[2]))
        )
    _settle(ours, stock)


def _check(kind: str, slots: list[Slot], shapes: dict[str, tuple[int, ...]]) -> None:
    wrong = {slot.stored: f"{slot.stored} is {shapes.get(slot.stored)}, expected {slot.shape}"
             for slot in slots if shapes.get(slot.stored) != slot.shape}  # fmt: skip
    if wrong:
        raise ValueError(f"block={kind}: does not fit its config: {'; '.join(wrong.values())}")
    if unknown := sorted(shapes.keys() - {slot.stored for slot in slots}):
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


def _settle(ours: Any, stock: nn.Module) -> None:
    experts = ours.experts
    if experts.e_score_correction_bias is not None:
        experts.e_score_correction_bias = experts.e_score_correction_bias.float()
    ours.train(stock.training)
