"""Programs of the fused operators, composed of the stages' launches. Each picks its kernels from shapes alone.

`fused_experts` has two forms: decode (two GEMV launches, no sort) and grouped (dispatch, tile map, gathered GEMM with
the activation in its epilogue, GEMM, combine).
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from moe_ops.kernels.combine import combine_launch
from moe_ops.kernels.common import compute_dtype
from moe_ops.kernels.decode_plan import ExpertTensors, gemv_launches, prefers_gemv
from moe_ops.kernels.dispatch import dispatch_launches
from moe_ops.kernels.gemm import Gemm, Operand
from moe_ops.kernels.gemm_config import sorts_rows_first
from moe_ops.kernels.gpu import Gpu, gpu_of
from moe_ops.kernels.grouped_gemm import plan, plan_all
from moe_ops.kernels.permute import permute_launch
from moe_ops.kernels.program import (
    Buffer,
    Launch,
    Program,
    TensorMeta,
    describe,
    describe_index,
    describe_optional,
)
from moe_ops.kernels.routing import routing_launches
from moe_ops.types import Activation, RoutingConfig

_Plan = tuple[tuple[Buffer, ...], tuple[Launch, ...]]


def _contiguous(vector: torch.Tensor | None) -> torch.Tensor | None:
    return None if vector is None else vector.contiguous()


def _operand(name: str, meta: TensorMeta | None) -> Operand | None:
    return None if meta is None else Operand(name, meta)


def _buffer_meta(buffer: Buffer) -> TensorMeta:
    rows, columns = buffer.shape
    return TensorMeta((rows, columns), (columns, 1), buffer.dtype, True)


def _up_gemm(
    hidden_states: TensorMeta,
    w13: TensorMeta,
    bias: TensorMeta | None,
    num_slots: int,
    activation: Activation,
    gpu: Gpu,
) -> Gemm:
    top_k = num_slots // max(hidden_states.shape[0], 1)
    operands = Operand("hidden_states", hidden_states), Operand("w13", w13), _operand("w13_bias", bias)
    return Gemm(*operands, "activated", num_slots, gpu, top_k, activation)


def _down_gemm(x: Operand, w2: TensorMeta, bias: TensorMeta | None, gpu: Gpu) -> Gemm:
    return Gemm(x, Operand("w2", w2), _operand("w2_bias", bias), "expert_out", x.meta.shape[0], gpu)


@lru_cache(maxsize=1024)
def _routing_dispatch(
    router_logits: TensorMeta,
    correction_bias: TensorMeta | None,
    expert_map: TensorMeta | None,
    num_experts: int,
    routing: RoutingConfig,
) -> Program:
    buffers, launches = routing_launches(router_logits, correction_bias, routing)
    more_buffers, more_launches = dispatch_launches(_buffer_meta(buffers[1]), expert_map, num_experts)
    outputs = ("topk_weights", "topk_ids", "sorted_slots", "inverse", "expert_offsets")
    return Program(buffers + more_buffers, launches + more_launches, outputs)


@lru_cache(maxsize=1024)
def _gather_gemm_act(
    hidden_states: TensorMeta,
    w13: TensorMeta,
    num_slots: int,
    w13_bias: TensorMeta | None,
    activation: Activation,
    gpu: Gpu,
) -> Program:
    gemm = replace(_up_gemm(hidden_states, w13, w13_bias, num_slots, activation, gpu), tail=True)
    return Program(*plan(gemm), ("activated",))


@lru_cache(maxsize=1024)
def _gemm_combine(
    x: TensorMeta,
    w2: TensorMeta,
    w2_bias: TensorMeta | None,
    topk_weights: TensorMeta,
    shared: TensorMeta | None,
    gpu: Gpu,
) -> Program:
    gemm = _down_gemm(Operand("x", x), w2, w2_bias, gpu)
    buffers, launches = plan(gemm)
    buffer, launch = combine_launch(gemm.out_meta, topk_weights, shared)
    return Program((*buffers, buffer), (*launches, launch), (buffer.name,))


def _grouped_experts(tensors: ExpertTensors, activation: Activation, gpu: Gpu) -> _Plan:
    num_slots = tensors.topk_ids.shape[0] * tensors.topk_ids.shape[1]
    buffers, launches = dispatch_launches(tensors.topk_ids, tensors.expert_map, tensors.w13.shape[0])
    up = _up_gemm(tensors.hidden_states, tensors.w13, tensors.w13_bias, num_slots, activation, gpu)
    if sorts_rows_first(up):
        rows, permute = permute_launch(tensors.hidden_states, num_slots)
        buffers, launches = (*buffers, rows), (*launches, permute)
        up = replace(up, x=Operand(rows.name, _buffer_meta(rows)), top_k=None)
    down = _down_gemm(Operand(up.out, up.out_meta), tensors.w2, tensors.w2_bias, gpu)
    gemm_buffers, gemm_launches = plan_all((up, down))
    buffer, launch = combine_launch(down.out_meta, tensors.topk_weights, tensors.shared)
    return (*buffers, *gemm_buffers, buffer), (*launches, *gemm_launches, launch)


def _experts_launches(tensors: ExpertTensors, activation: Activation, gpu: Gpu) -> _Plan:
    num_tokens, top_k = tensors.topk_ids.shape
    num_ids = tensors.w13.shape[0] if tensors.expert_map is None else tensors.expert_map.shape[0]
    if prefers_gemv(num_tokens, top_k, num_ids):
        return gemv_launches(tensors, activation, gpu)
    return _grouped_experts(tensors, activation, gpu)


@lru_cache(maxsize=1024)
def _fused_experts(tensors: ExpertTensors, activation: Activation, gpu: Gpu) -> Program:
    return Program(*_experts_launches(tensors, activation, gpu), ("combined",))


@lru_cache(maxsize=1024)
def _fused_moe(
    tensors: ExpertTensors,
    router_logits: TensorMeta,
    correction_bias: TensorMeta | None,
    routing: RoutingConfig,
    activation: Activation,
    gpu: Gpu,
) -> Program:
    buffers, launches = routing_launches(router_logits, correction_bias, routing)
    more_buffers, more_launches = _experts_launches(tensors, activation, gpu)
    return Program(buffers + more_buffers, launches + more_launches, ("combined",))


def routing_dispatch_program(
    router_logits, correction_bias, expert_map, num_experts: int, routing: RoutingConfig
) -> Program:
    """The program of `moe.routing_dispatch` for tensors with this metadata (real, fake or meta)."""
    metas = (
        describe(router_logits),
        describe_optional(correction_bias),
        describe_index("expert_map", expert_map),
    )
    return _routing_dispatch(*metas, num_experts, routing)


def gather_gemm_act_program(
    hidden_states, w13, sorted_slots, expert_offsets, w13_bias, activation: Activation
) -> Program:
    """The program of `moe.gather_gemm_act` for tensors with this metadata (real, fake or meta)."""
    describe_index("sorted_slots", sorted_slots)
    describe_index("expert_offsets", expert_offsets)
    metas = describe(hidden_states), describe(w13), sorted_slots.shape[0], describe_optional(w13_bias)
    return _gather_gemm_act(*metas, activation, gpu_of(hidden_states.device))


def gemm_combine_program(x, w2, expert_offsets, w2_bias, topk_weights, inverse, shared) -> Program:
    """The program of `moe.gemm_combine` for tensors with this metadata (real, fake or meta)."""
    describe_index("expert_offsets", expert_offsets)
    describe_index("inverse", inverse)
    metas = describe(x), describe(w2), describe_optional(w2_bias), describe(topk_weights)
    return _gemm_combine(*metas, describe_optional(shared), gpu_of(x.device))


def fused_experts_program(
    hidden_states,
    w13,
    w2,
    topk_weights,
    topk_ids,
    w13_bias,
    w2_bias,
    expert_map,
    shared,
    activation: Activation,
) -> Program:
    """The program of `moe.fused_experts` for tensors with this metadata (real, fake or meta)."""
    needed = map(describe, (hidden_states, w13, w2, topk_weights, topk_ids))
    optional = (*map(describe_optional, (w13_bias, w2_bias)), describe_index("expert_map", expert_map))
    return _fused_experts(
        ExpertTensors(*needed, *optional, describe_optional(shared)),
        activation,
        gpu_of(hidden_states.device),
    )


def fused_moe_program(
    hidden_states,
    router_logits,
    w13,
    w2,
    w13_bias,
    w2_bias,
    correction_bias,
    expert_map,
    routing: RoutingConfig,
    activation: Activation,
) -> Program:
    """The program of `moe.fused_moe` for tensors with this metadata (real, fake or meta)."""
    logits, shape = describe(router_logits), (router_logits.shape[0], routing.top_k)
    weights = TensorMeta(shape, (shape[1], 1), compute_dtype(logits.dtype), True)
    routed = weights, weights._replace(dtype=torch.int32)
    optional = (*map(describe_optional, (w13_bias, w2_bias)), describe_index("expert_map", expert_map), None)
    tensors = ExpertTensors(*map(describe, (hidden_states, w13, w2)), *routed, *optional)
    gpu = gpu_of(hidden_states.device)
    return _fused_moe(tensors, logits, describe_optional(correction_bias), routing, activation, gpu)


def routing_dispatch(
    router_logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    num_experts: int,
    routing: RoutingConfig,
) -> tuple[torch.Tensor, ...]:
    """router_logits [T, E] -> (topk_weights, topk_ids [T, K], sorted_slots, inverse [S], expert_offsets [E+1])."""
    tensors = {
        "router_logits": router_logits,
        "correction_bias": correction_bias,
        "expert_map": _contiguous(expert_map),
    }
    return routing_dispatch_program(**tensors, num_experts=num_experts, routing=routing).run(tensors)


def gather_gemm_act(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    sorted_slots: torch.Tensor,
    expert_offsets: torch.Tensor,
    w13_bias: torch.Tensor | None,
    activation: Activation,
) -> torch.Tensor:
    """Rows of hidden_states [T, H] by slot, times w13, activated: [S, I]. Rows of dropped slots are zeros."""
    tensors = {
        "hidden_states": hidden_states,
        "w13": w13,
        "sorted_slots": sorted_slots.contiguous(),
        "expert_offsets": expert_offsets.contiguous(),
        "w13_bias": w13_bias,
    }
    return gather_gemm_act_program(**tensors, activation=activation).run(tensors)[0]


def gemm_combine(
    x: torch.Tensor,
    w2: torch.Tensor,
    expert_offsets: torch.Tensor,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    inverse: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """x [S, I] times w2, weighted and summed per token, plus shared: [T, H]."""
    tensors = {
        "x": x,
        "w2": w2,
        "expert_offsets": expert_offsets.contiguous(),
        "w2_bias": w2_bias,
        "topk_weights": topk_weights,
        "inverse": inverse.contiguous(),
        "shared": shared,
    }
    return gemm_combine_program(**tensors).run(tensors)[0]


def fused_experts(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    shared: torch.Tensor | None,
    activation: Activation,
) -> torch.Tensor:
    """The expert layer from ids: hidden_states [T, H] -> [T, H]."""
    tensors: dict[str, Any] = {
        "hidden_states": hidden_states,
        "w13": w13,
        "w2": w2,
        "topk_weights": topk_weights,
        "topk_ids": topk_ids,
        "w13_bias": w13_bias,
        "w2_bias": w2_bias,
        "expert_map": _contiguous(expert_map),
        "shared": shared,
    }
    return fused_experts_program(**tensors, activation=activation).run(tensors)[0]


def fused_moe(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    routing: RoutingConfig,
    activation: Activation,
) -> torch.Tensor:
    """The whole layer from router logits [T, E]: hidden_states [T, H] -> [T, H]."""
    tensors: dict[str, Any] = {
        "hidden_states": hidden_states,
        "router_logits": router_logits,
        "w13": w13,
        "w2": w2,
        "w13_bias": w13_bias,
        "w2_bias": w2_bias,
        "correction_bias": correction_bias,
        "expert_map": _contiguous(expert_map),
    }
    return fused_moe_program(**tensors, routing=routing, activation=activation).run(tensors)[0]
