"""Slots whose expert id is out of range: our operators leave them out, so a layer that may have any must do so too.

In rows behind those of the last expert nothing is multiplied. But `weight[-1]` is the last expert's, a clamp or a
remainder makes an id another expert's, and a `where` on ids puts in the place of what experts give whatever it reads.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import cut
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.layer import Experts
from inductor_passes.raising.products import Product, sorted_places
from inductor_passes.raising.strays import Run, stray_runs
from inductor_passes.raising.sums import is_zero
from inductor_passes.raising.views_of_rows import args, aten, indexed, is_cast, is_view


class _Mask(NamedTuple):
    """Where zeros are taken on the way into the sum."""

    mask: Node
    value: bool
    """What it is there."""
    is_by_row: bool
    """Whether it lies in the order of rows; else in that of slots."""


def expect_dropped(layer: Experts) -> None:
    """Refuses a layer that has a slot in its sum whose id is out of range."""
    runs = stray_runs(layer.indices)
    masks = _masks(layer) if runs else []
    for run in runs:
        slots = _slots(layer, run)
        experts = None if slots is None else _experts(layer.parts.second.product, run, slots)
        ids = run.ids.flatten()
        if slots is None or experts is None or not bool((experts == ids)[~run.is_stray].all()):
            continue  # nobody means ids that PyTorch does not take, or with which ids in range are another expert's
        read = run.is_stray & (experts >= 0)
        for mask in masks:
            read &= ~_is_hidden(mask, run, slots)
        if bool(read.any()):
            slot = int(read.nonzero()[0])
            reason = f"expert ids may be out of range, and {int(ids[slot])} is read as {int(experts[slot])}"
            raise Refusal(layer.parts.second.product.node, reason)


def _are_by_expert(layer: Experts) -> bool:
    """Whether rows lie in the order of experts, else in that of slots: by choice have been refused with their sum."""
    first, indices = layer.parts.firsts[0].product, layer.indices
    return first.kind == "grouped" or not indices.are_experts(first.experts, indices.slot_order)


def _slots(layer: Experts, run: Run) -> Tensor | None:
    """[S]: the slot of each row."""
    num_slots = run.ids.numel()
    if not _are_by_expert(layer):
        return torch.arange(num_slots)
    slots = run.value(sorted_places(layer.parts.firsts[0].product, layer.indices)[0])
    is_whole = slots is not None and bool(((slots >= 0) & (slots < num_slots)).all())
    return slots if is_whole else None


def _experts(product: Product, run: Run, slots: Tensor) -> Tensor | None:
    """[S]: whose weights PyTorch reads for each slot, -1 where it reads none."""
    value, number = run.value(product.experts), product.num_experts
    if value is None:
        return None
    if product.kind == "grouped":
        of_rows = torch.searchsorted(value.long(), torch.arange(len(slots)), right=True)
        read = torch.where(of_rows < number, of_rows, -1)
    else:
        experts = value.flatten()
        read = torch.where((-number <= experts) & (experts < number), experts % number, -1)
    return _by_slot(read, slots, -1)


def _by_slot(of_rows: Tensor, slots: Tensor, other: int) -> Tensor:
    return torch.full_like(of_rows, other).index_put((slots,), of_rows)


def _masks(layer: Experts) -> list[_Mask]:
    """What masks outputs of experts, and weights. Raises Refusal where anything but zeros is taken for them."""
    product = layer.parts.second.product
    by_row = {product.node: _are_by_expert(layer), _unmasked(layer.sum.topk_weights): False}
    masks = []
    for node in cut([layer.sum.root], [*by_row].__contains__).nodes:
        source = next((each for each in node.all_input_nodes if each in by_row), None)
        if source is None or is_integral(node):
            continue
        by_row[node] = by_row[source] != _moves_rows(node)
        if node.target is aten.where.self:
            mask, if_true, if_false = args(node)
            other = if_true if source is if_false else if_false
            if not is_zero(other):
                raise Refusal(
                    node, f"expert ids may be out of range, and {describe(other)} stands in for those"
                )
            masks.append(_Mask(mask, other is if_true, by_row[node]))
    return masks


def _unmasked(weights: Node) -> Node:
    """The weights before any were set to zero."""
    if weights.target is aten.where.self:
        _, *values = args(weights)
        kept = [each for each in values if not is_zero(each)]
        return _unmasked(kept[0]) if len(kept) == 1 else weights
    is_same = is_view(weights) or is_cast(weights) or weights.target is aten.clone.default
    return _unmasked(args(weights)[0]) if is_same else weights


def _moves_rows(node: Node) -> bool:
    """Whether `node` brings rows into the order of slots, or what belongs to slots into that of rows."""
    return node.target is aten.index_put.default or indexed(node) is not None


def _is_hidden(mask: _Mask, run: Run, slots: Tensor) -> Tensor:
    """[S]: for which slots a mask takes zeros."""
    value = run.value(mask.mask)
    if value is None or value.numel() != len(slots):
        return torch.zeros(len(slots), dtype=torch.bool)
    hidden = (value == mask.value).flatten()
    return _by_slot(hidden, slots, 0) if mask.is_by_row else hidden
