"""grouped_gemm: plans for the kernels of `gemm_tma`, `gemm_mixed` and `gemm_generic`."""

from dataclasses import replace
from typing import Any

import torch

from moe_ops.arguments import PairedLinear
from moe_ops.kernels import gemm_config, tma
from moe_ops.kernels.activation import activation_args
from moe_ops.kernels.formula import operand_args, with_formula
from moe_ops.kernels.gemm import Gemm, Operand, bias_args, operands, reference_to
from moe_ops.kernels.gemm_config import LaunchConfig
from moe_ops.kernels.gemm_generic import grouped_gemm_generic_kernel
from moe_ops.kernels.gemm_mixed import grouped_gemm_mixed_kernel
from moe_ops.kernels.gemm_tma import grouped_gemm_tma_kernel
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Descriptor, Launch, Program, Ref
from moe_ops.kernels.tiles import batched_tile_map, tile_capacity, tile_map

_NO_ACTIVATION = {
    **dict.fromkeys(("NAME", "ALPHA", "BETA", "LINEAR_BETA", "LIMIT")),
    "INTERLEAVED": False,
}


def plan(gemm: Gemm, config: LaunchConfig | None = None) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    """Buffers (tile map, output) and launches of one grouped product; reads `expert_offsets`, or `counts`."""
    config = config or gemm_config.pick_config(gemm)
    mixed = config == gemm_config.mixed_config(gemm)
    tiles, map_launch = _tile_map(gemm, config.block_m, mixed)
    out = Buffer(gemm.out, gemm.out_meta.shape, gemm.out_meta.dtype)
    make = _mixed_launch if mixed else _tma_launch if gemm.weight_by_tma else _generic_launch
    launch = make(gemm, config, tiles.name)
    return (tiles, out), (map_launch, launch)


def _tile_map(gemm: Gemm, block_m: int, split: bool) -> tuple[Buffer, Launch]:
    num_experts = gemm.linear.weight.meta.shape[0]
    if gemm.max_tokens is not None:
        return batched_tile_map(gemm.max_tokens, num_experts, block_m)
    return tile_map(gemm.num_slots, num_experts, block_m, split)


def plan_all(gemms: tuple[Gemm, ...]) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    """`plan` of several products over the same `expert_offsets`, which share a tile map where they can."""
    buffers: dict[str, Buffer] = {}
    launches: list[Launch] = []
    for gemm in gemms:
        (tiles, out), (map_launch, launch) = plan(gemm)
        if tiles.name not in buffers:
            launches.append(map_launch)
        buffers |= {tiles.name: tiles, out.name: out}
        launches.append(launch)
    return tuple(buffers.values()), tuple(launches)


def _num_tiles(gemm: Gemm, config: LaunchConfig) -> int:
    rows = tile_capacity(gemm.num_slots, gemm.linear.weight.meta.shape[0], config.block_m)
    return rows * gemm_config.column_blocks(gemm, config)


def _common_args(gemm: Gemm, config: LaunchConfig, tiles: str) -> dict[str, Any]:
    x = gemm.x.meta
    return {
        "x_ptr": Ref(gemm.x.name),
        "slots_ptr": None if gemm.top_k is None else Ref("sorted_slots"),
        **bias_args(gemm.linear.bias),
        "up_bias_ptr": reference_to(gemm.linear.up_bias),
        "out_ptr": Ref(gemm.out),
        "tiles_ptr": Ref(tiles),
        "top_k": gemm.top_k or 1,
        "num_tokens": x.shape[0],
        "features": gemm.features,
        "depth": x.shape[1],
        "x_stride_m": x.strides[0],
        "x_stride_k": x.strides[1],
        "out_stride_m": gemm.columns,
        **(_NO_ACTIVATION if gemm.activation is None else activation_args(gemm.activation)),
        "GATED": gemm.gated,
        **operand_args(gemm.activation),
        "TAIL": gemm.tail,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }


def _tma_launch(gemm: Gemm, config: LaunchConfig, tiles: str) -> Launch:
    programs = gemm_config.persistent_programs(_num_tiles(gemm, config), config, gemm.gpu)
    args = {
        **_common_args(gemm, config, tiles),
        **_box_args(gemm, config),
        "x_desc": _rows_descriptor(gemm, config),
        "programs": programs,
    }
    kernel = with_formula(grouped_gemm_tma_kernel, gemm.activation)
    return Launch(kernel, (programs,), args, config.num_warps, config.num_stages)


def _mixed_launch(gemm: Gemm, config: LaunchConfig, tiles: str) -> Launch:
    args = _common_args(gemm, config, tiles) | _box_args(gemm, config)
    kernel = with_formula(grouped_gemm_mixed_kernel, gemm.activation)
    return Launch(kernel, (_num_tiles(gemm, config),), args, config.num_warps, config.num_stages)


def _rows_descriptor(gemm: Gemm, config: LaunchConfig) -> Descriptor | None:
    """TMA descriptor of rows that lie in order, where it pays."""
    if not gemm_config.loads_rows_by_tma(gemm, config):
        return None
    return Descriptor(gemm.x.name, gemm.x.meta.shape, gemm.x.meta.strides, (config.block_m, config.block_k))


def _box_args(gemm: Gemm, config: LaunchConfig) -> dict[str, Any]:
    """What kernels need that load weights by TMA."""
    boxed, (weight, _, up, _) = gemm.boxed_weight, gemm.linear
    block_n = config.block_n // 2 if gemm.halves or gemm.paired else config.block_n
    if tma.is_transposed(weight.meta):
        block = (1, config.block_k, block_n)
    else:
        block = (1, 2, block_n, config.block_k) if gemm.halves else (1, block_n, config.block_k)
    of_weight = Descriptor(weight.name, boxed.shape, boxed.strides, block)
    return {
        "weight_desc": of_weight,
        "up_desc": None if up is None else replace(of_weight, source=up.name),
        "TRANSPOSED": tma.is_transposed(weight.meta),
        "EVEN_K": weight.meta.shape[2] % config.block_k == 0,
        "STAGES": config.num_stages,
    }


def _generic_launch(gemm: Gemm, config: LaunchConfig, tiles: str) -> Launch:
    weight = gemm.linear.weight.meta
    args = {
        **_common_args(gemm, config, tiles),
        "weight_ptr": Ref(gemm.linear.weight.name),
        "up_ptr": reference_to(gemm.linear.up),
        "weight_stride_e": weight.strides[0],
        "weight_stride_n": weight.strides[1],
        "weight_stride_k": weight.strides[2],
        "F64": weight.dtype == torch.float64,
    }
    grid = (_num_tiles(gemm, config),)
    kernel = with_formula(grouped_gemm_generic_kernel, gemm.activation)
    return Launch(kernel, grid, args, config.num_warps, config.num_stages)


def grouped_gemm_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.grouped_gemm`."""
    return Program(*plan(gemm_of(args, gpu)), ("product",))


def batch_invariant_gemm_program(args: Any, gpu: Gpu) -> Program:
    """The program of `moe.batch_invariant_gemm`."""
    gemm = replace(gemm_of(args, gpu), rows_per_tile=gemm_config.INVARIANT_ROWS)
    return Program(*plan(gemm), ("product",))


def gemm_of(args: Any, gpu: Gpu) -> Gemm:
    """The product of `moe.grouped_gemm`."""
    x, linear = Operand("x", args.x), PairedLinear(*operands("weight", args.weight))
    return Gemm(x, linear, "product", args.x.shape[0], gpu, tail=True)
