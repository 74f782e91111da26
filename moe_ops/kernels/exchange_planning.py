"""The plan of an exchange by prefix sums: in one launch for few tokens, else what each rank wants of them first."""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import cdiv, in_range, next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref

_IDS = 32  # that a thread holds
_AT_ONCE = 1024  # tokens that one CTA of each rank numbers as fast as several do


@triton.jit
def _wanted(
    ids_ptr, owners_ptr, tokens, there, to, top_k, stride_t, stride_k, num_experts, BLOCK_K: tl.constexpr
):
    """1 for those of `tokens` that rank `to` gets, else 0."""
    ks = tl.arange(0, BLOCK_K)
    pointers = ids_ptr + offset(tokens, stride_t)[:, None] + offset(ks, stride_k)[None, :]
    ids = tl.load(pointers, mask=there[:, None] & (ks < top_k)[None, :], other=-1)
    known = (ids >= 0) & (ids < num_experts)
    owners = tl.load(owners_ptr + in_range(ids, num_experts, 0), mask=known, other=-1)
    return tl.max((owners == to).to(tl.int32), 1)


@triton.jit
def _store_slots(slots_ptr, tokens_ptr, tokens, there, wanted, before, to, num_ranks, max_tokens):
    slots = before + tl.cumsum(wanted, 0) - wanted
    kept = (wanted > 0) & (slots < max_tokens)
    tl.store(slots_ptr + offset(tokens, num_ranks) + to, tl.where(kept, slots, -1), mask=there)
    tl.store(tokens_ptr + offset(to, max_tokens) + slots, tokens, mask=kept)


@triton.jit
def _store_none(tokens_ptr, slots, total, to, max_tokens):
    """-1 for slots that no token has."""
    none = tl.full(slots.shape, -1, tl.int32)
    empty = (slots >= total) & (slots < max_tokens)
    tl.store(tokens_ptr + offset(to, max_tokens) + slots, none, mask=empty)


@triton.jit(do_not_specialize=["num_tokens"])
def _plan_exchange_kernel(
    ids_ptr, owners_ptr, slots_ptr, tokens_ptr, sent_ptr,
    num_tokens, top_k, stride_t, stride_k, num_experts, num_ranks, max_tokens,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program r: which tokens rank r gets, in their order."""
    to = tl.program_id(0)
    total = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        there = tokens < num_tokens
        wanted = _wanted(
            ids_ptr, owners_ptr, tokens, there, to, top_k, stride_t, stride_k, num_experts, BLOCK_K
        )
        _store_slots(slots_ptr, tokens_ptr, tokens, there, wanted, total, to, num_ranks, max_tokens)
        total += tl.sum(wanted, 0)
    for start in range(0, max_tokens, BLOCK):
        _store_none(tokens_ptr, start + tl.arange(0, BLOCK), total, to, max_tokens)
    tl.store(sent_ptr + to, tl.minimum(total, max_tokens))


@triton.jit(do_not_specialize=["num_tokens"])
def _wanted_kernel(
    ids_ptr, owners_ptr, wanted_ptr,
    num_tokens, top_k, stride_t, stride_k, num_experts, num_ranks, max_tokens,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program b: for tokens of block b, 1 or 0 for every rank."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = tokens < num_tokens
    for to in range(num_ranks):
        wanted = _wanted(
            ids_ptr, owners_ptr, tokens, there, to, top_k, stride_t, stride_k, num_experts, BLOCK_K
        )
        tl.store(wanted_ptr + offset(to, max_tokens) + tokens, wanted.to(tl.uint8), mask=there)


@triton.jit(do_not_specialize=["num_tokens"])
def _number_kernel(
    wanted_ptr, slots_ptr, tokens_ptr, sent_ptr, num_tokens, num_ranks, max_tokens,
    BLOCK: tl.constexpr, BLOCK_ALL: tl.constexpr,
):  # fmt: skip
    """Program (r, b): the slots on rank r of tokens of block b, behind those of the blocks before."""
    to, first = tl.program_id(0), tl.program_id(1) * BLOCK
    row_ptr = wanted_ptr + offset(to, max_tokens)
    before, total = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, num_tokens, BLOCK_ALL):
        every = start + tl.arange(0, BLOCK_ALL)
        wanted = tl.load(row_ptr + every, mask=every < num_tokens, other=0).to(tl.int32)
        before += tl.sum(tl.where(every < first, wanted, 0), 0)
        total += tl.sum(wanted, 0)
    tokens = first + tl.arange(0, BLOCK)
    there = tokens < num_tokens
    wanted = tl.load(row_ptr + tokens, mask=there, other=0).to(tl.int32)
    _store_slots(slots_ptr, tokens_ptr, tokens, there, wanted, before, to, num_ranks, max_tokens)
    _store_none(tokens_ptr, tokens, total, to, max_tokens)
    if first == 0:
        tl.store(sent_ptr + to, tl.minimum(total, max_tokens))


def plan_exchange_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.plan_exchange`."""
    num_tokens, num_ranks, max_tokens = args.topk_ids.shape[0], args.num_ranks, args.max_tokens
    buffers = (
        Buffer("slots", (num_tokens, num_ranks), torch.int32),
        Buffer("tokens", (num_ranks, max_tokens), torch.int32),
        Buffer("sent", (num_ranks,), torch.int32),
    )
    outputs = ("slots", "tokens", "sent")
    if max_tokens <= _AT_ONCE:
        return Program(buffers, (_at_once(args),), outputs)
    wanted = Buffer("wanted", (num_ranks, max_tokens), torch.uint8)
    return Program((*buffers, wanted), _in_two_launches(args), outputs)


def _of_ids(args: Any) -> dict[str, Any]:
    """What the kernels that read ids are given."""
    (num_tokens, top_k), (num_experts,) = args.topk_ids.shape, args.owners.shape
    return {
        "ids_ptr": Ref("topk_ids"),
        "owners_ptr": Ref("owners"),
        "num_tokens": num_tokens,
        "top_k": top_k,
        "stride_t": args.topk_ids.strides[0],
        "stride_k": args.topk_ids.strides[1],
        "num_experts": num_experts,
        "num_ranks": args.num_ranks,
        "max_tokens": args.max_tokens,
        "BLOCK_K": next_power_of_2(top_k),
    }


_PLAN = {"slots_ptr": Ref("slots"), "tokens_ptr": Ref("tokens"), "sent_ptr": Ref("sent")}


def _at_once(args: Any) -> Launch:
    given = _of_ids(args)
    num_warps = 4 if args.max_tokens <= 256 else 16
    block = _block(given, num_warps, args.max_tokens)
    return Launch(_plan_exchange_kernel, (args.num_ranks,), {**given, **_PLAN, "BLOCK": block}, num_warps, 1)


def _in_two_launches(args: Any) -> tuple[Launch, Launch]:
    given, sizes = _of_ids(args), ("num_tokens", "num_ranks", "max_tokens")
    block = _block({**given, "BLOCK_K": 4 * given["BLOCK_K"]}, 4, args.max_tokens)  # for CTAs enough
    read = {**given, "wanted_ptr": Ref("wanted"), "BLOCK": block}
    number = {"wanted_ptr": Ref("wanted"), **_PLAN, **{name: given[name] for name in sizes}}
    number |= {"BLOCK": 512, "BLOCK_ALL": min(next_power_of_2(args.max_tokens), 8192)}
    return (
        Launch(_wanted_kernel, (cdiv(given["num_tokens"], block),), read, 4, 1),
        Launch(_number_kernel, (args.num_ranks, cdiv(args.max_tokens, 512)), number, 8, 1),
    )


def _block(given: dict[str, Any], num_warps: int, max_tokens: int) -> int:
    """Tokens of a CTA."""
    return min(max(num_warps * 32 * _IDS // given["BLOCK_K"], 16), next_power_of_2(max_tokens))
