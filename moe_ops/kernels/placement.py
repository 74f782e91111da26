"""map_replicas, map_and_record: a gather per slot, and a histogram per block that is added to the load, in one launch.
route_and_record: the same at the end of a router's kernel, for the slots that it has chosen.

Many slots are counted in a block first, which leaves one atomic per block and expert: a hot expert does not queue up
all its slots. Few are added one by one, and so are those of a slow router, while others are still being chosen. Integer
atomics are exact in any order: deterministic.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.arguments import MapAndRecord, MapReplicas
from moe_ops.kernels.choosing import route_tokens
from moe_ops.kernels.common import cdiv, next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref
from moe_ops.kernels.routing import routing_launches
from moe_ops.types import RoutingConfig

# Up to so many slots blocks are small and add each slot by itself; measured on an H200, docs/PERFORMANCE.md.
_FEW_SLOTS, _FEW_BLOCK, _MANY_BLOCK = 4096, 128, 512
_MOST_BINS = 128  # of a histogram
_FEW_EXPERTS = 256  # of which a router chooses faster than atomics of many slots are done


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


@triton.jit
def _physical_expert(
    ids, token, mask, map_ptr, count_ptr, seed_ptr, num_experts, num_replicas, stride_e, stride_r
):
    """Where the experts `ids` of tokens are, -1 for one that is nowhere or that `mask` leaves out."""
    known = mask & (ids >= 0) & (ids < num_experts)  # in the ids' own width, before narrowing
    expert = tl.where(known, ids, 0).to(tl.int32)
    count = tl.minimum(tl.load(count_ptr + expert, mask=known, other=0), num_replicas)
    replica = (_token_hash(token, seed_ptr) % tl.maximum(count, 1).to(tl.uint32)).to(tl.int32)
    replica_ptr = map_ptr + offset(expert, stride_e) + offset(replica, stride_r)
    return tl.maximum(tl.load(replica_ptr, mask=known & (count > 0), other=-1), -1)


@triton.jit
def _num_counted(num_tokens, num_real_ptr, is_recording_ptr):
    """How many tokens count, of which there are `num_tokens`: the first ones, or none."""
    counted = num_tokens
    if num_real_ptr is not None:
        counted = tl.load(num_real_ptr)
    if is_recording_ptr is not None:
        counted = tl.where(tl.load(is_recording_ptr) != 0, counted, 0)
    return counted


@triton.jit
def _counts(physical, token, num_physical, num_counted):
    return (physical >= 0) & (physical < num_physical) & (token < num_counted)


@triton.jit(do_not_specialize=["num_slots"])
def _map_replicas_kernel(
    ids_ptr, map_ptr, count_ptr, seed_ptr, load_ptr, num_real_ptr, is_recording_ptr, physical_ptr,
    num_slots, top_k, stride_t, stride_k, num_mapped, num_replicas, map_stride_e, map_stride_r, num_physical, stride_p,
    COUNT_FIRST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    # Read before anything else: what is asked for early has arrived when it is needed.
    num_counted = _num_counted(num_slots, num_real_ptr, is_recording_ptr)
    slots = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    mask = slots < num_slots
    token = slots // top_k
    ids = tl.load(ids_ptr + offset(token, stride_t) + offset(slots % top_k, stride_k), mask=mask, other=-1)
    physical = _physical_expert(
        ids, token, mask, map_ptr, count_ptr, seed_ptr, num_mapped, num_replicas, map_stride_e, map_stride_r
    )
    tl.store(physical_ptr + slots, physical, mask=mask)
    if load_ptr is not None:
        counts = _counts(physical, token, num_physical, num_counted)
        experts, added = physical, tl.full((BLOCK_S,), 1, tl.int32)
        if COUNT_FIRST:
            # Each part of the experts by programs of its own: many bins take a histogram long.
            part = physical - tl.program_id(1) * BLOCK_P
            added = tl.histogram(part, BLOCK_P, mask=counts & (part >= 0) & (part < BLOCK_P))
            experts = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
            counts = (experts < num_physical) & (added > 0)
        added = added.to(load_ptr.dtype.element_ty)
        tl.atomic_add(load_ptr + offset(experts, stride_p), added, mask=counts, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens"])
def _route_and_record_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr,
    map_ptr, count_ptr, seed_ptr, load_ptr, num_real_ptr, is_recording_ptr, physical_ptr,
    num_tokens, stride_t, stride_e, stride_b,
    num_mapped, num_replicas, map_stride_e, map_stride_r, num_physical, stride_p,
    TOP_K: tl.constexpr, SCORE: tl.constexpr, SCORE_FIRST: tl.constexpr, RENORMALIZE: tl.constexpr,
    RENORM_EPS: tl.constexpr, SCALE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, GROUP_FILL: tl.constexpr, NUM_EXPERTS: tl.constexpr, MEMBERS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    num_counted = _num_counted(num_tokens, num_real_ptr, is_recording_ptr)
    slots, ids, mask = route_tokens(
        logits_ptr, bias_ptr, weights_ptr, ids_ptr, num_tokens, stride_t, stride_e, stride_b,
        TOP_K, SCORE, SCORE_FIRST, RENORMALIZE, RENORM_EPS, SCALE, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM, GROUP_FILL,
        NUM_EXPERTS, MEMBERS, ROWS, BLOCK_E, BLOCK_G, BLOCK_K,
    )  # fmt: skip
    token = slots // TOP_K
    physical = _physical_expert(
        ids, token, mask, map_ptr, count_ptr, seed_ptr, num_mapped, num_replicas, map_stride_e, map_stride_r
    )
    tl.store(physical_ptr + slots, physical, mask=mask)
    counts = _counts(physical, token, num_physical, num_counted)
    added = tl.full((ROWS, BLOCK_K), 1, load_ptr.dtype.element_ty)
    tl.atomic_add(load_ptr + offset(physical, stride_p), added, mask=counts, sem="relaxed")


def map_replicas_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.map_replicas`."""
    none = dict.fromkeys(("load_ptr", "num_real_ptr", "is_recording_ptr"))
    return _program(args, {**none, "num_physical": 0, "stride_p": 1, "BLOCK_P": 1})


def map_and_record_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.map_and_record`."""
    block = min(next_power_of_2(args.record.load.shape[0]), _MOST_BINS)
    return _program(args.choice, {**_record_args(args.record), "BLOCK_P": block})


def route_and_record_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.route_and_record`."""
    (weights, ids), (routing,) = routing_launches(args.router)
    outputs = ("topk_weights", "topk_ids", "physical_ids")
    if not _hides_atomics(args.router):
        choice = MapReplicas(ids.meta, args.replicas, args.seed)
        mapped = map_and_record_program(MapAndRecord(choice, args.record), gpu)
        return Program((weights, ids, *mapped.buffers), (routing, *mapped.launches), outputs)
    given = {**routing.args, **_record_args(args.record), **_replica_args(args)}
    physical = Buffer("physical_ids", ids.shape, torch.int32)
    launch = replace(routing, kernel=_route_and_record_kernel, args=given)
    return Program((weights, ids, physical), (launch,), outputs)


def _hides_atomics(router: Any) -> bool:
    """Whether a router counts its choices while others are still being made: few of them, or made slowly."""
    num_tokens, num_experts = router.router_logits.shape
    routing = RoutingConfig.from_spec(router.routing)
    return num_tokens * routing.top_k <= _FEW_SLOTS or routing.num_groups > 1 or num_experts > _FEW_EXPERTS


def _record_args(record: Any) -> dict[str, Any]:
    load, num_real_tokens, is_recording = record
    return {
        "load_ptr": Ref("load"),
        "num_real_ptr": None if num_real_tokens is None else Ref("num_real_tokens"),
        "is_recording_ptr": None if is_recording is None else Ref("is_recording"),
        "num_physical": load.shape[0],
        "stride_p": load.strides[0],
    }


def _replica_args(args: Any) -> dict[str, Any]:
    experts, _ = args.replicas
    return {
        "map_ptr": Ref("logical_to_physical"),
        "count_ptr": Ref("replica_count"),
        "seed_ptr": None if args.seed is None else Ref("seed"),
        "physical_ptr": Ref("physical_ids"),
        "num_mapped": experts.shape[0],
        "num_replicas": experts.shape[1],
        "map_stride_e": experts.strides[0],
        "map_stride_r": experts.strides[1],
    }


def _program(args: Any, recorded: dict[str, Any]) -> Program:
    ids = args.topk_ids
    num_slots = ids.shape[0] * ids.shape[1]
    block = _FEW_BLOCK if num_slots <= _FEW_SLOTS else _MANY_BLOCK
    launch_args = {
        **recorded,
        **_replica_args(args),
        "ids_ptr": Ref("topk_ids"),
        "num_slots": num_slots,
        "top_k": ids.shape[1],
        "stride_t": ids.strides[0],
        "stride_k": ids.strides[1],
        "COUNT_FIRST": num_slots > _FEW_SLOTS,
        "BLOCK_S": block,
    }
    physical = Buffer("physical_ids", ids.shape, torch.int32)
    num_warps = 4 if num_slots <= _FEW_SLOTS else 8
    parts = cdiv(recorded["num_physical"], recorded["BLOCK_P"]) if num_slots > _FEW_SLOTS else 1
    grid = (cdiv(num_slots, block), max(parts, 1))
    launch = Launch(_map_replicas_kernel, grid, launch_args, num_warps, num_stages=1)
    return Program((physical,), (launch,), (physical.name,))
