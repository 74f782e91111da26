"""The experts of a layer on the CPU: slot by slot where they are few, else sorted by expert."""

from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import _checks
from moe_ops._cpu_products import grouped_product, grouped_products, paired_product
from moe_ops.activation import apply_activation
from moe_ops.arguments import FusedExperts, GroupedLinear, PairedLinear
from moe_ops.combine import weighted_sum
from moe_ops.dispatch import local_experts
from moe_ops.types import Activation

# Up to the first sorting costs more than it saves, up to the second where slots that share an expert are rare.
_FEW_SLOTS, _FEW_ALONE, _EXPERTS_PER_SLOT = 4, 16, 4
_LISTED_SLOTS = 32  # up to so many are sorted in lists: a dozen calls of torch take longer


def run_experts(args: FusedExperts) -> Tensor:
    """[T, H] in the compute dtype, without the shared output."""
    ids, experts = args.topk_ids, args.experts
    scales = args.topk_weights.to(_checks.compute_dtype(args.hidden_states.dtype))
    layer = _Layer(*experts, Activation.from_spec(args.activation))
    if ids.shape[0] == 1 or _are_few(ids.numel(), experts.w13.weight.shape[0]):
        return _slot_by_slot(args.hidden_states, layer, scales, _local_ids(ids, args.placement.expert_map))
    return _sorted_by_expert(args, layer, scales)


def _are_few(slots: int, num_experts: int) -> bool:
    most = _FEW_ALONE if num_experts >= _EXPERTS_PER_SLOT * slots else _FEW_SLOTS
    return slots <= most


class _Layer(NamedTuple):
    w13: PairedLinear
    w2: GroupedLinear
    activation: Activation


def _local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> list[list[int]]:
    ids = topk_ids.tolist()
    if expert_map is None:
        return ids
    local = dict(enumerate(expert_map.tolist()))
    return [[local.get(expert_id, -1) for expert_id in token] for token in ids]


def _slot_by_slot(hidden_states: Tensor, layer: _Layer, scales: Tensor, experts: list[list[int]]) -> Tensor:
    """One expert call per slot, in slot order; ids out of range are dropped."""
    w13, w2, activation = layer
    out = scales.new_zeros(hidden_states.shape)
    for token, (ids, weight_of) in enumerate(zip(experts, scales.tolist(), strict=True)):
        x, total = hidden_states[token : token + 1], out[token : token + 1]
        for expert, scale in zip(ids, weight_of, strict=True):
            if 0 <= expert < w13.weight.shape[0]:
                activated = apply_activation(paired_product(x, w13, expert), activation)
                total.add_(paired_product(activated, PairedLinear(*w2), expert), alpha=scale)
    return out


def _sorted_by_expert(args: FusedExperts, layer: _Layer, scales: Tensor) -> Tensor:
    """The rows of each expert after another, as the stages have them."""
    top_k = args.topk_ids.shape[1]
    slots, expert_offsets, inverse = (_plan_in_lists if scales.numel() <= _LISTED_SLOTS else _plan)(args)
    rows = args.hidden_states.index_select(0, slots // top_k)
    gate_up = grouped_products(rows, layer.w13, expert_offsets)
    # In the storage dtype: torch's own elementwise kernels compute in float32 inside.
    activated = apply_activation(gate_up, layer.activation)
    expert_out = grouped_product(activated, layer.w2, expert_offsets)
    return weighted_sum(expert_out, scales, inverse.view(scales.shape))


def _plan(args: FusedExperts) -> tuple[Tensor, Tensor, Tensor]:
    """The slot of each row that is kept, where the rows of each expert start, and the row of each slot or -1."""
    num_experts = args.experts.w13.weight.shape[0]
    expert = local_experts(args.topk_ids.flatten(), args.placement, num_experts)
    ranked, slots = expert.sort(stable=True)
    expert_offsets = torch.searchsorted(ranked, torch.arange(num_experts + 1), out_int32=True)
    slots = slots[: int(expert_offsets[-1])]
    inverse = slots.new_full((expert.shape[0],), -1).index_copy_(0, slots, torch.arange(slots.shape[0]))
    return slots, expert_offsets, inverse


def _plan_in_lists(args: FusedExperts) -> tuple[Tensor, Tensor, Tensor]:
    """The same."""
    num_experts = args.experts.w13.weight.shape[0]
    expert = list(chain.from_iterable(_local_ids(args.topk_ids, args.placement.expert_map)))
    ranked = sorted(range(len(expert)), key=expert.__getitem__)
    slots = [slot for slot in ranked if 0 <= expert[slot] < num_experts]
    counts, inverse = [0] * (num_experts + 1), [-1] * len(expert)
    for row, slot in enumerate(slots):
        counts[expert[slot] + 1] += 1
        inverse[slot] = row
    whole = partial(torch.tensor, dtype=torch.int64, device="cpu")
    return whole(slots), whole(list(accumulate(counts))).int(), whole(inverse)
