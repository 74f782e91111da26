"""combine: the weighted sum of a token's expert rows, and its gradient. Slot order, no atomics: deterministic."""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import cdiv, joined, next_power_of_2, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.permute import column_block
from moe_ops.kernels.program import (
    Buffer,
    Launch,
    Program,
    Ref,
    TensorMeta,
)

_FILL_BLOCK = 1024
_ROWS_AT_ONCE = 16  # the addresses of more would take the registers


@triton.jit
def _row_of_slot(inverse_ptr, slot, mask, num_rows):
    """(row, whether there is one) of a slot: -1 drops it, and so does what is no row."""
    row = tl.load(inverse_ptr + slot, mask=mask, other=-1)
    return row, (row >= 0) & (row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _combine_kernel(
    expert_out_ptr, weights_ptr, inverse_ptr, shared_ptr, shared_gate_ptr, residual_ptr, out_ptr,
    num_rows, num_columns, stride_s, stride_h, weight_stride_t, weight_stride_k,
    shared_stride_t, shared_stride_h, gate_stride_t, residual_stride_t, residual_stride_h,
    TOP_K: tl.constexpr, AT_ONCE: tl.constexpr, F64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T * column blocks). A slot whose inverse is no row is skipped without reading."""
    column_blocks = tl.cdiv(num_columns, BLOCK)
    token = (tl.program_id(0) // column_blocks).to(tl.int64)
    columns = (tl.program_id(0) % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float64 if F64 else tl.float32)
    for first in range(0, TOP_K, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            k = first + step
            row, kept = _row_of_slot(inverse_ptr, token * TOP_K + k, k < TOP_K, num_rows)
            weight_ptr = weights_ptr + offset(token, weight_stride_t) + offset(k, weight_stride_k)
            weight = tl.load(weight_ptr, mask=kept, other=0.0)
            row_ptr = expert_out_ptr + offset(row, stride_s) + offset(columns, stride_h)
            value = tl.load(row_ptr, mask=columns < tl.where(kept, num_columns, 0), other=0.0)
            total += value.to(total.dtype) * weight.to(total.dtype)
    total += joined(
        shared_ptr, shared_gate_ptr, residual_ptr, token, columns, mask,
        shared_stride_t, shared_stride_h, gate_stride_t, residual_stride_t, residual_stride_h, total.dtype,
    )  # fmt: skip
    tl.store(out_ptr + token * num_columns + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _clear_kernel(flags_ptr, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(flags_ptr + rows, tl.zeros((BLOCK,), tl.int32), mask=rows < num_rows)


@triton.jit(do_not_specialize=["top_k", "num_rows"])
def _combine_backward_kernel(
    grad_ptr, expert_out_ptr, weights_ptr, inverse_ptr, grad_out_ptr, grad_weights_ptr, flags_ptr,
    top_k, num_rows, num_columns, grad_stride_t, grad_stride_h, stride_s, stride_h, weight_stride_t, weight_stride_k,
    F64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per slot: grad_out[row] = grad * weight, grad_weight = <grad, expert_out[row]>; flags the row."""
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    slot = tl.program_id(0).to(tl.int64)
    token = slot // top_k
    row, kept = _row_of_slot(inverse_ptr, slot, slot >= 0, num_rows)
    weight_ptr = weights_ptr + offset(token, weight_stride_t) + offset(slot % top_k, weight_stride_k)
    weight = tl.load(weight_ptr, mask=kept, other=0.0).to(ACC)
    products = tl.zeros((BLOCK,), ACC)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < tl.where(kept, num_columns, 0)
        grad_ptrs = grad_ptr + offset(token, grad_stride_t) + offset(columns, grad_stride_h)
        grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(ACC)
        value_ptrs = expert_out_ptr + offset(row, stride_s) + offset(columns, stride_h)
        values = tl.load(value_ptrs, mask=mask, other=0.0).to(ACC)
        products += grad * values
        out = (grad * weight).to(grad_out_ptr.dtype.element_ty)
        tl.store(grad_out_ptr + offset(row, num_columns) + columns, out, mask=mask)
    tl.store(grad_weights_ptr + slot, tl.sum(products, 0).to(grad_weights_ptr.dtype.element_ty))
    tl.store(flags_ptr + row, 1, mask=kept)


@triton.jit
def _zero_unflagged_rows_kernel(out_ptr, flags_ptr, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(flags_ptr + row) == 0:
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * num_columns + columns, zeros, mask=columns < num_columns)


def joined_args(args: Any) -> dict[str, Any]:
    """Of `joined`, from the arguments of an operator that sums over experts."""
    given = {"shared": args.shared, **args.epilogue._asdict()}
    strides = {name: (0, 1) if tensor is None else tensor.strides for name, tensor in given.items()}
    return {
        **{f"{name}_ptr": None if tensor is None else Ref(name) for name, tensor in given.items()},
        "shared_stride_t": strides["shared"][0],
        "shared_stride_h": strides["shared"][1],
        "gate_stride_t": strides["shared_gate"][0],
        "residual_stride_t": strides["residual"][0],
        "residual_stride_h": strides["residual"][1],
    }


def combine_launch(expert_out: TensorMeta, args: Any) -> tuple[Buffer, Launch]:
    """Output buffer `combined` [T, H] and the launch that fills it, of an operator that sums rows of `expert_out`."""
    topk_weights = args.topk_weights
    (num_tokens, top_k), columns = topk_weights.shape, expert_out.shape[1]
    block = column_block(columns)
    given = {
        **joined_args(args),
        "expert_out_ptr": Ref("expert_out"),
        "weights_ptr": Ref("topk_weights"),
        "inverse_ptr": Ref("inverse"),
        "out_ptr": Ref("combined"),
        "num_rows": expert_out.shape[0],
        "num_columns": columns,
        "stride_s": expert_out.strides[0],
        "stride_h": expert_out.strides[1],
        "weight_stride_t": topk_weights.strides[0],
        "weight_stride_k": topk_weights.strides[1],
        "TOP_K": top_k,
        "AT_ONCE": min(top_k, _ROWS_AT_ONCE),
        "F64": expert_out.dtype == torch.float64,
        "BLOCK": block,
    }
    launch = Launch(_combine_kernel, (num_tokens * cdiv(columns, block),), given, 4, 1)
    return Buffer("combined", (num_tokens, columns), expert_out.dtype), launch


def combine_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.combine`."""
    buffer, launch = combine_launch(args.expert_out, args)
    return Program((buffer,), (launch,), (buffer.name,))


def combine_backward_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.combine_backward`."""
    grad, expert_out, topk_weights = args.grad, args.expert_out, args.topk_weights
    (num_rows, columns), (num_tokens, top_k) = expert_out.shape, topk_weights.shape
    flags, grad_out = Ref("row_flags"), Ref("grad_expert_out")
    sums = {
        "grad_ptr": Ref("grad"),
        "expert_out_ptr": Ref("expert_out"),
        "weights_ptr": Ref("topk_weights"),
        "inverse_ptr": Ref("inverse"),
        "grad_out_ptr": grad_out,
        "grad_weights_ptr": Ref("grad_topk_weights"),
        "flags_ptr": flags,
        "top_k": top_k,
        "num_rows": num_rows,
        "num_columns": columns,
        "grad_stride_t": grad.strides[0],
        "grad_stride_h": grad.strides[1],
        "stride_s": expert_out.strides[0],
        "stride_h": expert_out.strides[1],
        "weight_stride_t": topk_weights.strides[0],
        "weight_stride_k": topk_weights.strides[1],
        "F64": expert_out.dtype == torch.float64,
        "BLOCK": column_block(columns),
    }
    zero = {"out_ptr": grad_out, "flags_ptr": flags, "num_columns": columns, "BLOCK": column_block(columns)}
    clear = {"flags_ptr": flags, "num_rows": num_rows, "BLOCK": min(next_power_of_2(num_rows), _FILL_BLOCK)}
    buffers = (
        Buffer("row_flags", (num_rows,), torch.int32),
        Buffer("grad_expert_out", (num_rows, columns), expert_out.dtype),
        Buffer("grad_topk_weights", (num_tokens, top_k), topk_weights.dtype),
    )
    launches = (
        Launch(_clear_kernel, (cdiv(num_rows, clear["BLOCK"]),), clear, 4, 1),
        Launch(_combine_backward_kernel, (num_tokens * top_k,), sums, 4, 2),
        Launch(_zero_unflagged_rows_kernel, (num_rows,), zero, 4, 1),
    )
    return Program(buffers, launches, ("grad_expert_out", "grad_topk_weights"))
