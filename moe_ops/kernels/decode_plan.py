"""When and how the decode kernels run: a choice and block sizes from shapes alone, and the launches."""

from dataclasses import dataclass
from math import log2
from typing import Any

import torch

from moe_ops.formula import Formula
from moe_ops.kernels.activation import activation_args
from moe_ops.kernels.combine import joined_args
from moe_ops.kernels.common import cdiv, compute_dtype, next_power_of_2
from moe_ops.kernels.decode import gemv_activation_kernel, gemv_combine_kernel
from moe_ops.kernels.decode_columns import gemv_columns_kernel, gemv_sum_kernel
from moe_ops.kernels.dispatch import placement_args
from moe_ops.kernels.formula import gate_of, operand_args, with_formula
from moe_ops.kernels.gemm import Operand, bias_args, operands, reference_to
from moe_ops.kernels.gpu import H200, KIB, Gpu
from moe_ops.kernels.program import ALIGNMENT, Buffer, Launch, Ref, TensorMeta
from moe_ops.kernels.tma import is_transposed
from moe_ops.types import Activation

_MAX_TOKENS = 8
# Below this share of distinct experts, grouping the slots of an expert saves more weight traffic than sorting costs;
# and up to that one it saves some that slots take turns.
_DISTINCT_SHARE, _TURNS_SHARE = 0.85, 0.95
_BYTES_PER_THREAD = 256  # of weights; more only for rows that four warps cannot hold otherwise
_MAX_WARPS = 4
# A larger block of rows is read in a loop. Twice as much in one shot is for sm_90, where it was measured.
_ONE_SHOT_BYTES = 32768
_LOOP_BYTES = 16384  # of a step of that loop
_MOST_ROWS = 128  # of a program
# Of all routes of a token a program reads so many bytes at once in two warps, in steps of so many bytes and numbers of
# a row: on an H200 a token of Qwen3-30B then takes 12 % less than by one step in four warps. Longer steps spill.
_COMBINED_BYTES, _COMBINED_STEP, _COMBINED_ROW = 65536, 4096, 128
_COMBINED_COLUMNS, _COMBINED_STEPS, _COMBINED_WARPS = 2, 32, 2
_UNEVEN_SHARE = 4  # of all these bytes that weights get which do not load in pieces of 16
_SHORTEST_STEP = 16
_STAGES, _STAGES_IN_LITTLE_MEMORY, _MUCH_MEMORY = 4, 3, 128 * KIB
# Of weights whose columns lie together: columns of a program, and bytes of each that it reads in a step.
_UP_COLUMNS, _DOWN_COLUMNS = 64, (64, 256)
_SOME_PROGRAMS, _MANY_PROGRAMS, _AT_ONCE = 192, 288, 4  # the last to a multiprocessor
_DOWN_WARPS, _ENOUGH_PROGRAMS, _MOST_PARTS = 2, 512, 8
_SUM_COLUMNS, _SUM_ELEMENTS = 64, 2048


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """block_n output columns a program, block_k of the depth at a time, `stages` of these steps in flight at once."""

    block_n: int
    block_k: int
    num_warps: int = _MAX_WARPS
    stages: int = 1


def prefers_gemv(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether so few slots share an expert that reading each slot's weights separately costs little."""
    if num_tokens > _MAX_TOKENS or top_k > _MOST_ROWS:
        return False
    return _distinct_share(num_tokens, top_k, num_experts) >= _DISTINCT_SHARE


def _distinct_share(num_tokens: int, top_k: int, num_experts: int) -> float:
    """How many experts the slots of these tokens hit, by slots, if all are chosen alike; no slots share none."""
    distinct = num_experts * (1.0 - (1.0 - min(top_k / num_experts, 1.0)) ** num_tokens)
    return distinct / (num_tokens * top_k) if num_tokens else 1.0


def takes_turns(args: Any) -> bool:
    """Whether the slots of a `FusedExperts` take turns at blocks of columns.

    With rows that lie together it pays where slots share experts, and beside a shared expert, whose weights are read at
    the same time or just before; else neighbouring programs had better read neighbouring rows. All measured on an H200.
    """
    w13 = args.experts.w13.weight
    share = _distinct_share(*args.topk_ids.shape, args.placement.num_ids(w13.shape[0]))
    return not is_transposed(w13) and (args.shared is not None or share <= _TURNS_SHARE)


def up_config(weight: TensorMeta, gate: Activation | Formula, num_slots: int, gpu: Gpu) -> GemvConfig:
    """Blocks for w13 [E, 2I or I, H], of which a program reads gate and up rows together."""
    halves = 2 if gate.is_gated else 1
    if not is_transposed(weight):
        return row_config(halves, weight, 8192, gpu)
    programs = num_slots * cdiv(weight.shape[1] // halves, _UP_COLUMNS)
    return _column_config(weight, halves, _up_columns(programs, gate.interleaved, gpu), _MAX_WARPS)


def _up_columns(programs: int, interleaved: bool, gpu: Gpu) -> tuple[int, int]:
    """Columns of a program, and bytes of each in a step, where there are so many programs of `_UP_COLUMNS`.

    Few programs had better be more, and read further. Where there are enough, reading 128 bytes side by side saves 2 to
    9 % of a layer (H200, H100), and where there are many, short steps as much again, if they run all at once.
    """
    if _MANY_PROGRAMS <= programs <= _AT_ONCE * gpu.multiprocessors:
        return _UP_COLUMNS, 128
    return (_UP_COLUMNS if programs >= _SOME_PROGRAMS and not interleaved else _UP_COLUMNS // 2), 256


def down_config(weight: TensorMeta, top_k: int, gpu: Gpu) -> GemvConfig:
    """Blocks for w2 [E, H, I]: of every route of a token at once, or of one slot where columns lie together."""
    if is_transposed(weight):
        return _column_config(weight, 1, _DOWN_COLUMNS, _DOWN_WARPS)
    routes, itemsize, depth = next_power_of_2(top_k), weight.dtype.itemsize, max(weight.shape[2], 1)
    share = 1 if _loads_in_pieces(weight, depth) else _UNEVEN_SHARE
    if routes * depth * itemsize > _COMBINED_BYTES // share:
        return _looped(routes * itemsize * share, gpu)
    fitting = _COMBINED_BYTES // share // (routes * depth * itemsize)
    block_n = min(fitting, _COMBINED_COLUMNS, max(_MOST_ROWS // routes, 1))
    longest = _COMBINED_STEP // share // (routes * block_n * itemsize)
    block_k = max(_COMBINED_ROW, next_power_of_2(cdiv(depth, _COMBINED_STEPS)))
    return GemvConfig(block_n, min(block_k, longest, next_power_of_2(depth)), _COMBINED_WARPS)


def row_config(rows: int, weight: TensorMeta, target_bytes: int, gpu: Gpu) -> GemvConfig:
    """For a program that reads `rows` rows, 1 or 2, of the weight [E, B, A] per output column."""
    share = 1 if _loads_in_pieces(weight, weight.shape[2]) else _UNEVEN_SHARE
    itemsize, depth = weight.dtype.itemsize, next_power_of_2(weight.shape[2])
    row_bytes = rows * depth * itemsize
    most = 2 * _ONE_SHOT_BYTES if gpu.capability == H200.capability else _ONE_SHOT_BYTES
    if row_bytes > most // share:
        return _looped(rows * itemsize * share, gpu)
    block_n = max(min(target_bytes // share // row_bytes, 8), 1)
    return GemvConfig(block_n, depth, _warps_for(block_n * rows * weight.shape[2] * itemsize * share))


def _warps_for(num_bytes: int) -> int:
    """The power of two of warps that is nearest, as a ratio, to what these bytes of weights, without padding, fill."""
    wanted = max(num_bytes, 1) / (32 * _BYTES_PER_THREAD)
    return min(1 << max(round(log2(wanted)), 0), _MAX_WARPS)


def _looped(step_bytes: int, gpu: Gpu) -> GemvConfig:
    """For a column too large for one shot, of which each step of the depth takes so many bytes."""
    stages = _STAGES if gpu.shared_memory >= _MUCH_MEMORY else _STAGES_IN_LITTLE_MEMORY
    return GemvConfig(1, max(_LOOP_BYTES // step_bytes, _SHORTEST_STEP), stages=stages)


def _column_config(weight: TensorMeta, halves: int, sizes: tuple[int, int], num_warps: int) -> GemvConfig:
    """For columns that lie together, in `halves` that lie apart. Steps fill the registers, so one is in flight."""
    block_n, column_bytes = sizes
    share = 1 if _loads_in_pieces(weight, weight.shape[1] // halves) else _UNEVEN_SHARE
    step = column_bytes // share // weight.dtype.itemsize
    return GemvConfig(block_n, min(step, next_power_of_2(weight.shape[2])), num_warps)


def _loads_in_pieces(weight: TensorMeta, length: int) -> bool:
    """Whether rows or columns load in pieces of 16 bytes, `length` being how much of them lies together.

    Else each element needs an address, and so registers, of its own.
    """
    leading = weight.strides[1 if weight.strides[2] == 1 else 2]
    return weight.aligned and leading % ALIGNMENT == 0 and length % ALIGNMENT == 0


def gemv_launches(args: Any, gpu: Gpu) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    """Launches from `hidden_states`, `topk_ids` and `topk_weights` to the buffer `combined` [T, H]."""
    (num_tokens, top_k), dtype = args.topk_ids.shape, args.hidden_states.dtype
    w2 = args.experts.w2.weight
    hidden_size, features = w2.shape[1:]
    buffers = (
        Buffer("activated", (num_tokens * top_k, features), dtype),
        Buffer("combined", (num_tokens, hidden_size), dtype),
    )
    first, config = up_launch(args, gpu), down_config(w2, top_k, gpu)
    if not is_transposed(w2):
        return buffers, (first, _down_launch(args, config))
    partial, products = _columns_launch(args, config)
    return (*buffers, partial), (first, products, _sum_launch(args, partial))


def _route_args(args: Any) -> dict[str, Any]:
    return {
        **placement_args(args.placement, args.experts.w13.weight.shape[0]),
        "ids_ptr": Ref("topk_ids"),
        "ids_stride_t": args.topk_ids.strides[0],
        "ids_stride_k": args.topk_ids.strides[1],
    }


def _weight_args(operand: Operand, config: GemvConfig) -> dict[str, Any]:
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


def _output_args(args: Any) -> dict[str, Any]:
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


def up_launch(args: Any, gpu: Gpu) -> Launch:
    """The first of them: up to `activated`."""
    (num_tokens, top_k), x = args.topk_ids.shape, args.hidden_states
    w13, gate = operands("w13", args.experts.w13), gate_of(args)
    features = args.experts.w2.weight.shape[2]
    config = up_config(_as_one(args.experts.w13), gate, num_tokens * top_k, gpu)
    given = {
        **_route_args(args),
        **_weight_args(w13.weight, config),
        **bias_args(w13.bias),
        "up_ptr": reference_to(w13.up),
        "up_bias_ptr": reference_to(w13.up_bias),
        **activation_args(gate),
        **operand_args(gate),
        "x_ptr": Ref("hidden_states"),
        "out_ptr": Ref("activated"),
        "top_k": top_k,
        "features": features,
        "x_stride_m": x.strides[0],
        "x_stride_k": x.strides[1],
        "STAGES": config.stages,
        "TAKE_TURNS": takes_turns(args),
    }
    grid = (num_tokens * top_k * cdiv(features, config.block_n),)
    return Launch(with_formula(gemv_activation_kernel, gate), grid, given, config.num_warps, 4)


def _as_one(w13: Any) -> TensorMeta:
    """A pair as the one weight that would take the same blocks."""
    weight, _, up, _ = w13
    if up is None:
        return weight
    num_experts, rows, depth = weight.shape
    return TensorMeta(
        (num_experts, 2 * rows, depth), weight.strides, weight.dtype, weight.aligned and up.aligned
    )


def _down_launch(args: Any, config: GemvConfig) -> Launch:
    w2 = operands("w2", args.experts.w2).weight
    given = {
        **_route_args(args),
        **_weight_args(w2, config),
        **_output_args(args),
        "x_ptr": Ref("activated"),
        "STAGES": config.stages,
        "TAKE_TURNS": takes_turns(args),
    }
    grid = (args.topk_ids.shape[0] * cdiv(w2.meta.shape[1], config.block_n),)
    return Launch(gemv_combine_kernel, grid, given, config.num_warps, 4)


def _columns_launch(args: Any, config: GemvConfig) -> tuple[Buffer, Launch]:
    """The buffer `partial` [parts, T * K, H], and what fills it."""
    (num_tokens, top_k), w2 = args.topk_ids.shape, operands("w2", args.experts.w2).weight
    _, features, depth = w2.meta.shape
    num_slots, blocks, steps = num_tokens * top_k, cdiv(features, config.block_n), cdiv(depth, config.block_k)
    parts = _parts(num_slots * blocks, steps)
    given = {
        **_route_args(args),
        **_weight_args(w2, config),
        "x_ptr": Ref("activated"),
        "out_ptr": Ref("partial"),
        "top_k": top_k,
        "num_slots": num_slots,
        "features": features,
        "PART": cdiv(steps, parts) * config.block_k,
    }
    partial = Buffer("partial", (parts, num_slots, features), compute_dtype(w2.meta.dtype))
    grid = (parts * num_slots * blocks,)
    return partial, Launch(gemv_columns_kernel, grid, given, config.num_warps, 1)


def _parts(programs: int, steps: int) -> int:
    """Into how many parts to cut the depth, of `steps`, so that there are enough programs."""
    wanted = next_power_of_2(cdiv(_ENOUGH_PROGRAMS, max(programs, 1)))
    return max(min(wanted, _MOST_PARTS, steps), 1)


def _sum_launch(args: Any, partial: Buffer) -> Launch:
    output = _output_args(args)
    parts, num_slots, features = partial.shape
    block_n = min(_SUM_ELEMENTS // output["ROUTES"], _SUM_COLUMNS)
    given = {
        **_route_args(args),
        **output,
        "partial_ptr": Ref(partial.name),
        "num_slots": num_slots,
        "F64": partial.dtype == torch.float64,
        "PARTS": parts,
        "BLOCK_N": block_n,
    }
    grid = (args.topk_ids.shape[0] * cdiv(features, block_n),)
    return Launch(gemv_sum_kernel, grid, given, _MAX_WARPS, 1)
