"""Launches of the decode kernels for weights whose columns lie together."""

from typing import Any

import torch

from moe_ops.kernels.activation import activation_args
from moe_ops.kernels.common import cdiv, compute_dtype, next_power_of_2
from moe_ops.kernels.decode_args import output_args, route_args, weight_args
from moe_ops.kernels.decode_blocks import column_config, depth_of_part
from moe_ops.kernels.decode_columns import gemv_columns_kernel, gemv_gate_kernel, gemv_sum_kernel
from moe_ops.kernels.formula import gate_of, operand_args, with_formula
from moe_ops.kernels.gemm import Operand, bias_args, operands, reference_to
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Ref
from moe_ops.values import PairedLinear

_WARPS, _GATED_COLUMNS, _SUMMED_COLUMNS, _SUMMED = 1, 32, 8, 2048  # the last: numbers that a program adds up


def up_columns_launches(args: Any, gpu: Gpu) -> tuple[Buffer, tuple[Launch, Launch]]:
    """The buffer `products` [parts, T * K, 2I or I], what fills it, and what makes `activated` of it."""
    x, w13 = Operand("hidden_states", args.hidden_states), operands("w13", args.experts.w13)
    products, multiply = _columns_launch(args, (x, w13), args.topk_ids.shape[1], "products", gpu)
    return products, (multiply, _gate_launch(args, products))


def down_columns_launches(args: Any, activated: Buffer, gpu: Gpu) -> tuple[Buffer, tuple[Launch, Launch]]:
    """The buffer `partial` [parts, T * K, H], what fills it, and what sums it up to `combined`."""
    x, w2 = Operand(activated.name, activated.meta), PairedLinear(*operands("w2", args.experts.w2))
    partial, multiply = _columns_launch(args, (x, w2), 1, "partial", gpu)
    return partial, (multiply, _sum_launch(args, partial))


def _columns_launch(
    args: Any, factors: tuple[Operand, PairedLinear], slots_per_row: int, name: str, gpu: Gpu
) -> tuple[Buffer, Launch]:
    x, linear = factors
    (num_tokens, top_k), weight = args.topk_ids.shape, linear.weight.meta
    _, features, depth = weight.shape
    num_slots, config = num_tokens * top_k, column_config(weight, gpu)
    blocks = cdiv(features, config.block_n) * (1 if linear.up is None else 2)
    part = depth_of_part(depth, num_slots * blocks, config.block_k)
    parts = max(cdiv(depth, part), 1)
    given = {
        **route_args(args),
        **weight_args(linear.weight, config),
        "up_ptr": reference_to(linear.up),
        "x_ptr": Ref(x.name),
        "out_ptr": Ref(name),
        "top_k": top_k,
        "slots_per_row": slots_per_row,
        "num_slots": num_slots,
        "features": features,
        "x_stride_m": x.meta.strides[0],
        "x_stride_k": x.meta.strides[1],
        "PART": part,
    }
    width = features if linear.up is None else 2 * features
    out = Buffer(name, (parts, num_slots, width), compute_dtype(weight.dtype))
    return out, Launch(gemv_columns_kernel, (parts * num_slots * blocks,), given, config.num_warps, 1)


def _gate_launch(args: Any, products: Buffer) -> Launch:
    w13, gate = operands("w13", args.experts.w13), gate_of(args)
    num_slots, features = products.shape[1], args.experts.w2.weight.shape[2]
    given = {
        **route_args(args),
        **bias_args(w13.bias),
        **activation_args(gate),
        **operand_args(gate),
        **_parts_args(products),
        "up_bias_ptr": reference_to(w13.up_bias),
        "out_ptr": Ref("activated"),
        "top_k": args.topk_ids.shape[1],
        "features": features,
        "BLOCK_N": _GATED_COLUMNS,
    }
    grid = (num_slots * cdiv(features, _GATED_COLUMNS),)
    return Launch(with_formula(gemv_gate_kernel, gate), grid, given, _WARPS, 1)


def _sum_launch(args: Any, partial: Buffer) -> Launch:
    given = {**route_args(args), **output_args(args), **_parts_args(partial)}
    block_n = min(max(_SUMMED // (given["BLOCK_P"] * given["ROUTES"]), 1), _SUMMED_COLUMNS)
    grid = (args.topk_ids.shape[0] * cdiv(partial.shape[2], block_n),)
    return Launch(gemv_sum_kernel, grid, {**given, "BLOCK_N": block_n}, _WARPS, 1)


def _parts_args(partial: Buffer) -> dict[str, Any]:
    parts, num_slots, _ = partial.shape
    return {
        "partial_ptr": Ref(partial.name),
        "num_slots": num_slots,
        "F64": partial.dtype == torch.float64,
        "PARTS": parts,
        "BLOCK_P": next_power_of_2(parts),
    }
