"""Arguments that several of the decode kernels share."""

from typing import Any

import torch

from moe_ops.kernels.combine import joined_args
from moe_ops.kernels.common import next_power_of_2
from moe_ops.kernels.decode_blocks import GemvConfig
from moe_ops.kernels.dispatch import placement_args
from moe_ops.kernels.gemm import Operand, bias_args, operands
from moe_ops.kernels.program import Ref


def route_args(args: Any) -> dict[str, Any]:
    """What a kernel needs to find the expert of a slot."""
    return {
        **placement_args(args.placement, args.experts.w13.weight.shape[0]),
        "ids_ptr": Ref("topk_ids"),
        "ids_stride_t": args.topk_ids.strides[0],
        "ids_stride_k": args.topk_ids.strides[1],
    }


def weight_args(operand: Operand, config: GemvConfig) -> dict[str, Any]:
    """What a kernel needs that multiplies by a weight."""
    weight = operand.meta
    return {
        "weight_ptr": Ref(operand.name),
        "weight_stride_e": weight.strides[0],
        "weight_stride_n": weight.strides[1],
        "weight_stride_k": weight.strides[2],
        "F64": weight.dtype == torch.float64,
        "DEPTH": weight.shape[2],
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }


def output_args(args: Any) -> dict[str, Any]:
    """What a kernel needs that sums over the routes of a token."""
    top_k, w2 = args.topk_ids.shape[1], args.experts.w2
    return {
        **joined_args(args),
        **bias_args(operands("w2", w2).bias),
        "weights_ptr": Ref("topk_weights"),
        "out_ptr": Ref("combined"),
        "features": w2.weight.shape[1],
        "route_stride_t": args.topk_weights.strides[0],
        "route_stride_k": args.topk_weights.strides[1],
        "TOP_K": top_k,
        "ROUTES": next_power_of_2(top_k),
    }
