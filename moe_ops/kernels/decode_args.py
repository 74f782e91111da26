"""Arguments that several of the decode kernels share."""

from typing import Any

import torch

from moe_ops.kernels.combine import joined_args
from moe_ops.kernels.common import cdiv, next_power_of_2
from moe_ops.kernels.decode_blocks import GemvConfig
from moe_ops.kernels.dispatch import placement_args
from moe_ops.kernels.gemm import Operand, bias_args, operands
from moe_ops.kernels.program import Ref, TensorMeta
from moe_ops.values import SharedExpert

SHARED = "shared_activated"
"""The buffer between the two products of a shared expert, [T, J]."""
# Numbers of its weight that a program reads at once, and how often at most: each step is written out.
_SHARED_STEP, _MOST_SHARED_STEPS = 512, 32


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


def shared_up_args(shared: SharedExpert | None) -> dict[str, Any]:
    """What a kernel needs that multiplies by gate and up rows of a shared expert, too."""
    w13 = _NO_WEIGHT if shared is None else shared.shared_w13
    return {
        "shared_w13_ptr": None if shared is None else Ref("shared_w13"),
        "shared_up_ptr": None if shared is None or shared.shared_up is None else Ref("shared_up"),
        "shared_out_ptr": None if shared is None else Ref(SHARED),
        "shared_features": 0 if shared is None else shared.shared_w2.shape[1],
        "shared_stride_n": w13.strides[0],
        "shared_stride_k": w13.strides[1],
    }


def shared_down_args(shared: SharedExpert | None, config: GemvConfig) -> dict[str, Any]:
    """What a kernel needs that multiplies by down rows of a shared expert, too."""
    w2 = _NO_WEIGHT if shared is None else shared.shared_w2
    weights = None if shared is None else shared.shared_weights
    depth = w2.shape[1]
    shortest = next_power_of_2(cdiv(depth, _MOST_SHARED_STEPS))
    return {
        "shared_x_ptr": None if shared is None else Ref(SHARED),
        "shared_w2_ptr": None if shared is None else Ref("shared_w2"),
        "shared_weights_ptr": None if weights is None else Ref("shared_weights"),
        "shared_stride_n": w2.strides[0],
        "shared_stride_k": w2.strides[1],
        "shared_weights_stride_t": 0 if weights is None else weights.strides[0],
        "SHARED_DEPTH": depth,
        "SHARED_BLOCK_K": min(max(_SHARED_STEP // config.block_n, shortest), next_power_of_2(depth)),
    }


_NO_WEIGHT = TensorMeta((0, 0), (0, 0), torch.float32, True)
