"""The weight gradient of grouped_gemm: out[e] = grad_e.T @ x_e over the rows of an expert, zeros where it has none.

Two kernels, an accumulator of BLOCK_N x BLOCK_K outputs to a CTA. Where many rows fall to an expert both operands come
by TMA: on an H200 765 and 755 TFLOP/s at Mixtral's two weights and 32768 rows, where copies with masks reach 612 and
607 and `torch._grouped_mm` 732 and 757. What TMA cannot load, or few rows, the other kernel takes.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels import gemm_config
from moe_ops.kernels.common import cdiv, dot, offset
from moe_ops.kernels.gemm_config import LaunchConfig
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Descriptor, Launch, Program, Ref

_GROUP = 8  # blocks of features that run side by side over the same columns of x, which L2 then serves
_TAIL = tl.constexpr(16)


@triton.jit
def _expert_rows(offsets_ptr, expert, num_rows):
    """Start and end, within the rows whatever the caller's offsets say: a loop's look-ahead must not overflow."""
    start = tl.minimum(tl.maximum(tl.load(offsets_ptr + expert), 0), num_rows)
    end = tl.minimum(tl.maximum(tl.load(offsets_ptr + expert + 1), start), num_rows)
    return start, end


@triton.jit
def _masked_step(
    acc, grad_ptr, x_ptr, rows, end, columns, depths,
    features, depth, grad_stride_m, grad_stride_n, x_stride_m, x_stride_k,
):  # fmt: skip
    """acc + grad.T @ x over the `rows` before `end`."""
    grad_mask = (columns < features)[:, None] & (rows < end)[None, :]
    grad_offsets = offset(rows, grad_stride_m)[None, :] + offset(columns, grad_stride_n)[:, None]
    x_mask = (rows < end)[:, None] & (depths < depth)[None, :]
    x_offsets = offset(rows, x_stride_m)[:, None] + offset(depths, x_stride_k)[None, :]
    grad = tl.load(grad_ptr + grad_offsets, mask=grad_mask, other=0.0)
    return dot(grad, tl.load(x_ptr + x_offsets, mask=x_mask, other=0.0), acc)


@triton.jit
def _store(acc, out_ptr, expert, columns, depths, features, depth):
    out_row_ptr = out_ptr + (expert.to(tl.int64) * features + columns)[:, None] * depth
    mask = (columns < features)[:, None] & (depths < depth)[None, :]
    tl.store(out_row_ptr + depths[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_gradient_kernel(
    grad_ptr, x_ptr, offsets_ptr, out_ptr,
    num_rows, features, depth, grad_stride_m, grad_stride_n, x_stride_m, x_stride_k,
    F64: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Any strides, sizes and floating dtype."""
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    depth_blocks = tl.cdiv(depth, BLOCK_K)
    blocks = tl.cdiv(features, BLOCK_N) * depth_blocks
    expert = tl.program_id(0) // blocks
    local = tl.program_id(0) % blocks
    columns = (local // depth_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    depths = (local % depth_blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
    start, end = _expert_rows(offsets_ptr, expert, num_rows)
    acc = tl.zeros((BLOCK_N, BLOCK_K), ACC)
    for first in range(start, end, BLOCK_M):
        acc = _masked_step(
            acc, grad_ptr, x_ptr, first + tl.arange(0, BLOCK_M), end, columns, depths,
            features, depth, grad_stride_m, grad_stride_n, x_stride_m, x_stride_k,
        )  # fmt: skip
    _store(acc, out_ptr, expert, columns, depths, features, depth)


@triton.jit
def weight_gradient_tma_kernel(
    grad_ptr, grad_desc, x_ptr, x_desc, offsets_ptr, out_ptr,
    num_rows, features, depth, programs, num_tiles, grad_stride_m, x_stride_m,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Full blocks of rows by TMA. A box has no mask: what is left before the next expert's rows is copied masked."""
    column_blocks, depth_blocks = tl.cdiv(features, BLOCK_N), tl.cdiv(depth, BLOCK_K)
    for tile in tl.range(tl.program_id(0), num_tiles, programs):
        expert = tile // (column_blocks * depth_blocks)
        local = tile % (column_blocks * depth_blocks)
        first_block = local // (GROUP * depth_blocks) * GROUP
        width = tl.minimum(GROUP, column_blocks - first_block)
        within = local % (GROUP * depth_blocks)
        column, inner = (first_block + within % width) * BLOCK_N, (within // width) * BLOCK_K
        columns, depths = column + tl.arange(0, BLOCK_N), inner + tl.arange(0, BLOCK_K)
        start, end = _expert_rows(offsets_ptr, expert, num_rows)
        full = start + (end - start) // BLOCK_M * BLOCK_M
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for row in tl.range(start, full, BLOCK_M, num_stages=STAGES):
            acc = dot(grad_desc.load([row, column]).T, x_desc.load([row, inner]), acc)
        for row in range(full, end, _TAIL):
            acc = _masked_step(
                acc, grad_ptr, x_ptr, row + tl.arange(0, _TAIL), end, columns, depths,
                features, depth, grad_stride_m, 1, x_stride_m, 1,
            )  # fmt: skip
        _store(acc, out_ptr, expert, columns, depths, features, depth)


def grouped_gemm_weight_backward_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.grouped_gemm_weight_backward`."""
    grad, x, num_experts = args.grad, args.x, args.expert_offsets.shape[0] - 1
    (num_rows, features), depth = grad.shape, x.shape[1]
    by_tma = gemm_config.loads_gradient_by_tma(grad, x, num_experts, gpu)
    if by_tma:
        config = gemm_config.weight_gradient_tma_config(grad, x, num_experts, gpu)
    else:
        config = gemm_config.weight_gradient_config(grad, x, gpu)
    given = {
        "grad_ptr": Ref("grad"),
        "x_ptr": Ref("x"),
        "offsets_ptr": Ref("expert_offsets"),
        "out_ptr": Ref("grad_weight"),
        "num_rows": num_rows,
        "features": features,
        "depth": depth,
        "grad_stride_m": grad.strides[0],
        "x_stride_m": x.strides[0],
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BLOCK_M": config.block_m,
    }
    num_tiles = num_experts * cdiv(features, config.block_n) * cdiv(depth, config.block_k)
    programs = gemm_config.persistent_programs(num_tiles, config, gpu) if by_tma else num_tiles
    kernel = weight_gradient_tma_kernel if by_tma else weight_gradient_kernel
    more = _tma_args(args, config, programs, num_tiles) if by_tma else _masked_args(args)
    launch = Launch(kernel, (programs,), {**given, **more}, config.num_warps, config.num_stages)
    out = Buffer("grad_weight", (num_experts, features, depth), x.dtype)
    return Program((out,), (launch,), (out.name,))


def _masked_args(args: Any) -> dict[str, Any]:
    return {
        "grad_stride_n": args.grad.strides[1],
        "x_stride_k": args.x.strides[1],
        "F64": args.x.dtype == torch.float64,
    }


def _tma_args(args: Any, config: LaunchConfig, programs: int, num_tiles: int) -> dict[str, Any]:
    grad, x = args.grad, args.x
    return {
        "grad_desc": Descriptor("grad", grad.shape, grad.strides, (config.block_m, config.block_n)),
        "x_desc": Descriptor("x", x.shape, x.strides, (config.block_m, config.block_k)),
        "programs": programs,
        "num_tiles": num_tiles,
        "GROUP": _GROUP,
        "STAGES": config.num_stages,
    }
