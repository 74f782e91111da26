"""The weight gradient of grouped_gemm: out[e] = grad_e.T @ x_e over the rows of an expert, zeros where it has none.

Two kernels, an accumulator of BLOCK_N x BLOCK_K outputs to a CTA. Where many rows fall to an expert everything goes by
TMA: on an H200 788 TFLOP/s at Mixtral's second weight and 32768 rows, where copies with masks reach 607 and
`torch._grouped_mm` 769. What TMA cannot load, or few rows, the other kernel takes.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels import gemm_config
from moe_ops.kernels.common import cdiv, dot, offset
from moe_ops.kernels.gemm_config import LaunchConfig
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Descriptor, Launch, Program, Ref, TensorMeta

_GROUP = 8  # blocks of features that run side by side over the same columns of x, which L2 then serves


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
    grad_desc, x_desc, out_desc, offsets_ptr,
    num_rows, features, depth, programs, num_tiles,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All by TMA, from an expert's last rows to its first: those of a box before it have negative numbers, so are 0."""
    column_blocks, depth_blocks = tl.cdiv(features, BLOCK_N), tl.cdiv(depth, BLOCK_K)
    for tile in tl.range(tl.program_id(0), num_tiles, programs):
        expert = tile // (column_blocks * depth_blocks)
        local = tile % (column_blocks * depth_blocks)
        first_block = local // (GROUP * depth_blocks) * GROUP
        width = tl.minimum(GROUP, column_blocks - first_block)
        within = local % (GROUP * depth_blocks)
        column, inner = (first_block + within % width) * BLOCK_N, (within // width) * BLOCK_K
        start, end = _expert_rows(offsets_ptr, expert, num_rows)
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for done in tl.range(0, end - start, BLOCK_M, num_stages=STAGES):
            row = end - start - done - BLOCK_M
            grad = grad_desc.load([start, row, column]).reshape(BLOCK_M, BLOCK_N)
            x = x_desc.load([start, row, inner]).reshape(BLOCK_M, BLOCK_K)
            acc = dot(grad.T, x, acc)
        out_desc.store([expert, column, inner], acc.to(out_desc.dtype).reshape(1, BLOCK_N, BLOCK_K))


def grouped_gemm_weight_backward_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.grouped_gemm_weight_backward`."""
    grad, x, num_experts = args.grad, args.x, args.expert_offsets.shape[0] - 1
    (num_rows, features), depth = grad.shape, x.shape[1]
    out = Buffer("grad_weight", (num_experts, features, depth), x.dtype)
    by_tma = gemm_config.loads_gradient_by_tma(grad, x, out.meta, gpu)
    if by_tma:
        config = gemm_config.weight_gradient_tma_config(grad, x, num_experts, gpu)
    else:
        config = gemm_config.weight_gradient_config(grad, x, gpu)
    given = {
        "offsets_ptr": Ref("expert_offsets"),
        "num_rows": num_rows,
        "features": features,
        "depth": depth,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BLOCK_M": config.block_m,
    }
    num_tiles = num_experts * cdiv(features, config.block_n) * cdiv(depth, config.block_k)
    programs = gemm_config.persistent_programs(num_tiles, config, gpu) if by_tma else num_tiles
    kernel = weight_gradient_tma_kernel if by_tma else weight_gradient_kernel
    more = _tma_args(args, out, config, programs, num_tiles) if by_tma else _masked_args(args)
    launch = Launch(kernel, (programs,), {**given, **more}, config.num_warps, config.num_stages)
    return Program((out,), (launch,), (out.name,))


def _masked_args(args: Any) -> dict[str, Any]:
    grad, x = args.grad, args.x
    return {
        "grad_ptr": Ref("grad"),
        "x_ptr": Ref("x"),
        "out_ptr": Ref("grad_weight"),
        "grad_stride_m": grad.strides[0],
        "grad_stride_n": grad.strides[1],
        "x_stride_m": x.strides[0],
        "x_stride_k": x.strides[1],
        "F64": x.dtype == torch.float64,
    }


def _tma_args(args: Any, out: Buffer, config: LaunchConfig, programs: int, num_tiles: int) -> dict[str, Any]:
    return {
        "grad_desc": _rows_from_any("grad", args.grad, (1, config.block_m, config.block_n)),
        "x_desc": _rows_from_any("x", args.x, (1, config.block_m, config.block_k)),
        "out_desc": Descriptor(out.name, out.shape, out.meta.strides, (1, config.block_n, config.block_k)),
        "programs": programs,
        "num_tiles": num_tiles,
        "GROUP": _GROUP,
        "STAGES": config.num_stages,
    }


def _rows_from_any(name: str, rows: TensorMeta, block: tuple[int, ...]) -> Descriptor:
    """Rows [S, A] as [S, S, A]: element [start, row] is row start + row. Boxes are cut off before row 0 of these."""
    (count, columns), (stride, _) = rows.shape, rows.strides
    return Descriptor(name, (count, count, columns), (stride, stride, 1), block)
