"""batched_gemm: the kernels of `grouped_gemm` over rows that lie `max_tokens` to an expert, and zeros for the rest."""

from typing import Any

import triton
import triton.language as tl

from moe_ops.arguments import PairedLinear
from moe_ops.kernels.common import cdiv
from moe_ops.kernels.gemm import Gemm, Operand, operands
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.grouped_gemm import plan
from moe_ops.kernels.permute import column_block
from moe_ops.kernels.program import Launch, Program, Ref, TensorMeta


@triton.jit(do_not_specialize=["max_tokens"])
def _zero_padding_kernel(counts_ptr, out_ptr, max_tokens, num_columns, BLOCK: tl.constexpr):
    """out[e, m] = 0 for m >= counts[e]; grid (E * max_tokens * column blocks)."""
    column_blocks = tl.cdiv(num_columns, BLOCK)
    row = (tl.program_id(0) // column_blocks).to(tl.int64)
    columns = (tl.program_id(0) % column_blocks) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts_ptr + row // max_tokens)
    inside = columns < tl.where(row % max_tokens < count, 0, num_columns)
    zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_columns + columns, zeros, mask=inside)


def _rows(x: TensorMeta) -> TensorMeta:
    """x [E, max_tokens, A] as rows. Raises ValueError when no view can be."""
    num_experts, max_tokens, depth = x.shape
    apart = num_experts > 1 and max_tokens > 1 and x.strides[0] != max_tokens * x.strides[1]
    if apart:
        raise ValueError(f"x has strides {x.strides}: expected experts that follow each other without a gap")
    stride = x.strides[1] if max_tokens > 1 else x.strides[0]
    return TensorMeta((num_experts * max_tokens, depth), (stride, x.strides[2]), x.dtype, x.aligned)


def batched_gemm_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.batched_gemm`."""
    num_experts, max_tokens, _ = args.x.shape
    x, linear = Operand("x", _rows(args.x)), PairedLinear(*operands("weight", args.weight))
    gemm = Gemm(x, linear, "product", num_experts * max_tokens, gpu, max_tokens=max_tokens)
    (tiles, out), launches = plan(gemm)
    block = column_block(gemm.features)
    given = {
        "counts_ptr": Ref("counts"),
        "out_ptr": Ref(out.name),
        "max_tokens": max_tokens,
        "num_columns": gemm.features,
        "BLOCK": block,
    }
    zero = Launch(_zero_padding_kernel, (gemm.num_slots * cdiv(gemm.features, block),), given, 4, 1)
    product = out._replace(shape=(num_experts, max_tokens, gemm.features))
    return Program((tiles, product), (*launches, zero), (out.name,))
