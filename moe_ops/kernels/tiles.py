"""Tile map of a grouped GEMM, computed on the device from `expert_offsets`: no host sync, static buffer size.

Row blocks of BLOCK_M rows never cross an expert. Tile order is expert-major with the row block fastest inside
(expert, column block): the CTAs that stream one weight tile run side by side, and L2 serves all but one of them.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import next_power_of_2, offset
from moe_ops.kernels.program import Buffer, Launch, Ref

_RECORD = tl.constexpr(4)  # expert, its first row block, first row, end row
_FILL = 64


@triton.jit
def _write_records(
    tiles_ptr, group, groups, starts, ends, capacity,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """The records of `group`, whose row blocks follow those of the groups before it.

    With SPLIT those of groups of several row blocks come first, and record 0 also says how many these are.
    """
    blocks = (ends - starts + BLOCK_M - 1) // BLOCK_M
    before = groups < group
    first = tl.sum(tl.where(before, blocks, 0), 0)
    start = tl.sum(tl.where(groups == group, starts, 0), 0)
    end = tl.sum(tl.where(groups == group, ends, 0), 0)
    mine = (end - start + BLOCK_M - 1) // BLOCK_M
    if SPLIT:
        several = blocks > 1
        num_several = tl.sum(tl.where(several, blocks, 0), 0)
        first_single = num_several + tl.sum(tl.where(before & (blocks == 1), 1, 0), 0)
        first = tl.where(mine > 1, tl.sum(tl.where(before & several, blocks, 0), 0), first_single)
        if group == 0:
            tl.store(tiles_ptr + 1, tl.minimum(num_several, capacity))
    if group == 0:
        tl.store(tiles_ptr, tl.minimum(tl.sum(blocks, 0), capacity))
    last = tl.minimum(first + mine, capacity)
    for base in range(first, last, FILL):
        block = base + tl.arange(0, FILL)
        record_ptr = tiles_ptr + (block + 1).to(tl.int64) * _RECORD
        tl.store(record_ptr, tl.zeros_like(block) + group, mask=block < last)
        tl.store(record_ptr + 1, tl.zeros_like(block) + first, mask=block < last)
        tl.store(record_ptr + 2, tl.zeros_like(block) + start, mask=block < last)
        tl.store(record_ptr + 3, tl.zeros_like(block) + end, mask=block < last)


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def _tile_map_kernel(
    offsets_ptr, tiles_ptr, num_slots, num_experts, capacity,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """One program per expert writes a record per row block; record 0 holds the number of row blocks.

    It also holds where the rows past the last expert begin and end, for `zero_tail`.
    """
    group = tl.program_id(0)
    groups = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets_ptr + groups, mask=groups <= num_experts, other=0)
    ends = tl.load(offsets_ptr + groups + 1, mask=groups < num_experts, other=0)
    # Offsets come from the caller: clamped, no value of theirs can make a kernel leave its buffers.
    starts = tl.minimum(tl.maximum(starts, 0), num_slots)
    ends = tl.minimum(tl.maximum(ends, starts), num_slots)
    _write_records(tiles_ptr, group, groups, starts, ends, capacity, SPLIT, BLOCK_M, FILL)
    if group == 0:
        tl.store(tiles_ptr + 2, tl.sum(tl.where(groups == num_experts, starts, 0), 0))
        tl.store(tiles_ptr + 3, num_slots)


@triton.jit(do_not_specialize=["max_tokens", "capacity"])
def _batched_tile_map_kernel(
    counts_ptr, tiles_ptr, max_tokens, num_experts, capacity,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """The same where expert e has the first counts[e] of the rows from e * max_tokens on."""
    group = tl.program_id(0)
    groups = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + groups, mask=groups < num_experts, other=0)
    starts = groups * max_tokens
    # Counts come from the caller, see above.
    ends = starts + tl.minimum(tl.maximum(counts, 0), max_tokens)
    _write_records(tiles_ptr, group, groups, starts, ends, capacity, False, BLOCK_M, FILL)


@triton.jit
def tile_at(tiles_ptr, index, column_blocks, BLOCK_M: tl.constexpr):
    """(expert, first row, end row of the expert, column block) of tile `index`."""
    record_ptr = tiles_ptr + (index // column_blocks + 1) * _RECORD
    expert = tl.load(record_ptr)
    first = tl.load(record_ptr + 1)
    start = tl.load(record_ptr + 2)
    end = tl.load(record_ptr + 3)
    blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    local = index - first * column_blocks
    return expert, start + (local % blocks) * BLOCK_M, end, local // blocks


@triton.jit
def tile_in_turn(tiles_ptr, index, column_blocks, BLOCK_M: tl.constexpr):
    """`tile_at` of a SPLIT map: tiles of both kinds of groups in turns, in proportion.

    Those of one row block are bound by their weights' bytes, the others by arithmetic: side by side they use both.
    """
    num_blocks, num_several = tl.load(tiles_ptr), tl.load(tiles_ptr + 1)
    before = (num_several * tl.cast(index, tl.int64) // num_blocks).to(tl.int32)
    after = (num_several * (tl.cast(index, tl.int64) + 1) // num_blocks).to(tl.int32)
    place = tl.where(after > before, before, num_several * column_blocks + index - before)
    return tile_at(tiles_ptr, place, column_blocks, BLOCK_M)


@triton.jit
def has_expert(row, offsets_ptr, num_experts):
    """Whether a row is one of an expert, not past the last; every row counts as one without `offsets_ptr`."""
    known = True
    if offsets_ptr is not None:
        known = row < tl.load(offsets_ptr + num_experts)
    return known


def expert_args(num_experts: int | None) -> dict[str, Any]:
    """A kernel's arguments for `has_expert`, of so many experts."""
    offsets = None if num_experts is None else Ref("expert_offsets")
    return {"offsets_ptr": offsets, "num_experts": num_experts or 0}


@triton.jit
def zero_tail(tiles_ptr, out_ptr, columns, program, programs, BLOCK: tl.constexpr = 4096):
    """Zeros for the rows past the last expert (dropped slots), by so many programs together, each in turn."""
    start = offset(tl.load(tiles_ptr + 2), columns)
    end = offset(tl.load(tiles_ptr + 3), columns)
    first = start + offset(program, BLOCK)
    for place in range(first, end, offset(programs, BLOCK)):
        places = place + tl.arange(0, BLOCK)
        tl.store(out_ptr + places, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=places < end)


@triton.jit
def zero_tail_beside(tiles_ptr, out_ptr, columns, tile, num_tiles):
    """The same by the programs that have no tile, and by the last one, for there may be none.

    To look for what is left at the end of each tile took up to 7 % of a product's time (H200).
    """
    first = tl.minimum(num_tiles, tl.num_programs(0) - 1)
    if tile >= first:
        zero_tail(tiles_ptr, out_ptr, columns, tile - first, tl.num_programs(0) - first)


def tile_capacity(num_slots: int, num_experts: int, block_m: int) -> int:
    """The most row blocks any routing can need."""
    return num_slots // block_m + min(num_experts, num_slots)


def tile_map(num_slots: int, num_experts: int, block_m: int, split: bool) -> tuple[Buffer, Launch]:
    """Buffer and launch of the tile map, from `expert_offsets`; split: for `tile_in_turn`, else for `tile_at`."""
    capacity = tile_capacity(num_slots, num_experts, block_m)
    buffer = Buffer(
        f"{'split_' if split else ''}tiles_{block_m}", ((capacity + 1) * _RECORD.value,), torch.int32
    )
    args = {
        "offsets_ptr": Ref("expert_offsets"),
        "tiles_ptr": Ref(buffer.name),
        "num_slots": num_slots,
        "num_experts": num_experts,
        "capacity": capacity,
        "SPLIT": split,
        "BLOCK_M": block_m,
        "BLOCK_E": next_power_of_2(num_experts + 1),
        "FILL": _FILL,
    }
    return buffer, Launch(_tile_map_kernel, (num_experts,), args, 4, 1)


def batched_tile_map(max_tokens: int, num_experts: int, block_m: int) -> tuple[Buffer, Launch]:
    """The same from `counts`, for rows that lie `max_tokens` to an expert."""
    capacity = tile_capacity(num_experts * max_tokens, num_experts, block_m)
    buffer = Buffer(f"tiles_{block_m}", ((capacity + 1) * _RECORD.value,), torch.int32)
    args = {
        "counts_ptr": Ref("counts"),
        "tiles_ptr": Ref(buffer.name),
        "max_tokens": max_tokens,
        "num_experts": num_experts,
        "capacity": capacity,
        "BLOCK_M": block_m,
        "BLOCK_E": next_power_of_2(num_experts + 1),
        "FILL": _FILL,
    }
    return buffer, Launch(_batched_tile_map_kernel, (num_experts,), args, 4, 1)
