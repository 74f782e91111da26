"""gated_activation and its gradient: elementwise over [S, 2I], computed in float32 (float64 for float64)."""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.formula import Formula
from moe_ops.kernels.common import activation_gradient, apply_activation, cdiv, offset
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.permute import column_block
from moe_ops.kernels.program import Buffer, Launch, Program, Ref
from moe_ops.kernels.tiles import expert_args, has_expert
from moe_ops.types import Activation

_NAMES = ("NAME", "GATED", "INTERLEAVED", "ALPHA", "BETA", "LINEAR_BETA", "LIMIT")
NO_GATE: dict[str, Any] = dict.fromkeys(_NAMES) | {"GATED": False, "INTERLEAVED": False}
"""`activation_args` of none."""


@triton.jit
def gate_up_columns(columns, features, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Columns of the gate and up values of output `columns`; the same for an ungated activation."""
    if INTERLEAVED:
        gate = columns * 2
        up = gate + 1
    else:
        gate = columns
        up = columns + features if GATED else columns
    return gate, up


@triton.jit
def _activation_kernel(
    gate_up_ptr, offsets_ptr, out_ptr,
    num_experts, features, stride_s, stride_i,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    F64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    blocks = tl.cdiv(features, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    if has_expert(row, offsets_ptr, num_experts):
        columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < features
        gate_columns, up_columns = gate_up_columns(columns, features, GATED, INTERLEAVED)
        row_ptr = gate_up_ptr + offset(row, stride_s)
        gate = tl.load(row_ptr + offset(gate_columns, stride_i), mask=mask, other=0.0).to(ACC)
        up = tl.load(row_ptr + offset(up_columns, stride_i), mask=mask, other=0.0).to(ACC)
        result = apply_activation(gate, up, NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT)
        tl.store(out_ptr + row * features + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activation_backward_kernel(
    grad_ptr, gate_up_ptr, out_ptr,
    features, grad_stride_s, grad_stride_i, stride_s, stride_i,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    F64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    blocks = tl.cdiv(features, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < features
    gate_columns, up_columns = gate_up_columns(columns, features, GATED, INTERLEAVED)
    row_ptr = gate_up_ptr + offset(row, stride_s)
    gate = tl.load(row_ptr + offset(gate_columns, stride_i), mask=mask, other=0.0).to(ACC)
    up = tl.load(row_ptr + offset(up_columns, stride_i), mask=mask, other=0.0).to(ACC)
    grad_ptrs = grad_ptr + offset(row, grad_stride_s) + offset(columns, grad_stride_i)
    grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(ACC)
    grad_gate, grad_up = activation_gradient(grad, gate, up, NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT)
    out_ptr += row * features * (2 if GATED else 1)
    tl.store(out_ptr + gate_columns, grad_gate.to(out_ptr.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(out_ptr + up_columns, grad_up.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weighted_activation_backward_kernel(
    grad_ptr, gate_up_ptr, scale_ptr, out_ptr, weighted_ptr, dots_ptr,
    features, grad_stride_s, grad_stride_i, stride_s, stride_i, scale_stride_s,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    F64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row, so that dots add up in one order."""
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + offset(row, scale_stride_s)).to(ACC)
    row_ptr, grad_row_ptr = gate_up_ptr + offset(row, stride_s), grad_ptr + offset(row, grad_stride_s)
    out_ptr += row * features * (2 if GATED else 1)
    dots = tl.zeros((BLOCK,), ACC)
    for start in range(0, features, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < features
        gate_columns, up_columns = gate_up_columns(columns, features, GATED, INTERLEAVED)
        gate = tl.load(row_ptr + offset(gate_columns, stride_i), mask=mask, other=0.0).to(ACC)
        up = tl.load(row_ptr + offset(up_columns, stride_i), mask=mask, other=0.0).to(ACC)
        grad = tl.load(grad_row_ptr + offset(columns, grad_stride_i), mask=mask, other=0.0).to(ACC)
        value = apply_activation(gate, up, NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT)
        grad_gate, grad_up = activation_gradient(
            grad * scale, gate, up, NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT
        )
        dots += grad * value
        weighted = (value * scale).to(weighted_ptr.dtype.element_ty)
        tl.store(weighted_ptr + row * features + columns, weighted, mask=mask)
        tl.store(out_ptr + gate_columns, grad_gate.to(out_ptr.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(out_ptr + up_columns, grad_up.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(dots_ptr + row, tl.sum(dots, 0).to(dots_ptr.dtype.element_ty))


def activation_args(activation: Activation | Formula) -> dict:
    """The constexpr arguments that describe `activation` to any kernel that applies it."""
    if isinstance(activation, Formula):
        unnamed = dict.fromkeys(("ALPHA", "BETA", "LINEAR_BETA", "LIMIT"))
        layout = {"GATED": activation.is_gated, "INTERLEAVED": activation.interleaved}
        return {"NAME": "formula", **unnamed, **layout}
    return {
        "NAME": activation.function,
        "GATED": activation.is_gated,
        "ALPHA": activation.alpha,
        "BETA": activation.beta,
        "LINEAR_BETA": activation.linear_beta,
        "LIMIT": activation.limit,
        "INTERLEAVED": activation.interleaved,
    }


def _shared_args(args: Any) -> dict:
    gate_up, activation = args.gate_up, Activation.from_spec(args.activation)
    features = gate_up.shape[1] // 2 if activation.is_gated else gate_up.shape[1]
    return {
        "gate_up_ptr": Ref("gate_up"),
        "features": features,
        "stride_s": gate_up.strides[0],
        "stride_i": gate_up.strides[1],
        **activation_args(activation),
        "F64": gate_up.dtype == torch.float64,
        "BLOCK": column_block(features),
    }


def gated_activation_program(args: Any, gpu: Gpu, num_experts: int | None = None) -> Program:
    """The program of `moe.gated_activation`; with `num_experts` rows past the last of so many are left out."""
    given = {**_shared_args(args), **expert_args(num_experts), "out_ptr": Ref("activated")}
    shape = (args.gate_up.shape[0], given["features"])
    launch = Launch(_activation_kernel, (shape[0] * cdiv(shape[1], given["BLOCK"]),), given, 4, 1)
    return Program((Buffer("activated", shape, args.gate_up.dtype),), (launch,), ("activated",))


def gated_activation_backward_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.gated_activation_backward`."""
    grad, gate_up = args.grad, args.gate_up
    given = {
        **_shared_args(args),
        "grad_ptr": Ref("grad"),
        "out_ptr": Ref("grad_gate_up"),
        "grad_stride_s": grad.strides[0],
        "grad_stride_i": grad.strides[1],
    }
    grid = (grad.shape[0] * cdiv(given["features"], given["BLOCK"]),)
    launch = Launch(_activation_backward_kernel, grid, given, 4, 1)
    return Program((Buffer("grad_gate_up", gate_up.shape, gate_up.dtype),), (launch,), ("grad_gate_up",))


def weighted_activation_backward_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.weighted_activation_backward`."""
    (grad, gate_up, _), scale = args
    given = {
        **_shared_args(args.rows),
        "grad_ptr": Ref("grad"),
        "scale_ptr": Ref("scale"),
        "out_ptr": Ref("grad_gate_up"),
        "weighted_ptr": Ref("weighted"),
        "dots_ptr": Ref("dots"),
        "grad_stride_s": grad.strides[0],
        "grad_stride_i": grad.strides[1],
        "scale_stride_s": scale.strides[0],
    }
    outputs = (
        Buffer("grad_gate_up", gate_up.shape, gate_up.dtype),
        Buffer("weighted", grad.shape, gate_up.dtype),
        Buffer("dots", scale.shape, scale.dtype),
    )
    launch = Launch(_weighted_activation_backward_kernel, (grad.shape[0],), given, 4, 1)
    return Program(outputs, (launch,), tuple(each.name for each in outputs))
