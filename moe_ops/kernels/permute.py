"""permute: the gather that brings token rows into expert order, and its gradient, a sum over a token's K rows.

The gradient first inverts the permutation, then gathers: deterministic, no atomics.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import cdiv, next_power_of_2, offset, source_row
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref, TensorMeta
from moe_ops.kernels.tiles import expert_args, has_expert

_MAX_COLUMNS = 1024
_COPIED_COLUMNS = (
    2048  # two pieces of 16 bytes to a thread: 10 % faster than one (H200, 2048 and 4096 columns)
)
_SCATTER_BLOCK = 1024


@triton.jit(do_not_specialize=["top_k", "num_tokens"])
def _permute_kernel(
    hidden_ptr, slots_ptr, offsets_ptr, out_ptr,
    top_k, num_tokens, num_experts, num_columns, stride_t, stride_h,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = hidden[sorted_slots[row] // top_k], zeros for a slot of no token; grid (S * column blocks).

    With `offsets_ptr` rows past the last expert are not written.
    """
    column_blocks = tl.cdiv(num_columns, BLOCK)
    row = (tl.program_id(0) // column_blocks).to(tl.int64)
    if has_expert(row, offsets_ptr, num_experts):
        columns = (tl.program_id(0) % column_blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < num_columns
        token, known = source_row(slots_ptr, row, row >= 0, top_k, num_tokens)
        row_ptr = hidden_ptr + offset(token, stride_t)
        readable = columns < tl.where(known, num_columns, 0)
        values = tl.load(row_ptr + offset(columns, stride_h), mask=readable, other=0.0)
        tl.store(out_ptr + row * num_columns + columns, values, mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def _invert_kernel(slots_ptr, rows_ptr, num_slots, BLOCK: tl.constexpr):
    """rows[sorted_slots[row]] = row. A slot that `sorted_slots` does not name keeps what memory held."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slots_ptr + rows, mask=rows < num_slots, other=-1)
    tl.store(rows_ptr + slots, rows, mask=(slots >= 0) & (slots < num_slots))


@triton.jit(do_not_specialize=["top_k", "num_slots"])
def _permute_backward_kernel(
    grad_ptr, rows_ptr, slots_ptr, out_ptr,
    top_k, num_slots, num_columns, stride_s, stride_h,
    F64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[token] = sum over k of grad[rows[token * top_k + k]], in slot order; a slot that has no row adds nothing."""
    column_blocks = tl.cdiv(num_columns, BLOCK)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    columns = (tl.program_id(0) % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float64 if F64 else tl.float32)
    for k in range(top_k):
        slot = token * top_k + k
        row = tl.load(rows_ptr + slot)
        readable = (row >= 0) & (row < num_slots)
        named = tl.load(slots_ptr + row, mask=readable, other=-1) == slot
        row_ptr = grad_ptr + offset(row, stride_s) + offset(columns, stride_h)
        # Both loads go out together: what the check rejects is read and not added.
        values = tl.load(row_ptr, mask=columns < tl.where(readable, num_columns, 0), other=0.0)
        total += tl.where(named, values.to(total.dtype), 0.0)
    tl.store(out_ptr + token * num_columns + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def column_block(num_columns: int) -> int:
    """Columns per program of the row kernels."""
    return min(next_power_of_2(num_columns), _MAX_COLUMNS)


def permute_launch(
    hidden_states: TensorMeta, num_slots: int, num_experts: int | None = None
) -> tuple[Buffer, Launch]:
    """Buffer `permuted` [S, H] and the launch that fills it from `hidden_states` and `sorted_slots`.

    With `num_experts` it leaves out rows past the last of so many, as `expert_offsets` says.
    """
    num_tokens, columns = hidden_states.shape
    block = min(next_power_of_2(columns), _COPIED_COLUMNS)
    args = {
        "hidden_ptr": Ref("hidden_states"),
        "slots_ptr": Ref("sorted_slots"),
        "out_ptr": Ref("permuted"),
        "top_k": num_slots // max(num_tokens, 1),
        "num_tokens": num_tokens,
        **expert_args(num_experts),
        "num_columns": columns,
        "stride_t": hidden_states.strides[0],
        "stride_h": hidden_states.strides[1],
        "BLOCK": block,
    }
    launch = Launch(_permute_kernel, (num_slots * cdiv(columns, block),), args, 4, 1)
    return Buffer("permuted", (num_slots, columns), hidden_states.dtype), launch


def permute_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.permute`."""
    buffer, launch = permute_launch(args.hidden_states, args.sorted_slots.shape[0])
    return Program((buffer,), (launch,), (buffer.name,))


def permute_backward_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.permute_backward`."""
    grad, num_tokens = args.grad, args.num_tokens
    (num_slots, columns), block = grad.shape, column_block(grad.shape[1])
    invert = {
        "slots_ptr": Ref("sorted_slots"),
        "rows_ptr": Ref("slot_rows"),
        "num_slots": num_slots,
        "BLOCK": _SCATTER_BLOCK,
    }
    gather = {
        "grad_ptr": Ref("grad"),
        "rows_ptr": Ref("slot_rows"),
        "slots_ptr": Ref("sorted_slots"),
        "out_ptr": Ref("grad_hidden"),
        "top_k": num_slots // max(num_tokens, 1),
        "num_slots": num_slots,
        "num_columns": columns,
        "stride_s": grad.strides[0],
        "stride_h": grad.strides[1],
        "F64": grad.dtype == torch.float64,
        "BLOCK": block,
    }
    buffers = (
        Buffer("slot_rows", (num_slots,), torch.int32),
        Buffer("grad_hidden", (num_tokens, columns), grad.dtype),
    )
    launches = (
        Launch(_invert_kernel, (cdiv(num_slots, _SCATTER_BLOCK),), invert, 4, 1),
        Launch(_permute_backward_kernel, (num_tokens * cdiv(columns, block),), gather, 4, 2),
    )
    return Program(buffers, launches, ("grad_hidden",))
