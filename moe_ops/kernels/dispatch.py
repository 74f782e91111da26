"""build_dispatch: a stable counting sort of the S routed slots by local expert. No atomics: deterministic.

Up to some thousand slots: CTAs of 32 rank theirs against every other. More: per-block histograms, a scan over the
blocks of each expert, then a scatter that ranks inside its block. Dropped slots form a last bucket, number
`num_experts`.

Ids are loaded by the kernels themselves: where rows go depends on them, and torch takes whatever a function is given,
on which the place of a store depends, for something that is written.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import cdiv, in_range, next_power_of_2, slot_pointers
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref, TensorMeta

# With more slots the quadratic ranking costs more than two further launches: at 256, 1024, 4096 and 8192 slots of 128
# experts 3.1, 4.9, 11.6 and 22.3 us against 10.9, 11.2, 11.8 and 12.5 (H200).
_MOST_RANKED = 4096
_RANKED, _RANKED_AGAINST, _BINNED = 32, 128, 1024  # slots of a program, and of a step of its loop
# Few block sizes, so that a growing token count compiles few variants.
_SCAN_BLOCKS = (64, 1024)
_SMALL_BLOCK, _LARGE_BLOCK, _LARGE_FROM = 256, 1024, 1 << 18


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _rank_kernel(
    ids_ptr, map_ptr, sorted_ptr, inverse_ptr, offsets_ptr,
    num_slots, num_blocks, stride_t, stride_k, num_ids, num_experts,
    TOP_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, BINNED: tl.constexpr,
):  # fmt: skip
    """Row of a slot = how many slots have a smaller (bucket, number). The last CTA counts the buckets meanwhile."""
    block = tl.program_id(0)
    if block < num_blocks:
        slots = block * BLOCK_S + tl.arange(0, BLOCK_S)
        mask = slots < num_slots
        ids = tl.load(slot_pointers(ids_ptr, slots, TOP_K, stride_t, stride_k), mask=mask, other=-1)
        if map_ptr is not None:
            ids = tl.load(map_ptr + in_range(ids, num_ids, 0), mask=(ids >= 0) & (ids < num_ids), other=-1)
        expert = in_range(ids, num_experts, num_experts)
        key = expert * num_slots + slots
        smaller = tl.zeros((BLOCK_S, CHUNK), tl.int32)
        for start in range(0, num_slots, CHUNK):
            others = start + tl.arange(0, CHUNK)
            present = others < num_slots
            near = tl.load(slot_pointers(ids_ptr, others, TOP_K, stride_t, stride_k), mask=present, other=-1)
            if map_ptr is not None:
                near = tl.load(
                    map_ptr + in_range(near, num_ids, 0), mask=(near >= 0) & (near < num_ids), other=-1
                )
            # Beyond the last slot there is the last bucket, with numbers beyond that of any slot.
            other = in_range(near, num_experts, num_experts) * num_slots + others
            smaller += (other[None, :] < key[:, None]).to(tl.int32)
        rank = tl.sum(smaller, 1)
        tl.store(sorted_ptr + rank, slots, mask=mask)
        tl.store(inverse_ptr + slots, tl.where(expert < num_experts, rank, -1), mask=mask)
    else:
        bins = tl.arange(0, BLOCK_E)
        counts = tl.zeros((BLOCK_E,), tl.int32)
        for start in range(0, num_slots, BINNED):
            slots = start + tl.arange(0, BINNED)
            mask = slots < num_slots
            ids = tl.load(slot_pointers(ids_ptr, slots, TOP_K, stride_t, stride_k), mask=mask, other=-1)
            if map_ptr is not None:
                ids = tl.load(
                    map_ptr + in_range(ids, num_ids, 0), mask=(ids >= 0) & (ids < num_ids), other=-1
                )
            counts += tl.histogram(in_range(ids, num_experts, num_experts), BLOCK_E, mask=mask)
        tl.store(offsets_ptr + bins, tl.cumsum(counts, 0) - counts, mask=bins <= num_experts)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _block_histogram_kernel(
    ids_ptr, map_ptr, counts_ptr,
    num_slots, num_blocks, top_k, stride_t, stride_k, num_ids, num_experts,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """counts[bucket, block]: slots of `bucket` among the BLOCK_S slots of this block."""
    block = tl.program_id(0)
    slots = block * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = slots < num_slots
    ids = tl.load(slot_pointers(ids_ptr, slots, top_k, stride_t, stride_k), mask=mask, other=-1)
    if map_ptr is not None:
        ids = tl.load(map_ptr + in_range(ids, num_ids, 0), mask=(ids >= 0) & (ids < num_ids), other=-1)
    expert = in_range(ids, num_experts, num_experts)
    bins = tl.arange(0, BLOCK_E)
    counts = tl.histogram(expert, BLOCK_E, mask=mask)
    tl.store(counts_ptr + bins.to(tl.int64) * num_blocks + block, counts, mask=bins <= num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def _block_scan_kernel(counts_ptr, prefix_ptr, totals_ptr, num_blocks, BLOCK: tl.constexpr):
    """One CTA per bucket: prefix[bucket, :] is the exclusive prefix sum of counts[bucket, :], totals[bucket] the sum.

    Not in place: lanes that hold copies of an element could read it after another has stored it.
    """
    bucket = tl.program_id(0)
    row = bucket.to(tl.int64) * num_blocks
    total = tl.zeros((), tl.int32)
    for start in range(0, num_blocks, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + row + blocks, mask=blocks < num_blocks, other=0)
        prefix = total + tl.cumsum(counts, 0) - counts
        tl.store(prefix_ptr + row + blocks, prefix, mask=blocks < num_blocks)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + bucket, total)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _block_scatter_kernel(
    ids_ptr, map_ptr, prefix_ptr, totals_ptr, sorted_ptr, inverse_ptr, offsets_ptr,
    num_slots, num_blocks, top_k, stride_t, stride_k, num_ids, num_experts,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Row of a slot = start of its bucket + its bucket's slots in earlier blocks + its rank inside the block."""
    block = tl.program_id(0)
    first = block * BLOCK_S
    slots = first + tl.arange(0, BLOCK_S)
    mask = slots < num_slots
    ids = tl.load(slot_pointers(ids_ptr, slots, top_k, stride_t, stride_k), mask=mask, other=-1)
    if map_ptr is not None:
        ids = tl.load(map_ptr + in_range(ids, num_ids, 0), mask=(ids >= 0) & (ids < num_ids), other=-1)
    expert = in_range(ids, num_experts, num_experts)
    rank = tl.load(prefix_ptr + expert.to(tl.int64) * num_blocks + block, mask=mask, other=0)
    bins = tl.arange(0, BLOCK_E)
    totals = tl.load(totals_ptr + bins, mask=bins <= num_experts, other=0)
    offsets = tl.cumsum(totals, 0) - totals
    rank += tl.gather(offsets, expert, 0)
    for start in range(0, BLOCK_S, CHUNK):
        others = first + start + tl.arange(0, CHUNK)
        present = others < num_slots
        near = tl.load(slot_pointers(ids_ptr, others, top_k, stride_t, stride_k), mask=present, other=-1)
        if map_ptr is not None:
            near = tl.load(
                map_ptr + in_range(near, num_ids, 0), mask=(near >= 0) & (near < num_ids), other=-1
            )
        other = in_range(near, num_experts, num_experts)
        earlier = (other[None, :] == expert[:, None]) & (others[None, :] < slots[:, None])
        rank += tl.sum((earlier & present[None, :]).to(tl.int32), 1)
    tl.store(sorted_ptr + rank, slots, mask=mask)
    tl.store(inverse_ptr + slots, tl.where(expert < num_experts, rank, -1), mask=mask)
    if block == 0:
        tl.store(offsets_ptr + bins, offsets, mask=bins <= num_experts)


def dispatch_launches(
    topk_ids: TensorMeta, placement: Any, num_experts: int
) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    """Buffers and launches that turn `topk_ids` [T, K] into `sorted_slots`, `inverse` and `expert_offsets`."""
    num_slots = topk_ids.shape[0] * topk_ids.shape[1]
    outputs = (
        Buffer("sorted_slots", (num_slots,), torch.int32),
        Buffer("inverse", (num_slots,), torch.int32),
        Buffer("expert_offsets", (num_experts + 1,), torch.int32),
    )
    source = _source_args(topk_ids, placement, num_experts)
    if num_slots <= _MOST_RANKED:
        return outputs, (_rank_launch(source, num_slots),)
    workspace, launches = _blocked_launches(source, num_slots)
    return outputs + workspace, launches


def placement_args(placement: Any, num_experts: int) -> dict[str, Any]:
    """What `common.local_expert` needs to find experts."""
    return {
        "map_ptr": None if placement.expert_map is None else Ref("expert_map"),
        "num_ids": placement.num_ids(num_experts),
        "num_experts": num_experts,
    }


def _source_args(topk_ids: TensorMeta, placement: Any, num_experts: int) -> dict:
    return {
        **placement_args(placement, num_experts),
        "ids_ptr": Ref("topk_ids"),
        "num_slots": topk_ids.shape[0] * topk_ids.shape[1],
        "top_k": topk_ids.shape[1],
        "stride_t": topk_ids.strides[0],
        "stride_k": topk_ids.strides[1],
        "BLOCK_E": next_power_of_2(num_experts + 1),
    }


def _output_args() -> dict:
    return {f"{short}_ptr": Ref(name) for short, name in _OUTPUT_NAMES.items()}


_OUTPUT_NAMES = {"sorted": "sorted_slots", "inverse": "inverse", "offsets": "expert_offsets"}


def _rank_launch(source: dict, num_slots: int) -> Launch:
    num_blocks = cdiv(num_slots, _RANKED)
    args = {**source, **_output_args(), "num_blocks": num_blocks}
    args |= {"TOP_K": args.pop("top_k"), "BLOCK_S": _RANKED, "CHUNK": _RANKED_AGAINST, "BINNED": _BINNED}
    return Launch(_rank_kernel, (num_blocks + 1,), args, 4, 1)


def _blocked_launches(source: dict, num_slots: int) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    block = _SMALL_BLOCK if num_slots < _LARGE_FROM else _LARGE_BLOCK
    num_blocks, buckets = cdiv(num_slots, block), source["num_experts"] + 1
    blocked = {**source, "num_blocks": num_blocks, "BLOCK_S": block}
    counts, prefix, totals = Ref("block_counts"), Ref("block_prefix"), Ref("expert_totals")
    scan = {"counts_ptr": counts, "prefix_ptr": prefix, "totals_ptr": totals, "num_blocks": num_blocks}
    scan["BLOCK"] = _SCAN_BLOCKS[num_blocks > _SCAN_BLOCKS[0]]
    scatter = {**blocked, **_output_args(), "prefix_ptr": prefix, "totals_ptr": totals}
    scatter["CHUNK"] = 32 if block == _SMALL_BLOCK else 8  # more spills
    workspace = (
        Buffer(counts.name, (buckets, num_blocks), torch.int32),
        Buffer(prefix.name, (buckets, num_blocks), torch.int32),
        Buffer(totals.name, (buckets,), torch.int32),
    )
    launches = (
        Launch(_block_histogram_kernel, (num_blocks,), {**blocked, "counts_ptr": counts}, 4, 1),
        Launch(_block_scan_kernel, (buckets,), scan, 4, 1),
        Launch(_block_scatter_kernel, (num_blocks,), scatter, 4 if block == _SMALL_BLOCK else 8, 1),
    )
    return workspace, launches


def build_dispatch_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.build_dispatch`."""
    buffers, launches = dispatch_launches(args.topk_ids, args.placement, args.num_experts)
    return Program(buffers, launches, ("sorted_slots", "inverse", "expert_offsets"))
