"""Rows between ranks over symmetric memory: a push of rows, and sums back where their tokens came from.

Launch i of an exchange writes part i of the rows to other ranks and, with other CTAs, reads part i - 1 of what they
have written, so that what only memory limits is hidden behind what the links limit. In between ranks wait for each
other (`signals.py`).
"""

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref, TensorMeta
from moe_ops.kernels.signals import exchange_number, tell_all, wait_for_all
from moe_ops.peers import ExchangeLayout, fields_of

_BLOCK_BYTES = 16384  # of a row that a CTA holds: 32 registers a thread
_CTAS = 4  # of a multiprocessor: while one waits for a row others move theirs


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


@triton.jit(do_not_specialize=["rank", "step", "before", "start", "end"])
def _push_kernel(
    hidden_ptr, weights_ptr, ids_ptr, extra_ptr, tokens_ptr, sent_ptr, addresses_ptr, turns_ptr,
    rows_ptr, row_weights_ptr, row_ids_ptr, row_extra_ptr, received_ptr,
    rank, step, before, start, end,
    RANKS: tl.constexpr, ROWS: tl.constexpr, LAST: tl.constexpr,
    SIGNALS_AT: tl.constexpr, ROWS_AT: tl.constexpr, ROW_BYTES: tl.constexpr,
    WEIGHTS_AT: tl.constexpr, IDS_AT: tl.constexpr, EXTRA_AT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    HIDDEN_BYTES: tl.constexpr, WEIGHT_BYTES: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, CTAS: tl.constexpr,
):  # fmt: skip
    """CTAs below CTAS push rows [start, end) to others; the rest move what stays and take rows [before, start)."""
    number = exchange_number(turns_ptr, step, LAST)
    parity, signal = number % 2, number * LAST + step
    pid = tl.program_id(0)
    takes = pid >= CTAS
    cta = pid % CTAS
    for turn in range(tl.where(takes, RANKS - 1, 0), tl.where(takes, RANKS, RANKS - 1)):
        to = (rank + 1 + turn) % RANKS  # ranks start with different ones; what stays here comes last
        sent = tl.load(sent_ptr + to)
        peer = tl.load(addresses_ptr + to)
        if (step == 0) & (pid == 0):
            count_ptr = (peer + (parity * RANKS + rank) * 4).to(sent_ptr.dtype, bitcast=True)
            tl.store(count_ptr, sent)
        for slot in range(start + cta, tl.minimum(sent, end), CTAS):
            token = tl.load(tokens_ptr + to.to(tl.int64) * ROWS + slot).to(tl.int64)
            here = rank.to(tl.int64) * ROWS + slot
            there = peer + ROWS_AT + ((parity * RANKS + rank) * ROWS + slot) * ROW_BYTES
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
    if takes:
        if step > 0:
            wait_for_all(signal, addresses_ptr, turns_ptr, rank, RANKS, SIGNALS_AT)
            mine = tl.load(addresses_ptr + rank)
            for turn in range(RANKS):
                sender = (rank + 1 + turn) % RANKS
                stays = sender == rank
                count_ptr = (mine + (parity * RANKS + sender) * 4).to(sent_ptr.dtype, bitcast=True)
                count = tl.load(tl.where(stays, sent_ptr + rank, count_ptr))
                for slot in range(before + cta, tl.where(stays, 0, tl.minimum(count, start)), CTAS):
                    here = sender.to(tl.int64) * ROWS + slot
                    came = mine + ROWS_AT + ((parity * RANKS + sender) * ROWS + slot) * ROW_BYTES
                    _copy(
                        came, rows_ptr.to(tl.int64) + here * HIDDEN_BYTES, hidden_ptr, H, BLOCK_H, ALIGNMENT
                    )
                    if weights_ptr is not None:
                        target = row_weights_ptr.to(tl.int64) + here * WEIGHT_BYTES
                        _copy(came + WEIGHTS_AT, target, weights_ptr, K, BLOCK_K, 1)
                    if ids_ptr is not None:
                        _copy(
                            came + IDS_AT, row_ids_ptr.to(tl.int64) + here * (4 * K), ids_ptr, K, BLOCK_K, 4
                        )
                    if extra_ptr is not None:
                        _copy(
                            came + EXTRA_AT, row_extra_ptr.to(tl.int64) + here * C, extra_ptr, C, BLOCK_C, 1
                        )
                if step == 1:  # while the next part is on its way, if there is one
                    if cta == 0:
                        tl.store(received_ptr + sender, count)
                    for slot in range(count + cta, ROWS, CTAS):
                        here = sender.to(tl.int64) * ROWS + slot
                        _fill(
                            rows_ptr.to(tl.int64) + here * HIDDEN_BYTES, hidden_ptr, 0, H, BLOCK_H, ALIGNMENT
                        )
                        if weights_ptr is not None:
                            target = row_weights_ptr.to(tl.int64) + here * WEIGHT_BYTES
                            _fill(target, weights_ptr, 0, K, BLOCK_K, 1)
                        if ids_ptr is not None:
                            _fill(row_ids_ptr.to(tl.int64) + here * (4 * K), ids_ptr, -1, K, BLOCK_K, 4)
                        if extra_ptr is not None:
                            _fill(row_extra_ptr.to(tl.int64) + here * C, extra_ptr, 0, C, BLOCK_C, 1)
    elif step < LAST:
        tell_all(signal + 1, addresses_ptr, turns_ptr, rank, RANKS, SIGNALS_AT, CTAS)


@triton.jit(do_not_specialize=["rank", "step", "before", "start", "end", "num_tokens"])
def _return_kernel(
    rows_ptr, slots_ptr, received_ptr, shared_ptr, addresses_ptr, turns_ptr, out_ptr,
    rank, step, before, start, end, num_tokens,
    RANKS: tl.constexpr, ROWS: tl.constexpr, LAST: tl.constexpr,
    SIGNALS_AT: tl.constexpr, SUMS_AT: tl.constexpr, SUM_BYTES: tl.constexpr, H: tl.constexpr,
    ROW_BYTES: tl.constexpr, F64: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_H: tl.constexpr, CTAS: tl.constexpr,
):  # fmt: skip
    """CTAs below CTAS write rows [start, end) to where their tokens are, the others sum up tokens [before, start).

    A token's slots on other ranks are at most its own number, so what it needs has come.
    """
    number = exchange_number(turns_ptr, step, LAST)
    parity, signal = number % 2, number * LAST + step
    pid = tl.program_id(0)
    if pid < CTAS:
        if step < LAST:
            for turn in range(RANKS - 1):
                to = (rank + 1 + turn) % RANKS
                sums = tl.load(addresses_ptr + to) + SUMS_AT
                for slot in range(start + pid, tl.minimum(tl.load(received_ptr + to), end), CTAS):
                    source = rows_ptr.to(tl.int64) + (to.to(tl.int64) * ROWS + slot) * ROW_BYTES
                    target = sums + ((parity * RANKS + rank) * ROWS + slot) * SUM_BYTES
                    _copy(source, target, rows_ptr, H, BLOCK_H, ALIGNMENT)
            tell_all(signal + 1, addresses_ptr, turns_ptr, rank, RANKS, SIGNALS_AT, CTAS)
    elif step > 0:
        wait_for_all(signal, addresses_ptr, turns_ptr, rank, RANKS, SIGNALS_AT)
        mine = tl.load(addresses_ptr + rank) + SUMS_AT
        for token in range(before + pid - CTAS, tl.minimum(num_tokens, start), CTAS):
            out = offset(token, H)
            for first in range(0, H, BLOCK_H):
                columns = first + tl.arange(0, BLOCK_H)
                inside = columns < H
                total = tl.zeros((BLOCK_H,), tl.float64 if F64 else tl.float32)
                # The second row is asked for with the first.
                for holder in tl.range(0, RANKS, loop_unroll_factor=2):
                    slot = tl.load(slots_ptr + offset(token, RANKS) + holder)
                    row = tl.maximum(slot, 0).to(tl.int64)
                    here = rows_ptr.to(tl.int64) + (rank.to(tl.int64) * ROWS + row) * ROW_BYTES
                    came = mine + ((parity * RANKS + holder) * ROWS + row) * SUM_BYTES
                    source = tl.where(holder == rank, here, came)
                    row_ptr = tl.multiple_of(source.to(rows_ptr.dtype, bitcast=True), ALIGNMENT)
                    part = tl.load(row_ptr + columns, mask=columns < tl.where(slot >= 0, H, 0), other=0.0)
                    total += part.to(total.dtype)
                if shared_ptr is not None:
                    total += tl.load(shared_ptr + out + columns, mask=inside, other=0.0).to(total.dtype)
                tl.store(out_ptr + out + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def _common_args(layout: ExchangeLayout, rank: int, hidden: TensorMeta, gpu: Gpu) -> dict[str, Any]:
    """Arguments of both kernels, for rows like `hidden`."""
    columns, item = hidden.shape[1], hidden.dtype.itemsize
    largest = max(end - start for start, end in pairwise(layout.edges))
    return {
        "addresses_ptr": Ref("addresses"),
        "turns_ptr": Ref("turns"),
        "rank": rank,
        "RANKS": layout.num_ranks,
        "ROWS": layout.max_tokens,
        "LAST": layout.num_parts,
        "SIGNALS_AT": layout.signals_at,
        "H": columns,
        "ALIGNMENT": 16 if columns * item % 16 == 0 else item,
        "BLOCK_H": min(next_power_of_2(columns), _BLOCK_BYTES // item),
        "CTAS": min(_CTAS * gpu.multiprocessors, (layout.num_ranks - 1) * largest),
    }


def _steps(kernel: Any, args: dict[str, Any], layout: ExchangeLayout) -> tuple[Launch, ...]:
    """A launch for each part, and one that reads the last."""
    grid, starts = (2 * args["CTAS"],), layout.edges
    bounds = zip((0, *starts), starts, (*starts[1:], starts[-1]), strict=False)
    return tuple(
        Launch(kernel, grid, {**args, "step": step, "before": before, "start": start, "end": end}, 4, 1)
        for step, (before, start, end) in enumerate(bounds)
    )


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
    return Program(
        tuple(buffers), _steps(_push_kernel, given, layout), tuple(buffer.name for buffer in buffers)
    )


def pull_program(args: Any, layout: ExchangeLayout, rank: int, gpu: Gpu) -> Program:
    """The launches of `moe.pull_sums`; of a record whose tensors are metadata."""
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
    return Program((sums,), _steps(_return_kernel, given, layout), ("sums",))
