"""Rows between ranks over symmetric memory: a push of rows, and sums back where their tokens came from.

Each is one launch. One half of its CTAs writes rows to other ranks and a signal behind each (`signals.py`), the other
half reads rows as signals come, so that what only memory limits is hidden behind what the links limit.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref, TensorMeta
from moe_ops.kernels.signals import (
    SIGNAL_BYTES,
    leave,
    tell,
    tell_count,
    told_count,
    wait_for,
    wait_for_count,
)
from moe_ops.peers import ExchangeLayout, fields_of

_BLOCK_BYTES = 16384  # of a row that a CTA holds: 32 registers a thread
_SUMMED_BYTES = 8192  # of a row that is summed: in float32, and there are two
# CTAs of a multiprocessor that write, and as many that read: while one waits for a row others move theirs.
_CTAS = 4


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


@triton.jit(do_not_specialize=["rank", "first"])
def _push_kernel(
    hidden_ptr, weights_ptr, ids_ptr, extra_ptr, tokens_ptr, sent_ptr, addresses_ptr, turns_ptr,
    rows_ptr, row_weights_ptr, row_ids_ptr, row_extra_ptr, received_ptr, rank, first,
    RANKS: tl.constexpr, ROWS: tl.constexpr, SIGNALS_AT: tl.constexpr,
    ROWS_AT: tl.constexpr, ROW_BYTES: tl.constexpr,
    WEIGHTS_AT: tl.constexpr, IDS_AT: tl.constexpr, EXTRA_AT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    HIDDEN_BYTES: tl.constexpr, WEIGHT_BYTES: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, CTAS: tl.constexpr,
):  # fmt: skip
    """CTAs below CTAS push rows to other ranks; the rest move what stays here, and take rows as they come."""
    number = tl.load(turns_ptr)
    parity = number % 2
    pid = first + tl.program_id(0)
    takes, cta = pid >= CTAS, pid % CTAS
    if pid == 0:
        for turn in range(RANKS - 1):
            to = (rank + 1 + turn) % RANKS
            count_at = tl.load(addresses_ptr + to) + (parity * RANKS + rank) * SIGNAL_BYTES
            tell_count(count_at, number, tl.load(sent_ptr + to), turns_ptr, ROWS)
    # A row to each of the others in turn, so that none waits for rows that all come last.
    ways, most = RANKS - 1, _most_of_others(sent_ptr, rank, RANKS)
    if takes:
        ways, most = 1, tl.load(sent_ptr + rank)
    for index in range(cta, most * ways, CTAS):
        to, slot = (rank + tl.where(takes, 0, 1) + index % ways) % RANKS, index // ways
        if slot < tl.load(sent_ptr + to):
            peer = tl.load(addresses_ptr + to)
            token = tl.load(tokens_ptr + to.to(tl.int64) * ROWS + slot).to(tl.int64)
            here = rank.to(tl.int64) * ROWS + slot
            place = (parity * RANKS + rank) * ROWS + slot
            there = peer + ROWS_AT + place * ROW_BYTES
            source = hidden_ptr.to(tl.int64) + token * HIDDEN_BYTES
            target = tl.where(takes, rows_ptr.to(tl.int64) + here * HIDDEN_BYTES, there)
            _copy(source, target, hidden_ptr, H, BLOCK_H, ALIGNMENT)
            if weights_ptr is not None:
                source = weights_ptr.to(tl.int64) + token * WEIGHT_BYTES
                target = row_weights_ptr.to(tl.int64) + here * WEIGHT_BYTES
                _copy(source, tl.where(takes, target, there + WEIGHTS_AT), weights_ptr, K, BLOCK_K, 1)
            if ids_ptr is not None:
                target = row_ids_ptr.to(tl.int64) + here * (4 * K)
                target = tl.where(takes, target, there + IDS_AT)
                _copy(ids_ptr.to(tl.int64) + token * (4 * K), target, ids_ptr, K, BLOCK_K, 4)
            if extra_ptr is not None:
                target = row_extra_ptr.to(tl.int64) + here * C
                target = tl.where(takes, target, there + EXTRA_AT)
                _copy(extra_ptr.to(tl.int64) + token * C, target, extra_ptr, C, BLOCK_C, 1)
            if not takes:
                tell(peer + SIGNALS_AT + place * SIGNAL_BYTES, number + 1, turns_ptr)
    if takes:
        mine = tl.load(addresses_ptr + rank)
        counts_at = mine + parity * RANKS * SIGNAL_BYTES
        for sender in range(RANKS):
            count = tl.load(sent_ptr + rank)
            if sender != rank:
                count = wait_for_count(counts_at + sender * SIGNAL_BYTES, number, turns_ptr, ROWS)
            if cta == 0:
                tl.store(received_ptr + sender, count)
            for slot in range(count + cta, ROWS, CTAS):
                here = offset(sender, ROWS) + slot
                _fill(rows_ptr.to(tl.int64) + here * HIDDEN_BYTES, hidden_ptr, 0, H, BLOCK_H, ALIGNMENT)
                if weights_ptr is not None:
                    target = row_weights_ptr.to(tl.int64) + here * WEIGHT_BYTES
                    _fill(target, weights_ptr, 0, K, BLOCK_K, 1)
                if ids_ptr is not None:
                    _fill(row_ids_ptr.to(tl.int64) + here * (4 * K), ids_ptr, -1, K, BLOCK_K, 4)
                if extra_ptr is not None:
                    _fill(row_extra_ptr.to(tl.int64) + here * C, extra_ptr, 0, C, BLOCK_C, 1)
        # Loaded again: kept over the loop above, Triton 3.8 has too few registers for it.
        mine = tl.load(addresses_ptr + rank)
        counts_at = mine + parity * RANKS * SIGNAL_BYTES
        for index in range(cta, ROWS * (RANKS - 1), CTAS):
            sender, slot = (rank + 1 + index % (RANKS - 1)) % RANKS, index // (RANKS - 1)
            here = sender.to(tl.int64) * ROWS + slot
            if slot < told_count(counts_at + sender * SIGNAL_BYTES, number, turns_ptr, ROWS):
                place = (parity * RANKS + sender) * ROWS + slot
                wait_for(mine + SIGNALS_AT + place * SIGNAL_BYTES, number + 1, turns_ptr)
                came = mine + ROWS_AT + place * ROW_BYTES
                _copy(came, rows_ptr.to(tl.int64) + here * HIDDEN_BYTES, hidden_ptr, H, BLOCK_H, ALIGNMENT)
                if weights_ptr is not None:
                    target = row_weights_ptr.to(tl.int64) + here * WEIGHT_BYTES
                    _copy(came + WEIGHTS_AT, target, weights_ptr, K, BLOCK_K, 1)
                if ids_ptr is not None:
                    _copy(came + IDS_AT, row_ids_ptr.to(tl.int64) + here * (4 * K), ids_ptr, K, BLOCK_K, 4)
                if extra_ptr is not None:
                    _copy(came + EXTRA_AT, row_extra_ptr.to(tl.int64) + here * C, extra_ptr, C, BLOCK_C, 1)
    leave(turns_ptr, number, 2 * CTAS)


@triton.jit
def _most_of_others(counts_ptr, rank, RANKS: tl.constexpr):
    """Rows of that other rank which has most of them."""
    most = tl.zeros((), tl.int32)
    for turn in range(RANKS - 1):
        most = tl.maximum(most, tl.load(counts_ptr + (rank + 1 + turn) % RANKS))
    return most


@triton.jit(do_not_specialize=["rank", "first", "num_tokens"])
def _return_kernel(
    rows_ptr, slots_ptr, received_ptr, shared_ptr, addresses_ptr, turns_ptr, out_ptr, rank, first, num_tokens,
    RANKS: tl.constexpr, ROWS: tl.constexpr, SIGNALS_AT: tl.constexpr,
    SUMS_AT: tl.constexpr, SUM_BYTES: tl.constexpr, H: tl.constexpr,
    ROW_BYTES: tl.constexpr, F64: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_H: tl.constexpr, CTAS: tl.constexpr,
):  # fmt: skip
    """CTAs below CTAS write rows to where their tokens are, the others sum up tokens as rows come."""
    number = tl.load(turns_ptr)
    parity = number % 2
    pid = first + tl.program_id(0)
    cta = pid % CTAS
    mine = tl.load(addresses_ptr + rank)
    if pid < CTAS:
        for turn in range(tl.where(cta == 0, RANKS - 1, 0)):
            to = (rank + 1 + turn) % RANKS
            count_at = tl.load(addresses_ptr + to) + (parity * RANKS + rank) * SIGNAL_BYTES
            tell_count(count_at, number, tl.load(received_ptr + to), turns_ptr, ROWS)
        for index in range(cta, _most_of_others(received_ptr, rank, RANKS) * (RANKS - 1), CTAS):
            to, slot = (rank + 1 + index % (RANKS - 1)) % RANKS, index // (RANKS - 1)
            if slot < tl.load(received_ptr + to):
                peer = tl.load(addresses_ptr + to)
                source = rows_ptr.to(tl.int64) + (to.to(tl.int64) * ROWS + slot) * ROW_BYTES
                place = (parity * RANKS + rank) * ROWS + slot
                _copy(source, peer + SUMS_AT + place * SUM_BYTES, rows_ptr, H, BLOCK_H, ALIGNMENT)
                tell(peer + SIGNALS_AT + place * SIGNAL_BYTES, number + 1, turns_ptr)
    else:
        # Also for ranks that send nothing: they have read all of the exchange that this parity had before.
        for turn in range(RANKS - 1):
            sender = (rank + 1 + turn) % RANKS
            count_at = mine + (parity * RANKS + sender) * SIGNAL_BYTES
            wait_for_count(count_at, number, turns_ptr, ROWS)
        for token in range(cta, num_tokens, CTAS):
            for holder in range(RANKS):
                slot = tl.load(slots_ptr + offset(token, RANKS) + holder)
                if (slot >= 0) & (holder != rank):
                    place = (parity * RANKS + holder) * ROWS + slot
                    wait_for(mine + SIGNALS_AT + place * SIGNAL_BYTES, number + 1, turns_ptr)
            out = offset(token, H)
            for start in range(0, H, BLOCK_H):
                columns = start + tl.arange(0, BLOCK_H)
                inside = columns < H
                total = tl.zeros((BLOCK_H,), tl.float64 if F64 else tl.float32)
                # The second row is asked for with the first.
                for holder in tl.range(0, RANKS, loop_unroll_factor=2):
                    slot = tl.load(slots_ptr + offset(token, RANKS) + holder)
                    row = tl.maximum(slot, 0).to(tl.int64)
                    here = rows_ptr.to(tl.int64) + (rank.to(tl.int64) * ROWS + row) * ROW_BYTES
                    came = mine + SUMS_AT + ((parity * RANKS + holder) * ROWS + row) * SUM_BYTES
                    source = tl.where(holder == rank, here, came)
                    row_ptr = tl.multiple_of(source.to(rows_ptr.dtype, bitcast=True), ALIGNMENT)
                    part = tl.load(row_ptr + columns, mask=columns < tl.where(slot >= 0, H, 0), other=0.0)
                    total += part.to(total.dtype)
                if shared_ptr is not None:
                    total += tl.load(shared_ptr + out + columns, mask=inside, other=0.0).to(total.dtype)
                tl.store(out_ptr + out + columns, total.to(out_ptr.dtype.element_ty), mask=inside)
    leave(turns_ptr, number, 2 * CTAS)


def _common_args(
    layout: ExchangeLayout, rank: int, hidden: TensorMeta, block_bytes: int, gpu: Gpu
) -> dict[str, Any]:
    """Arguments of both kernels, for rows like `hidden`."""
    columns, item = hidden.shape[1], hidden.dtype.itemsize
    return {
        "addresses_ptr": Ref("addresses"),
        "turns_ptr": Ref("turns"),
        "rank": rank,
        "first": 0,  # a part of the CTAs may be a launch of its own, where ranks take turns
        "RANKS": layout.num_ranks,
        "ROWS": layout.max_tokens,
        "SIGNALS_AT": layout.signals_at,
        "H": columns,
        "ALIGNMENT": 16 if columns * item % 16 == 0 else item,
        "BLOCK_H": min(next_power_of_2(columns), block_bytes // item),
        "CTAS": min(_CTAS * gpu.multiprocessors, (layout.num_ranks - 1) * layout.max_tokens),
    }


def _launch(kernel: Any, args: dict[str, Any]) -> Launch:
    """One half of its CTAs writes to other ranks, the other half reads. Those that write never wait, and come first."""
    return Launch(kernel, (2 * args["CTAS"],), args, num_warps=4, num_stages=1)


def push_program(args: Any, layout: ExchangeLayout, rank: int, gpu: Gpu) -> Program:
    """The launches of `moe.push_rows`; of a record whose tensors are metadata.

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
        **_common_args(layout, rank, hidden, _BLOCK_BYTES, gpu),
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
    return Program(tuple(buffers), (_launch(_push_kernel, given),), tuple(buffer.name for buffer in buffers))


def pull_program(args: Any, layout: ExchangeLayout, rank: int, gpu: Gpu) -> Program:
    """The launches of `moe.pull_sums`; of a record whose tensors are metadata."""
    rows, num_tokens = args.rows, args.plan.slots.shape[0]
    given = {
        **_common_args(layout, rank, rows, _SUMMED_BYTES, gpu),
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
    return Program((sums,), (_launch(_return_kernel, given),), ("sums",))
