"""gated_activation and its gradient: elementwise over [S, 2I], computed in float32 (float64 for float64)."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from moe_ops.kernels.common import activation_gradient, apply_activation, cdiv, offset
from moe_ops.kernels.permute import column_block
from moe_ops.kernels.program import Buffer, Launch, Program, Ref, TensorMeta, describe
from moe_ops.types import Activation


@triton.jit
def _gate_up_columns(columns, features, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
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
    gate_up_ptr, out_ptr,
    features, stride_s, stride_i,
    NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    F64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    blocks = tl.cdiv(features, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < features
    gate_columns, up_columns = _gate_up_columns(columns, features, GATED, INTERLEAVED)
    row_ptr = gate_up_ptr + offset(row, stride_s)
    gate = tl.load(row_ptr + offset(gate_columns, stride_i), mask=mask, other=0.0).to(ACC)
    up = tl.load(row_ptr + offset(up_columns, stride_i), mask=mask, other=0.0).to(ACC)
    result = apply_activation(gate, up, NAME, ALPHA, LIMIT)
    tl.store(out_ptr + row * features + columns, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activation_backward_kernel(
    grad_ptr, gate_up_ptr, out_ptr,
    features, grad_stride_s, grad_stride_i, stride_s, stride_i,
    NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    F64: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    blocks = tl.cdiv(features, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < features
    gate_columns, up_columns = _gate_up_columns(columns, features, GATED, INTERLEAVED)
    row_ptr = gate_up_ptr + offset(row, stride_s)
    gate = tl.load(row_ptr + offset(gate_columns, stride_i), mask=mask, other=0.0).to(ACC)
    up = tl.load(row_ptr + offset(up_columns, stride_i), mask=mask, other=0.0).to(ACC)
    grad_ptrs = grad_ptr + offset(row, grad_stride_s) + offset(columns, grad_stride_i)
    grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(ACC)
    grad_gate, grad_up = activation_gradient(grad, gate, up, NAME, ALPHA, LIMIT)
    out_ptr += row * features * (2 if GATED else 1)
    tl.store(out_ptr + gate_columns, grad_gate.to(out_ptr.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(out_ptr + up_columns, grad_up.to(out_ptr.dtype.element_ty), mask=mask)


def activation_args(activation: Activation) -> dict:
    """The constexpr arguments that describe `activation` to any kernel that applies it."""
    return {
        "NAME": activation.name,
        "ALPHA": activation.alpha,
        "LIMIT": activation.limit,
        "GATED": activation.is_gated,
        "INTERLEAVED": activation.interleaved,
    }


def _features(gate_up: TensorMeta, activation: Activation) -> int:
    return gate_up.shape[1] // 2 if activation.is_gated else gate_up.shape[1]


def _shared_args(gate_up: TensorMeta, activation: Activation) -> dict:
    features = _features(gate_up, activation)
    return {
        "gate_up_ptr": Ref("gate_up"),
        "features": features,
        "stride_s": gate_up.strides[0],
        "stride_i": gate_up.strides[1],
        **activation_args(activation),
        "F64": gate_up.dtype == torch.float64,
        "BLOCK": column_block(features),
    }


@lru_cache(maxsize=1024)
def _program(gate_up: TensorMeta, activation: Activation) -> Program:
    args = {**_shared_args(gate_up, activation), "out_ptr": Ref("activated")}
    shape = (gate_up.shape[0], args["features"])
    launch = Launch(_activation_kernel, (shape[0] * cdiv(shape[1], args["BLOCK"]),), args, 4, 1)
    return Program((Buffer("activated", shape, gate_up.dtype),), (launch,), ("activated",))


@lru_cache(maxsize=1024)
def _backward_program(grad: TensorMeta, gate_up: TensorMeta, activation: Activation) -> Program:
    args = {
        **_shared_args(gate_up, activation),
        "grad_ptr": Ref("grad"),
        "out_ptr": Ref("grad_gate_up"),
        "grad_stride_s": grad.strides[0],
        "grad_stride_i": grad.strides[1],
    }
    grid = (grad.shape[0] * cdiv(args["features"], args["BLOCK"]),)
    launch = Launch(_activation_backward_kernel, grid, args, 4, 1)
    return Program((Buffer("grad_gate_up", gate_up.shape, gate_up.dtype),), (launch,), ("grad_gate_up",))


def gated_activation_program(gate_up, activation: Activation) -> Program:
    """The program of `moe.gated_activation` for a tensor with this metadata."""
    return _program(describe(gate_up), activation)


def gated_activation_backward_program(grad, gate_up, activation: Activation) -> Program:
    """The program of `moe.gated_activation_backward` for tensors with this metadata."""
    return _backward_program(describe(grad), describe(gate_up), activation)


def launch(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate_up [S, 2I] ([S, I] when ungated) -> [S, I]."""
    return gated_activation_program(gate_up, activation).run({"gate_up": gate_up})[0]


def launch_backward(grad: torch.Tensor, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """grad [S, I] -> gradient of gate_up, in its shape and dtype."""
    program = gated_activation_backward_program(grad, gate_up, activation)
    return program.run({"grad": grad, "gate_up": gate_up})[0]
