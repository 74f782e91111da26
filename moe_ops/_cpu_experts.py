"""The experts of a layer on the CPU, fast enough to use.

A loop over experts leaves the cores waiting for each other inside every small product. So experts are multiplied
several at a time, `bmm` giving each core one: their rows are padded to the same count. Measured on two cores at 32
experts of 512 x 512: 0.4 against 1.0 ms with 2 bfloat16 rows each, 3.0 against 6.0 ms with 24 float32 rows each.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import _checks
from moe_ops.activation import apply_activation
from moe_ops.combine import weighted_sum
from moe_ops.dispatch import local_experts
from moe_ops.grouped_gemm import expert_linear
from moe_ops.types import Activation

_FEW_SLOTS = 16  # up to so many, sorting costs more than it saves
_FEW_ROWS = 16  # in the fullest expert
_SMALL_EXPERT = 1 << 17  # weights of w13: what stays in a core's cache


class ExpertWeights(NamedTuple):
    """What an expert layer computes with: w13 [E, 2I, H], w2 [E, H, I], their biases, and the activation."""

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    activation: Activation


def run_experts(
    hidden_states: Tensor,
    weights: ExpertWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
) -> Tensor:
    """hidden_states [T, H], topk_weights and topk_ids [T, K] -> [T, H] in the compute dtype."""
    scales = topk_weights.to(_checks.compute_dtype(hidden_states.dtype))
    if topk_ids.numel() <= _FEW_SLOTS or topk_ids.shape[0] == 1:
        return _slot_by_slot(hidden_states, weights, scales, _local_ids(topk_ids, expert_map))
    return _in_batches(
        hidden_states, weights, scales, local_experts(topk_ids, expert_map, weights.w13.shape[0])
    )


def _local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> list[list[int]]:
    ids = topk_ids.tolist()
    if expert_map is None:
        return ids
    local = dict(enumerate(expert_map.tolist()))
    return [[local.get(expert_id, -1) for expert_id in token] for token in ids]


def _slot_by_slot(
    hidden_states: Tensor, weights: ExpertWeights, scales: Tensor, experts: list[list[int]]
) -> Tensor:
    """One expert call per slot, in slot order; ids out of range are dropped."""
    w13, w2, w13_bias, w2_bias, activation = weights
    out = scales.new_zeros(hidden_states.shape)
    for token, (ids, weight_of) in enumerate(zip(experts, scales.tolist(), strict=True)):
        x, total = hidden_states[token : token + 1], out[token : token + 1]
        for expert, scale in zip(ids, weight_of, strict=True):
            if 0 <= expert < w13.shape[0]:
                gate_up = expert_linear(x, w13[expert], None if w13_bias is None else w13_bias[expert])
                activated = apply_activation(gate_up, activation)
                bias = None if w2_bias is None else w2_bias[expert]
                total.add_(expert_linear(activated, w2[expert], bias), alpha=scale)
    return out


def _in_batches(hidden_states: Tensor, weights: ExpertWeights, scales: Tensor, experts: Tensor) -> Tensor:
    """Rows sorted by expert, the experts of a batch padded to equally many rows."""
    num_experts, top_k = weights.w13.shape[0], experts.shape[1]
    ranked, slots = experts.flatten().sort(stable=True)
    counts = torch.bincount(ranked, minlength=num_experts + 1)[:num_experts]
    batches = _batches(counts.tolist(), weights.w13)
    if not batches:
        return scales.new_zeros(hidden_states.shape)
    kept = int(counts.sum())
    ranked, slots = ranked[:kept], slots[:kept]
    starts = slots.new_tensor(_row_starts(batches, num_experts)) - (counts.cumsum(0) - counts)
    rows = starts[ranked] + torch.arange(kept, device=slots.device)
    padded = sum(batch.rows * batch.experts for batch in batches)
    tokens = slots.new_zeros(padded).index_copy_(0, rows, slots // top_k)
    expert_out = _products(hidden_states.index_select(0, tokens), weights, batches)
    inverse = slots.new_full((experts.numel(),), -1).index_copy_(0, slots, rows)
    return weighted_sum(expert_out, scales, inverse.view(experts.shape))


class _Batch(NamedTuple):
    """Experts first .. first + experts - 1, each with `rows` rows, of which some are padding."""

    first: int
    experts: int
    rows: int


def _batches(counts: list[int], w13: Tensor) -> list[_Batch]:
    """As many experts at a time as there are cores.

    With few rows it is the weights' traffic that takes the time, or calls where experts are small: all experts at
    once then, but one by one in float32 with large experts, where skipping idle ones saves more.
    """
    if max(counts) > _FEW_ROWS:
        runs = _runs(counts, torch.get_num_threads(), _is_little_padding)
    else:
        at_once = w13.dtype == torch.bfloat16 or w13[0].numel() <= _SMALL_EXPERT
        runs = _runs(counts, len(counts) if at_once else 1, _is_mostly_busy)
    return [_Batch(first, len(run), max(run)) for first, run in runs if max(run)]


def _runs(counts: list[int], most: int, fits: Callable[[list[int]], bool]) -> Iterator[tuple[int, list[int]]]:
    """Neighbouring experts, at most `most`, that `fits` lets multiply together: (first expert, rows of each)."""
    first = 0
    while first < len(counts):
        end = first + 1
        while end < min(first + most, len(counts)) and fits(counts[first : end + 1]):
            end += 1
        yield first, counts[first:end]
        first = end


def _is_little_padding(run: list[int]) -> bool:
    """Padding at most doubles the rows: a hot expert among idle ones goes alone."""
    return max(run) * len(run) <= 2 * sum(run)


def _is_mostly_busy(run: list[int]) -> bool:
    """At most half of the experts are read for nothing."""
    return 2 * sum(rows > 0 for rows in run) >= len(run)


def _row_starts(batches: list[_Batch], num_experts: int) -> list[int]:
    """[E]: the first padded row of each expert that has rows."""
    starts, row = [0] * num_experts, 0
    for batch in batches:
        for expert in range(batch.first, batch.first + batch.experts):
            starts[expert] = row
            row += batch.rows
    return starts


def _products(x: Tensor, weights: ExpertWeights, batches: list[_Batch]) -> Tensor:
    gate_up = _linear(x, weights.w13, weights.w13_bias, batches)
    # In the storage dtype: torch's own elementwise kernels compute in float32 inside.
    activated = apply_activation(gate_up, weights.activation)
    return _linear(activated, weights.w2, weights.w2_bias, batches)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, batches: list[_Batch]) -> Tensor:
    """x [R, A] times the weight [B, A] of each expert, plus bias: [R, B]; accumulated in float32 or float64."""
    out = x.new_empty((x.shape[0], weight.shape[1]))
    end = 0
    for first, experts, rows in batches:
        start, end = end, end + experts * rows
        inputs, products = x[start:end].view(experts, rows, -1), out[start:end].view(experts, rows, -1)
        _bmm(inputs, weight[first : first + experts], products)
        if bias is not None:
            products += bias[first : first + experts, None]
    return out


def _bmm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if x.dtype == torch.float16:  # its own kernel is ~50 times slower than float32's
        out.copy_(torch.bmm(x.float(), weight.transpose(1, 2).float()))
    elif x.dtype == torch.float32 and x.shape[1] <= 4:  # 0.8 against 2.5 ms for 32 experts with 2 rows
        out.copy_(torch.bmm(weight, x.transpose(1, 2)).transpose(1, 2))
    else:
        torch.bmm(x, weight.transpose(1, 2), out=out)
