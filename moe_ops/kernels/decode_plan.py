"""When and how the decode kernels run: a choice and block sizes from shapes alone, and the two launches."""

from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.kernels.activation import activation_args
from moe_ops.kernels.common import cdiv, compute_dtype, next_power_of_2
from moe_ops.kernels.decode import gemv_activation_kernel, gemv_combine_kernel
from moe_ops.kernels.gpu import H200, KIB, Gpu
from moe_ops.kernels.program import ALIGNMENT, Buffer, Launch, Ref, TensorMeta
from moe_ops.types import Activation

_MAX_TOKENS = 8
# Below this share of distinct experts, grouping the slots of an expert saves more weight traffic than sorting costs.
_DISTINCT_SHARE = 0.85
_BYTES_PER_THREAD = 256  # of weights; more only for rows that four warps cannot hold otherwise
_MAX_WARPS = 4
# A larger block of rows is read in a loop. Twice as much in one shot is for sm_90, where it was measured, and for few
# rows: the addresses of many take the registers.
_ONE_SHOT_BYTES, _FEW_ROWS = 32768, 16
_LOOP_BYTES = 16384  # of a step of that loop, and of the accumulators of columns: 32 registers a thread
_MOST_ROWS = 128  # of a program
_UNEVEN_SHARE = 4  # of all these bytes that rows get which do not load in pieces of 16
_SHORTEST_STEP, _LONGEST_COLUMN_STEP = 16, 32
_STAGES, _STAGES_IN_LITTLE_MEMORY, _MUCH_MEMORY = 4, 3, 128 * KIB


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """block_n output columns a program, block_k of a row at a time (all of it where it covers the depth)."""

    block_n: int
    block_k: int
    num_warps: int = _MAX_WARPS


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """Metadata of the tensors of a whole expert layer, named as in `moe.fused_experts`."""

    hidden_states: TensorMeta
    w13: TensorMeta
    w2: TensorMeta
    topk_weights: TensorMeta
    topk_ids: TensorMeta
    w13_bias: TensorMeta | None
    w2_bias: TensorMeta | None
    expert_map: TensorMeta | None
    shared: TensorMeta | None


def prefers_gemv(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether so few slots share an expert that reading each slot's weights separately costs little."""
    if num_tokens > _MAX_TOKENS:
        return False
    distinct = num_experts * (1.0 - (1.0 - min(top_k / num_experts, 1.0)) ** num_tokens)
    return distinct >= _DISTINCT_SHARE * num_tokens * top_k


def gemv_config(rows: int, weight: TensorMeta, target_bytes: int, gpu: Gpu) -> GemvConfig:
    """Blocks for a GEMV that reads `rows` weight rows per output column of `weight` [E, B, A]."""
    share = 1 if _is_even(weight) else _UNEVEN_SHARE
    if weight.strides[2] != 1:
        return _column_config(rows, weight.dtype, _LOOP_BYTES // share)
    itemsize, depth = weight.dtype.itemsize, next_power_of_2(weight.shape[2])
    row_bytes = rows * depth * itemsize
    doubled = gpu.capability == H200.capability and rows <= _FEW_ROWS
    if row_bytes > (2 * _ONE_SHOT_BYTES if doubled else _ONE_SHOT_BYTES) // share:
        return GemvConfig(1, max(_LOOP_BYTES // share // (rows * itemsize), _SHORTEST_STEP))
    block_n = max(min(target_bytes // share // row_bytes, 8, _MOST_ROWS // rows), 1)
    num_warps = min(max(block_n * row_bytes * share // (32 * _BYTES_PER_THREAD), 1), _MAX_WARPS)
    return GemvConfig(block_n, depth, num_warps)


def _is_even(weight: TensorMeta) -> bool:
    """Whether rows load in pieces of 16 bytes; else each element needs an address, and so registers, of its own."""
    leading = weight.strides[2 if weight.strides[2] != 1 else 1]
    return weight.aligned and leading % ALIGNMENT == 0 and weight.shape[2] % ALIGNMENT == 0


def _column_config(rows: int, dtype: torch.dtype, accumulator_bytes: int) -> GemvConfig:
    """Columns are contiguous: wide in n, a loop over k, in steps whose accumulators fit the registers."""
    block_n = max(128 // rows, 16)
    step = accumulator_bytes // (rows * block_n * compute_dtype(dtype).itemsize)
    return GemvConfig(block_n, max(min(step, _LONGEST_COLUMN_STEP), 1))


def gemv_stages(gpu: Gpu) -> int:
    """Steps of the loop that are in flight at once."""
    return _STAGES if gpu.shared_memory >= _MUCH_MEMORY else _STAGES_IN_LITTLE_MEMORY


def gemv_launches(
    tensors: ExpertTensors, activation: Activation, gpu: Gpu
) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    """Two launches from `hidden_states`, `topk_ids` and `topk_weights` to the buffer `combined` [T, H]."""
    (num_tokens, top_k), dtype = tensors.topk_ids.shape, tensors.hidden_states.dtype
    hidden_size, features = tensors.w2.shape[1:]
    buffers = (
        Buffer("activated", (num_tokens * top_k, features), dtype),
        Buffer("combined", (num_tokens, hidden_size), dtype),
    )
    return buffers, (_first_launch(tensors, activation, gpu), _second_launch(tensors, gpu))


def _block_args(config: GemvConfig, gpu: Gpu) -> dict[str, int]:
    return {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": gemv_stages(gpu)}


def _route_args(tensors: ExpertTensors) -> dict[str, Any]:
    num_experts, expert_map = tensors.w13.shape[0], tensors.expert_map
    return {
        "ids_ptr": Ref("topk_ids"),
        "map_ptr": None if expert_map is None else Ref("expert_map"),
        "num_ids": num_experts if expert_map is None else expert_map.shape[0],
        "num_experts": num_experts,
        "ids_stride_t": tensors.topk_ids.strides[0],
        "ids_stride_k": tensors.topk_ids.strides[1],
    }


def _weight_args(name: str, weight: TensorMeta, bias: TensorMeta | None) -> dict[str, Any]:
    return {
        "weight_ptr": Ref(name),
        "bias_ptr": None if bias is None else Ref(f"{name}_bias"),
        "weight_stride_e": weight.strides[0],
        "weight_stride_n": weight.strides[1],
        "weight_stride_k": weight.strides[2],
        "bias_stride_e": 0 if bias is None else bias.strides[0],
        "bias_stride_n": 1 if bias is None else bias.strides[1],
        "F64": weight.dtype == torch.float64,
        "DEPTH": weight.shape[2],
    }


def _first_launch(tensors: ExpertTensors, activation: Activation, gpu: Gpu) -> Launch:
    (num_tokens, top_k), x = tensors.topk_ids.shape, tensors.hidden_states
    features = tensors.w2.shape[2]
    config = gemv_config(2 if activation.is_gated else 1, tensors.w13, 8192, gpu)
    args = {
        **_route_args(tensors),
        **_weight_args("w13", tensors.w13, tensors.w13_bias),
        **activation_args(activation),
        "x_ptr": Ref("hidden_states"),
        "out_ptr": Ref("activated"),
        "top_k": top_k,
        "features": features,
        "x_stride_m": x.strides[0],
        "x_stride_k": x.strides[1],
        **_block_args(config, gpu),
    }
    grid = (num_tokens * top_k * cdiv(features, config.block_n),)
    return Launch(gemv_activation_kernel, grid, args, config.num_warps, 4)


def _second_launch(tensors: ExpertTensors, gpu: Gpu) -> Launch:
    (num_tokens, top_k), shared = tensors.topk_ids.shape, tensors.shared
    features, routes = tensors.w2.shape[1], next_power_of_2(top_k)
    config = gemv_config(routes, tensors.w2, 32768, gpu)
    args = {
        **_route_args(tensors),
        **_weight_args("w2", tensors.w2, tensors.w2_bias),
        "x_ptr": Ref("activated"),
        "weights_ptr": Ref("topk_weights"),
        "shared_ptr": None if shared is None else Ref("shared"),
        "out_ptr": Ref("combined"),
        "features": features,
        "route_stride_t": tensors.topk_weights.strides[0],
        "route_stride_k": tensors.topk_weights.strides[1],
        "shared_stride_t": 0 if shared is None else shared.strides[0],
        "shared_stride_n": 1 if shared is None else shared.strides[1],
        "TOP_K": top_k,
        "ROUTES": routes,
        **_block_args(config, gpu),
    }
    grid = (num_tokens * cdiv(features, config.block_n),)
    return Launch(gemv_combine_kernel, grid, args, config.num_warps, 4)
