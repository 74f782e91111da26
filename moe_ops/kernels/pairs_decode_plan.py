"""When few tokens are multiplied with weights of 4 bits without a sort, and the launch that does it."""

import math
from typing import Any

import torch

from moe_ops.e2m1 import FLOAT8, SCALES
from moe_ops.kernels.common import cdiv
from moe_ops.kernels.decode_args import route_args
from moe_ops.kernels.gemm import Operand, bias_args
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.pairs_decode import FEATURES, PART, pairs_gemv_kernel
from moe_ops.kernels.program import Buffer, Launch, Ref, TensorMeta
from moe_ops.kernels.scaled import converts, is_boxed
from moe_ops.kernels.scaled_args import global_args, stride_args, zero_args
from moe_ops.kernels.scaled_pairs import is_in_16_bits
from moe_ops.pairs import PAIRS, group_of

_MOST_TOKENS = 8
# Of weights, in all slots of several tokens.
_MOST_NUMBERS, _MOST_OF_INTEGERS, _MOST_OF_NVFP4 = 750e6, 1.5e9, 2e9
_LEAST_CAPABILITY = 80
_AT_ONCE, _OF_GATES_AT_ONCE, _DEEP = 2, 4, 4096
_LEAST_PARTS, _MOST_PARTS = 2, 8
_WARPS_OF_GATES = 16  # of a multiprocessor, by their registers


def multiplies_pairs(args: Any, gpu: Gpu) -> bool:
    """Whether a layer is for this kernel: rows of its weights are whole words of 16 bytes, and tokens are few."""
    num_tokens, num_slots = args.topk_ids.shape[0], math.prod(args.topk_ids.shape)
    are_few = num_tokens <= _MOST_TOKENS and num_slots <= args.w13.weight.shape[0]
    dtype = args.hidden_states.dtype
    if not are_few or not all(_multiplies(each, dtype, gpu) for each in _linears(args)):
        return False
    return num_tokens == 1 or not _are_for_tiles(args, num_slots, gpu)


def _are_for_tiles(args: Any, num_slots: int, gpu: Gpu) -> bool:
    """Whether several tokens take less time in tiles: of as many numbers, or shared experts, as make up for a sort.

    By measurement on an H200 with nine models.
    """
    num_ids = args.placement.num_ids(args.w13.weight.shape[0])
    slots_here = num_slots * args.w13.weight.shape[0] / num_ids
    numbers = slots_here * sum(each.weight.shape[1] * each.depth for each in _linears(args))
    scales, dtype = {each.scale.dtype for each in _linears(args)}, args.hidden_states.dtype
    if FLOAT8 in scales:
        are_many = numbers > _MOST_OF_NVFP4
    else:
        most = _MOST_NUMBERS if scales & set(SCALES) else _MOST_OF_INTEGERS
        are_many = numbers > most or 2 * num_slots > num_ids
    return are_many and all(is_in_16_bits(each, dtype) and is_boxed(each, gpu) for each in _linears(args))


def _linears(args: Any) -> tuple[Any, Any]:
    return args.w13, args.w2


def _multiplies(linear: Any, dtype: torch.dtype, gpu: Gpu) -> bool:
    """Whether a weight can be multiplied with rows of that dtype: integers are unpacked to it, so it has 16 bits."""
    weight = linear.weight
    in_words = weight.strides[2] == 1 and all(
        size % 16 == 0 for size in (weight.shape[2], *weight.strides[:2])
    )
    is_unpacked = linear.scale.dtype in SCALES or is_in_16_bits(linear, dtype)
    can = is_unpacked and converts(linear, gpu) and gpu.capability >= _LEAST_CAPABILITY
    return can and weight.dtype == PAIRS and weight.aligned and in_words


def pairs_gemv_launch(
    args: Any, x: tuple[str, TensorMeta], name: str, out: Buffer, gate: dict[str, Any], gpu: Gpu
) -> Launch:
    """Of the weight called `name` and rows x, called so, to `out`. gate: of `activation_args`."""
    (num_tokens, top_k), linear = args.topk_ids.shape, getattr(args, name)
    weight, bias, features = linear.weight, linear.bias, out.shape[1]
    is_token, num_slots = name == "w13", num_tokens * top_k
    programs = num_slots * (features // FEATURES.value)
    parts = _parts(linear, programs, gate["GATED"], gpu)
    given = {
        **route_args(args),
        **bias_args(None if bias is None else Operand(f"{name}_bias", bias)),
        **gate,
        "x_ptr": Ref(x[0]),
        "weight_ptr": Ref(name),
        "scale_ptr": Ref(f"{name}_scale"),
        **zero_args(f"{name}_zero", linear.zero),
        **global_args(f"{name}_global_scale", linear),
        "out_ptr": Ref(out.name),
        "inverse_ptr": Ref("inverse") if is_token else None,
        "top_k": top_k,
        "slots_of_row": top_k if is_token else 1,
        "features": features,
        "block_rows": linear.block_rows,
        **_depth_args(linear, parts, _at_once(linear, gate["GATED"])),
        **stride_args("x_stride", x[1].strides, "mk"),
        **stride_args("weight_stride", weight.strides[:2], "en"),
        **stride_args("scale_stride", linear.scale.strides, "enk"),
    }
    return Launch(pairs_gemv_kernel, (programs,), given, parts, 1)


def _depth_args(linear: Any, parts: int, at_once: int) -> dict[str, Any]:
    """How the kernel goes through a depth. GROUPS: scales that columns of a part have, as many as are loaded."""
    block_columns, is_nvfp4 = min(linear.block_columns, linear.depth), linear.scale.dtype == FLOAT8
    is_wide = block_columns % PART.value == 0
    whole = linear.depth // PART.value // (parts * at_once) * (parts * at_once)
    return {
        "DEPTH": linear.depth,
        "BLOCK_COLUMNS": block_columns,
        "GROUPS": 1 if is_wide else PART.value // group_of(linear.scale.dtype),
        "PAIRED": is_nvfp4 and _are_even(linear.scale),
        "PARTS": parts,
        "AT_ONCE": at_once,
        "WHOLE": whole,
        "REST": cdiv(cdiv(linear.depth, PART.value) - whole, parts),
    }


def _at_once(linear: Any, is_gated: bool) -> int:
    """Steps that are read before the first is multiplied: four of deep gates in NVFP4 took more time than two."""
    if not is_gated:
        return _AT_ONCE
    is_deep = linear.scale.dtype == FLOAT8 and linear.depth >= _DEEP
    return _AT_ONCE if is_deep else _OF_GATES_AT_ONCE


def _parts(linear: Any, programs: int, is_gated: bool, gpu: Gpu) -> int:
    """How many warps share the depth: as many as make the GPU busy at once, and have some steps each."""
    steps, warps = (4, _WARPS_OF_GATES) if is_gated else (2, _warps(linear))
    parts, most = _LEAST_PARTS, min(linear.depth // (PART.value * steps), _MOST_PARTS)
    while 2 * parts <= most and 2 * parts * programs <= warps * gpu.multiprocessors:
        parts *= 2
    return parts


def _warps(linear: Any) -> int:
    """Of a multiprocessor, by the registers that they take: up to 64, or 80."""
    is_whole = linear.depth % (_MOST_PARTS * _AT_ONCE * PART.value) == 0
    return 32 if is_whole and linear.scale.dtype in SCALES else 24


def _are_even(scale: TensorMeta) -> bool:
    """Whether rows of scales begin with two that one load takes."""
    return scale.aligned and scale.strides[2] == 1 and not any(stride % 2 for stride in scale.strides[:2])
