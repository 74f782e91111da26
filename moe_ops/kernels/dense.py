"""Products in which every token takes part, for a few tokens: each weight is read once for all of them.

A program keeps its rows of the weight in registers while it goes through the tokens. Its programs are short, so those
of routed experts on another stream get in between.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moe_ops.kernels.activation import activation_args
from moe_ops.kernels.common import apply_activation, cdiv, next_power_of_2, offset
from moe_ops.kernels.decode import gate_and_up, weight_rows
from moe_ops.kernels.decode_blocks import GemvConfig, row_config
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, Ref, TensorMeta
from moe_ops.types import Activation

# With more tokens a library's products are as fast or faster than a shared expert beside routed ones (H200).
_MOST_TOKENS = 2
# The same of a product alone, a row to a program: of one token, or of more with as few features as a router has
# experts, whose few programs want many warps.
_FEW_FEATURES, _MOST_TOKENS_OF_FEW, _LONG_ROW = 512, 8, 4096
_BYTES = 16384  # of weights that a program keeps
_NO_ACTIVATION = dict.fromkeys(("NAME", "ALPHA", "BETA", "LINEAR_BETA", "LIMIT"))
_NO_ACTIVATION |= {"GATED": False, "INTERLEAVED": False}


@triton.jit
def dense_gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, out_ptr,
    features, x_stride_t, x_stride_k, weight_stride_n, weight_stride_k, bias_stride, scale_stride_t,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    F64: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[t] = activation(weight @ x[t]), or without an activation scale[t] * (weight @ x[t] + bias)."""
    ACC: tl.constexpr = tl.float64 if F64 else tl.float32
    first = tl.program_id(0) * BLOCK_N
    column, weight_row = weight_rows(first, features, BLOCK_N, GATED, INTERLEAVED, False)
    inner = tl.arange(0, BLOCK_K)
    mask = (column < features)[:, None] & (inner < DEPTH)[None, :]
    weight_ptrs = (
        weight_ptr + offset(weight_row, weight_stride_n)[:, None] + offset(inner, weight_stride_k)[None, :]
    )
    weight = tl.load(weight_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    columns = first + tl.arange(0, BLOCK_N)
    for token in tl.static_range(TOKENS):
        x_ptrs = x_ptr + offset(token, x_stride_t) + offset(inner, x_stride_k)
        x = tl.load(x_ptrs, mask=inner < DEPTH, other=0.0)
        result = tl.sum(weight.to(ACC) * x.to(ACC)[None, :], 1)
        if NAME is not None:
            gate, up = gate_and_up(result, BLOCK_N, GATED, INTERLEAVED)
            result = apply_activation(gate, up, NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + offset(columns, bias_stride), mask=columns < features, other=0.0)
            result += bias.to(ACC)
        if scale_ptr is not None:
            result = result * tl.load(scale_ptr + offset(token, scale_stride_t)).to(ACC)
        out_ptrs = out_ptr + offset(token, features) + columns
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=columns < features)


def takes(args: Any, gpu: Gpu) -> bool:
    """Whether these kernels are for a `SharedAlone`: few tokens, and rows of both weights that a program can keep."""
    x, (w13, w2, _, spec, up) = args
    halves = 2 if Activation.from_spec(spec).is_gated else 1
    return up is None and x.shape[0] <= _MOST_TOKENS and _keeps(w13, halves, gpu) and _keeps(w2, 1, gpu)


def _keeps(weight: TensorMeta, halves: int, gpu: Gpu) -> bool:
    return weight.strides[1] == 1 and _config(weight, halves, gpu).block_k >= weight.shape[1]


def _config(weight: TensorMeta, halves: int, gpu: Gpu) -> GemvConfig:
    of_one_expert = TensorMeta((1, *weight.shape), (0, *weight.strides), weight.dtype, weight.aligned)
    return row_config(halves, of_one_expert, _BYTES, gpu)


def shared_alone_program(args: Any, gpu: Gpu) -> Program:
    """The program of a `SharedAlone` that `takes` allows."""
    x, (w13, w2, weights, spec, _) = args
    activation, num_tokens = Activation.from_spec(spec), x.shape[0]
    activated = Buffer("activated", (num_tokens, w2.shape[1]), x.dtype)
    out = Buffer("shared_out", (num_tokens, w2.shape[0]), x.dtype)
    up_config = _config(w13, 2 if activation.is_gated else 1, gpu)
    up = {
        **activation_args(activation),
        **_product_args(w13, up_config),
        **_bias_args(None),
        "x_ptr": Ref("hidden_states"),
        "weight_ptr": Ref("shared_w13"),
        "out_ptr": Ref(activated.name),
        "x_stride_t": x.strides[0],
        "x_stride_k": x.strides[1],
        "scale_ptr": None,
        "scale_stride_t": 0,
    }
    down_config = _config(w2, 1, gpu)
    down = {
        **_NO_ACTIVATION,
        **_product_args(w2, down_config),
        **_bias_args(None),
        "x_ptr": Ref(activated.name),
        "weight_ptr": Ref("shared_w2"),
        "out_ptr": Ref(out.name),
        "x_stride_t": w2.shape[1],
        "x_stride_k": 1,
        "scale_ptr": None if weights is None else Ref("shared_weights"),
        "scale_stride_t": 0 if weights is None else weights.strides[0],
    }
    launches = (_launch(up, activated, up_config), _launch(down, out, down_config))
    return Program((activated, out), launches, (out.name,))


def takes_product(args: Any, gpu: Gpu) -> bool:
    """Whether this kernel is for a `DenseGemm`: few tokens, and rows of the weight that a program can keep."""
    most = _MOST_TOKENS_OF_FEW if args.weight.shape[0] <= _FEW_FEATURES else 1
    return args.x.shape[0] <= most and _keeps(args.weight, 1, gpu)


def dense_gemm_program(args: Any, gpu: Gpu) -> Program:
    """The program of a `moe.dense_gemm` that `takes_product` allows."""
    x, weight, bias, dtype = args
    out = Buffer("out", (x.shape[0], weight.shape[0]), dtype)
    features, depth = weight.shape
    few_warps = 8 if depth > _LONG_ROW else 4
    config = GemvConfig(1, next_power_of_2(depth), few_warps if features <= _FEW_FEATURES else 2)
    given = {
        **_NO_ACTIVATION,
        **_product_args(weight, config),
        **_bias_args(bias),
        "x_ptr": Ref("x"),
        "weight_ptr": Ref("weight"),
        "out_ptr": Ref(out.name),
        "x_stride_t": x.strides[0],
        "x_stride_k": x.strides[1],
        "scale_ptr": None,
        "scale_stride_t": 0,
    }
    return Program((out,), (_launch(given, out, config),), (out.name,))


def _bias_args(bias: TensorMeta | None) -> dict[str, Any]:
    if bias is None:
        return {"bias_ptr": None, "bias_stride": 0}
    return {"bias_ptr": Ref("bias"), "bias_stride": bias.strides[0]}


def _product_args(weight: TensorMeta, config: GemvConfig) -> dict[str, Any]:
    return {
        "weight_stride_n": weight.strides[0],
        "weight_stride_k": weight.strides[1],
        "F64": weight.dtype == torch.float64,
        "DEPTH": weight.shape[1],
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }


def _launch(given: dict[str, Any], out: Buffer, config: GemvConfig) -> Launch:
    num_tokens, features = out.shape
    grid = (cdiv(features, config.block_n),)
    args = {**given, "features": features, "TOKENS": num_tokens}
    return Launch(dense_gemv_kernel, grid, args, config.num_warps, 1)
