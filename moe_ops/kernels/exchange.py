"""Rows between ranks over symmetric memory: a plan by prefix sums, a push of rows, a pull of sums. No atomics.

Both exchanges are launches with a barrier between each and the next. Launch i moves part i of the rows and, with other
CTAs, reads part i - 1, so that what only memory limits is hidden behind what the links limit.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import cdiv, in_range, next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref, TensorMeta
from moe_ops.peers import ExchangeLayout, fields_of

_BLOCK_BYTES = 16384  # of a row that a CTA holds: 32 registers a thread
_PLAN_ELEMENTS = 32  # ids a thread
_CTAS = 4  # of a multiprocessor: while one waits for a row others move theirs


@triton.jit(do_not_specialize=["num_tokens"])
def _plan_exchange_kernel(
    ids_ptr, owners_ptr, slots_ptr, tokens_ptr, sent_ptr,
    num_tokens, top_k, stride_t, stride_k, num_experts, num_ranks, max_tokens,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program r: which tokens rank r gets, in their order."""
    to = tl.program_id(0)
    ks = tl.arange(0, BLOCK_K)
    total = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        there = tokens < num_tokens
        pointers = ids_ptr + offset(tokens, stride_t)[:, None] + offset(ks, stride_k)[None, :]
        ids = tl.load(pointers, mask=there[:, None] & (ks < top_k)[None, :], other=-1)
        known = (ids >= 0) & (ids < num_experts)
        owners = tl.load(owners_ptr + in_range(ids, num_experts, 0), mask=known, other=-1)
        wanted = tl.max((owners == to).to(tl.int32), 1)
        slots = total + tl.cumsum(wanted, 0) - wanted
        kept = (wanted > 0) & (slots < max_tokens)
        at = offset(tokens, num_ranks) + to
        tl.store(slots_ptr + at, tl.where(kept, slots, -1), mask=there)
        tl.store(tokens_ptr + offset(to, max_tokens) + slots, tokens, mask=kept)
        total += tl.sum(wanted, 0)
    for start in range(0, max_tokens, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        empty = (slots >= total) & (slots < max_tokens)
        tl.store(tokens_ptr + offset(to, max_tokens) + slots, tl.full((BLOCK,), -1, tl.int32), mask=empty)
    tl.store(sent_ptr + to, tl.minimum(total, max_tokens))


@triton.jit
def _copy(source, target, like_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr):
    """A row of elements from one address to another."""
    source_ptr = tl.multiple_of(source.to(like_ptr.dtype, bitcast=True), ALIGNMENT)
    target_ptr = tl.multiple_of(target.to(like_ptr.dtype, bitcast=True), ALIGNMENT)
    for start in range(0, COLUMNS, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(source_ptr + columns, mask=columns < COLUMNS)
        tl.store(target_ptr + columns, values, mask=columns < COLUMNS)


@triton.jit
def _fill(target, like_ptr, value, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The same value in every element of a row."""
    target_ptr = tl.multiple_of(target.to(like_ptr.dtype, bitcast=True), ALIGNMENT)
    for start in range(0, COLUMNS, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.full((BLOCK,), value, like_ptr.dtype.element_ty)
        tl.store(target_ptr + columns, values, mask=columns < COLUMNS)


@triton.jit
def _turn(turns_ptr, step, LAST: tl.constexpr):
    """The parity of this exchange: what the first launch finds. The last one leaves the other for the next exchange.

    No launch writes what another of its CTAs reads.
    """
    parity = tl.load(turns_ptr + tl.minimum(step, 1))
    if tl.program_id(0) == 0:
        if step == 0:
            tl.store(turns_ptr + 1, parity)
        if step == LAST:
            tl.store(turns_ptr, 1 - parity)
    return parity.to(tl.int64)


@triton.jit(do_not_specialize=["rank", "step"])
def _push_kernel(
    hidden_ptr, weights_ptr, ids_ptr, extra_ptr, tokens_ptr, sent_ptr, addresses_ptr, turns_ptr,
    rows_ptr, row_weights_ptr, row_ids_ptr, row_extra_ptr, received_ptr,
    rank, step,
    RANKS: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, LAST: tl.constexpr,
    ROWS_AT: tl.constexpr, ROW_BYTES: tl.constexpr,
    WEIGHTS_AT: tl.constexpr, IDS_AT: tl.constexpr, EXTRA_AT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    HIDDEN_BYTES: tl.constexpr, WEIGHT_BYTES: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, CTAS: tl.constexpr,
):  # fmt: skip
    """CTAs below CTAS push rows of part `step` to where they go, the others take those of the part before."""
    parity = _turn(turns_ptr, step, LAST)
    pid = tl.program_id(0)
    if pid < CTAS:
        for turn in range(RANKS):
            to = (rank + 1 + turn) % RANKS  # ranks start with different ones; last with what stays here
            sent = tl.load(sent_ptr + to)
            peer = tl.load(addresses_ptr + to)
            if (step == 0) & (pid == 0):
                count_ptr = (peer + (parity * RANKS + rank) * 4).to(sent_ptr.dtype, bitcast=True)
                tl.store(count_ptr, sent)
            for slot in range(step * PART + pid, tl.minimum(sent, (step + 1) * PART), CTAS):
                token = tl.load(tokens_ptr + to.to(tl.int64) * ROWS + slot).to(tl.int64)
                here = rank.to(tl.int64) * ROWS + slot
                there = peer + ROWS_AT + ((parity * RANKS + rank) * ROWS + slot) * ROW_BYTES
                stays = to == rank
                source = hidden_ptr.to(tl.int64) + token * HIDDEN_BYTES
                target = tl.where(stays, rows_ptr.to(tl.int64) + here * HIDDEN_BYTES, there)
                _copy(source, target, hidden_ptr, H, BLOCK_H, ALIGNMENT)
                if weights_ptr is not None:
                    source = weights_ptr.to(tl.int64) + token * WEIGHT_BYTES
                    target = row_weights_ptr.to(tl.int64) + here * WEIGHT_BYTES
                    _copy(source, tl.where(stays, target, there + WEIGHTS_AT), weights_ptr, K, BLOCK_K, 1)
                if ids_ptr is not None:
                    target = row_ids_ptr.to(tl.int64) + here * (4 * K)
                    target = tl.where(stays, target, there + IDS_AT)
                    _copy(ids_ptr.to(tl.int64) + token * (4 * K), target, ids_ptr, K, BLOCK_K, 4)
                if extra_ptr is not None:
                    target = row_extra_ptr.to(tl.int64) + here * C
                    target = tl.where(stays, target, there + EXTRA_AT)
                    _copy(extra_ptr.to(tl.int64) + token * C, target, extra_ptr, C, BLOCK_C, 1)
    elif step > 0:
        mine = tl.load(addresses_ptr + rank)
        for turn in range(RANKS):
            sender = (rank + 1 + turn) % RANKS
            count_ptr = (mine + (parity * RANKS + sender) * 4).to(sent_ptr.dtype, bitcast=True)
            count = tl.load(count_ptr)
            if (step == LAST) & (pid == CTAS):
                tl.store(received_ptr + sender, count)
            end = tl.where(sender == rank, 0, tl.minimum(count, step * PART))
            for slot in range((step - 1) * PART + pid - CTAS, end, CTAS):
                here = sender.to(tl.int64) * ROWS + slot
                came = mine + ROWS_AT + ((parity * RANKS + sender) * ROWS + slot) * ROW_BYTES
                _copy(came, rows_ptr.to(tl.int64) + here * HIDDEN_BYTES, hidden_ptr, H, BLOCK_H, ALIGNMENT)
                if weights_ptr is not None:
                    target = row_weights_ptr.to(tl.int64) + here * WEIGHT_BYTES
                    _copy(came + WEIGHTS_AT, target, weights_ptr, K, BLOCK_K, 1)
                if ids_ptr is not None:
                    _copy(came + IDS_AT, row_ids_ptr.to(tl.int64) + here * (4 * K), ids_ptr, K, BLOCK_K, 4)
                if extra_ptr is not None:
                    _copy(came + EXTRA_AT, row_extra_ptr.to(tl.int64) + here * C, extra_ptr, C, BLOCK_C, 1)
            first = tl.where(step == LAST, count, ROWS)
            for slot in range(first + pid - CTAS, ROWS, CTAS):
                here = sender.to(tl.int64) * ROWS + slot
                _fill(rows_ptr.to(tl.int64) + here * HIDDEN_BYTES, hidden_ptr, 0, H, BLOCK_H, ALIGNMENT)
                if weights_ptr is not None:
                    target = row_weights_ptr.to(tl.int64) + here * WEIGHT_BYTES
                    _fill(target, weights_ptr, 0, K, BLOCK_K, 1)
                if ids_ptr is not None:
                    _fill(row_ids_ptr.to(tl.int64) + here * (4 * K), ids_ptr, -1, K, BLOCK_K, 4)
                if extra_ptr is not None:
                    _fill(row_extra_ptr.to(tl.int64) + here * C, extra_ptr, 0, C, BLOCK_C, 1)


@triton.jit(do_not_specialize=["rank", "step", "num_tokens"])
def _pull_kernel(
    rows_ptr, slots_ptr, received_ptr, shared_ptr, addresses_ptr, turns_ptr, out_ptr,
    rank, step, num_tokens,
    RANKS: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, LAST: tl.constexpr,
    SUMS_AT: tl.constexpr, SUM_BYTES: tl.constexpr, H: tl.constexpr,
    ROW_BYTES: tl.constexpr, F64: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_H: tl.constexpr, CTAS: tl.constexpr,
):  # fmt: skip
    """CTAs below CTAS lay out rows of part `step` for other ranks, the others sum up tokens of the part before.

    A token's slots on other ranks are at most its own number, so what it needs lies there.
    """
    parity = _turn(turns_ptr, step, LAST)
    pid = tl.program_id(0)
    if pid < CTAS:
        mine = tl.load(addresses_ptr + rank)
        for turn in range(RANKS - 1):
            to = (rank + 1 + turn) % RANKS
            end = tl.minimum(tl.load(received_ptr + to), (step + 1) * PART)
            for slot in range(step * PART + pid, end, CTAS):
                source = rows_ptr.to(tl.int64) + (to.to(tl.int64) * ROWS + slot) * ROW_BYTES
                target = mine + SUMS_AT + ((parity * RANKS + to) * ROWS + slot) * SUM_BYTES
                _copy(source, target, rows_ptr, H, BLOCK_H, ALIGNMENT)
    elif step > 0:
        for token in range((step - 1) * PART + pid - CTAS, tl.minimum(num_tokens, step * PART), CTAS):
            out = offset(token, H)
            for start in range(0, H, BLOCK_H):
                columns = start + tl.arange(0, BLOCK_H)
                inside = columns < H
                total = tl.zeros((BLOCK_H,), tl.float64 if F64 else tl.float32)
                # The far row is asked for with the near one.
                for holder in tl.range(0, RANKS, loop_unroll_factor=2):
                    slot = tl.load(slots_ptr + offset(token, RANKS) + holder)
                    row = tl.maximum(slot, 0).to(tl.int64)
                    here = rows_ptr.to(tl.int64) + (rank.to(tl.int64) * ROWS + row) * ROW_BYTES
                    there = tl.load(addresses_ptr + holder) + SUMS_AT
                    there += ((parity * RANKS + rank) * ROWS + row) * SUM_BYTES
                    source = tl.where(holder == rank, here, there)
                    row_ptr = tl.multiple_of(source.to(rows_ptr.dtype, bitcast=True), ALIGNMENT)
                    part = tl.load(row_ptr + columns, mask=columns < tl.where(slot >= 0, H, 0), other=0.0)
                    total += part.to(total.dtype)
                if shared_ptr is not None:
                    total += tl.load(shared_ptr + out + columns, mask=inside, other=0.0).to(total.dtype)
                tl.store(out_ptr + out + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def plan_exchange_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.plan_exchange`."""
    (num_tokens, top_k), (num_experts,) = args.topk_ids.shape, args.owners.shape
    num_ranks, max_tokens, block_k = args.num_ranks, args.max_tokens, next_power_of_2(top_k)
    num_warps = 4 if max_tokens <= 256 else 16
    block = min(max(num_warps * 32 * _PLAN_ELEMENTS // block_k, 16), next_power_of_2(max_tokens))
    given = {
        "ids_ptr": Ref("topk_ids"),
        "owners_ptr": Ref("owners"),
        "slots_ptr": Ref("slots"),
        "tokens_ptr": Ref("tokens"),
        "sent_ptr": Ref("sent"),
        "num_tokens": num_tokens,
        "top_k": top_k,
        "stride_t": args.topk_ids.strides[0],
        "stride_k": args.topk_ids.strides[1],
        "num_experts": num_experts,
        "num_ranks": num_ranks,
        "max_tokens": max_tokens,
        "BLOCK": block,
        "BLOCK_K": block_k,
    }
    buffers = (
        Buffer("slots", (num_tokens, num_ranks), torch.int32),
        Buffer("tokens", (num_ranks, max_tokens), torch.int32),
        Buffer("sent", (num_ranks,), torch.int32),
    )
    launch = Launch(_plan_exchange_kernel, (num_ranks,), given, num_warps, 1)
    return Program(buffers, (launch,), ("slots", "tokens", "sent"))


def _common_args(layout: ExchangeLayout, rank: int, hidden: TensorMeta, gpu: Gpu) -> dict[str, Any]:
    """Arguments of both kernels, for rows like `hidden`."""
    columns, item = hidden.shape[1], hidden.dtype.itemsize
    part = cdiv(layout.max_tokens, layout.num_parts)
    return {
        "addresses_ptr": Ref("addresses"),
        "turns_ptr": Ref("turns"),
        "rank": rank,
        "RANKS": layout.num_ranks,
        "ROWS": layout.max_tokens,
        "PART": part,
        "LAST": layout.num_parts,
        "H": columns,
        "ALIGNMENT": 16 if columns * item % 16 == 0 else item,
        "BLOCK_H": min(next_power_of_2(columns), _BLOCK_BYTES // item),
        "CTAS": min(_CTAS * gpu.multiprocessors, layout.num_ranks * part),
    }


def _steps(kernel: Any, args: dict[str, Any]) -> tuple[Launch, ...]:
    """A launch before each barrier and one behind the last."""
    grid = (2 * args["CTAS"],)
    return tuple(Launch(kernel, grid, {**args, "step": step}, 4, 1) for step in range(args["LAST"] + 1))


def push_program(args: Any, layout: ExchangeLayout, rank: int, gpu: Gpu) -> Program:
    """The launches of `moe.push_rows`, between which a barrier is due; of a record whose tensors are metadata.

    Tensors are contiguous; floating ones are integers of their size, since nothing is computed.
    """
    hidden, weights, ids, extra = args.hidden_states, args.topk_weights, args.topk_ids, args.extra
    top_k = 0 if ids is None and weights is None else (ids or weights).shape[1]
    num_extra, num_rows = 0 if extra is None else extra.shape[1], layout.num_ranks * layout.max_tokens
    row_bytes = hidden.shape[1] * hidden.dtype.itemsize
    weight_bytes = 0 if weights is None else top_k * weights.dtype.itemsize
    fields = fields_of(row_bytes, weight_bytes, 0 if ids is None else 4 * top_k, num_extra)
    buffers = [Buffer("rows", (num_rows, hidden.shape[1]), hidden.dtype)]
    for name, meta in (("row_weights", weights), ("row_ids", ids), ("row_extra", extra)):
        if meta is not None:
            buffers.append(Buffer(name, (num_rows, meta.shape[1]), meta.dtype))
    buffers.append(Buffer("received", (layout.num_ranks,), torch.int32))
    given = {
        **_common_args(layout, rank, hidden, gpu),
        "hidden_ptr": Ref("hidden_states"),
        "weights_ptr": None if weights is None else Ref("topk_weights"),
        "ids_ptr": None if ids is None else Ref("topk_ids"),
        "extra_ptr": None if extra is None else Ref("extra"),
        "tokens_ptr": Ref("tokens"),
        "sent_ptr": Ref("sent"),
        "rows_ptr": Ref("rows"),
        "row_weights_ptr": None if weights is None else Ref("row_weights"),
        "row_ids_ptr": None if ids is None else Ref("row_ids"),
        "row_extra_ptr": None if extra is None else Ref("row_extra"),
        "received_ptr": Ref("received"),
        "ROWS_AT": layout.rows_at,
        "ROW_BYTES": layout.row_bytes,
        "WEIGHTS_AT": fields.weights_at,
        "IDS_AT": fields.ids_at,
        "EXTRA_AT": fields.extra_at,
        "K": top_k,
        "C": num_extra,
        "HIDDEN_BYTES": row_bytes,
        "WEIGHT_BYTES": weight_bytes,
        "BLOCK_K": next_power_of_2(top_k),
        "BLOCK_C": min(next_power_of_2(num_extra), 1024),
    }
    return Program(tuple(buffers), _steps(_push_kernel, given), tuple(buffer.name for buffer in buffers))


def pull_program(args: Any, layout: ExchangeLayout, rank: int, gpu: Gpu) -> Program:
    """The launches of `moe.pull_sums`, between which a barrier is due; of a record whose tensors are metadata."""
    rows, num_tokens = args.rows, args.plan.slots.shape[0]
    given = {
        **_common_args(layout, rank, rows, gpu),
        "rows_ptr": Ref("rows"),
        "slots_ptr": Ref("slots"),
        "received_ptr": Ref("received"),
        "shared_ptr": None if args.shared is None else Ref("shared"),
        "out_ptr": Ref("sums"),
        "num_tokens": num_tokens,
        "SUMS_AT": layout.sums_at,
        "SUM_BYTES": layout.sum_bytes,
        "ROW_BYTES": rows.shape[1] * rows.dtype.itemsize,
        "F64": rows.dtype == torch.float64,
    }
    sums = Buffer("sums", (num_tokens, rows.shape[1]), rows.dtype)
    return Program((sums,), _steps(_pull_kernel, given), ("sums",))
