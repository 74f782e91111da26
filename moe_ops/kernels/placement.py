"""map_replicas, map_and_record: a gather per slot, and a histogram per block that is added to the load, in one launch.

Many slots are counted in a block first, which leaves one atomic per block and expert: a hot expert does not queue up
all its slots. Few are added one by one. Integer atomics are exact in any order: deterministic.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import cdiv, next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref

# Up to so many slots blocks are small and add each slot by itself; measured on an H200, docs/PERFORMANCE.md.
_FEW_SLOTS, _FEW_BLOCK, _MANY_BLOCK = 8192, 128, 512


@triton.jit
def _token_hash(token, seed_ptr):
    """The number of a token, as `moe_ops.placement.token_hash` computes it."""
    bits = token.to(tl.uint32) * 2654435769
    if seed_ptr is not None:
        bits = bits ^ tl.load(seed_ptr).to(tl.uint32)
        bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
        bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
        bits = bits ^ (bits >> 16)
    return bits


@triton.jit(do_not_specialize=["num_slots"])
def _map_replicas_kernel(
    ids_ptr, map_ptr, count_ptr, seed_ptr, load_ptr, num_real_ptr, is_recording_ptr, physical_ptr,
    num_slots, top_k, stride_t, stride_k, num_experts, num_replicas, stride_e, stride_r, num_physical, stride_p,
    COUNT_FIRST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    # Read before anything else: what is asked for early has arrived when it is needed.
    num_real = None if num_real_ptr is None else tl.load(num_real_ptr)
    is_recording = None if is_recording_ptr is None else tl.load(is_recording_ptr)
    slots = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = slots < num_slots
    token = slots // top_k
    ids = tl.load(ids_ptr + offset(token, stride_t) + offset(slots % top_k, stride_k), mask=mask, other=-1)
    known = (ids >= 0) & (ids < num_experts)  # in the ids' own width, before narrowing
    expert = tl.where(known, ids, 0).to(tl.int32)
    count = tl.minimum(tl.load(count_ptr + expert, mask=known, other=0), num_replicas)
    replica = (_token_hash(token, seed_ptr) % tl.maximum(count, 1).to(tl.uint32)).to(tl.int32)
    replica_ptr = map_ptr + offset(expert, stride_e) + offset(replica, stride_r)
    physical = tl.maximum(tl.load(replica_ptr, mask=known & (count > 0), other=-1), -1)
    tl.store(physical_ptr + slots, physical, mask=mask)
    if load_ptr is not None:
        counts = (physical >= 0) & (physical < num_physical)
        if num_real is not None:
            counts = counts & (token < num_real)
        if is_recording is not None:
            counts = counts & (slots >= tl.where(is_recording != 0, 0, num_slots))
        experts, added = physical, tl.full((BLOCK_S,), 1, tl.int32)
        if COUNT_FIRST:
            added = tl.histogram(tl.where(counts, physical, num_physical), BLOCK_P, mask=mask)
            experts = tl.arange(0, BLOCK_P)
            counts = (experts < num_physical) & (added > 0)
        added = added.to(load_ptr.dtype.element_ty)
        tl.atomic_add(load_ptr + offset(experts, stride_p), added, mask=counts, sem="relaxed")


def map_replicas_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.map_replicas`."""
    none = dict.fromkeys(("load_ptr", "num_real_ptr", "is_recording_ptr"))
    return _program(args, {**none, "num_physical": 0, "stride_p": 1, "BLOCK_P": 1})


def map_and_record_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.map_and_record`."""
    load, num_real_tokens, is_recording = args.record
    recorded = {
        "load_ptr": Ref("load"),
        "num_real_ptr": None if num_real_tokens is None else Ref("num_real_tokens"),
        "is_recording_ptr": None if is_recording is None else Ref("is_recording"),
        "num_physical": load.shape[0],
        "stride_p": load.strides[0],
        "BLOCK_P": next_power_of_2(load.shape[0] + 1),
    }
    return _program(args.choice, recorded)


def _program(args: Any, recorded: dict[str, Any]) -> Program:
    (experts, _), ids = args.replicas, args.topk_ids
    num_slots = ids.shape[0] * ids.shape[1]
    block = _FEW_BLOCK if num_slots <= _FEW_SLOTS else _MANY_BLOCK
    launch_args = {
        **recorded,
        "ids_ptr": Ref("topk_ids"),
        "map_ptr": Ref("logical_to_physical"),
        "count_ptr": Ref("replica_count"),
        "seed_ptr": None if args.seed is None else Ref("seed"),
        "physical_ptr": Ref("physical_ids"),
        "num_slots": num_slots,
        "top_k": ids.shape[1],
        "stride_t": ids.strides[0],
        "stride_k": ids.strides[1],
        "num_experts": experts.shape[0],
        "num_replicas": experts.shape[1],
        "stride_e": experts.strides[0],
        "stride_r": experts.strides[1],
        "COUNT_FIRST": num_slots > _FEW_SLOTS,
        "BLOCK_S": block,
    }
    physical = Buffer("physical_ids", ids.shape, torch.int32)
    num_warps = 4 if num_slots <= _FEW_SLOTS else 8
    launch = Launch(_map_replicas_kernel, (cdiv(num_slots, block),), launch_args, num_warps, num_stages=1)
    return Program((physical,), (launch,), (physical.name,))
