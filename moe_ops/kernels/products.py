"""The grouped products of an operator, for those who choose how each is computed: by a table, by timing."""

from collections.abc import Callable
from typing import Any

from moe_ops import arguments as of_operators
from moe_ops.kernels import fused, grouped_gemm
from moe_ops.kernels.activation import gated_activation_program
from moe_ops.kernels.gemm import Gemm, Operand
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.routing import routing_launches


def _of_half(args: Any, gpu: Gpu) -> tuple[Gemm, ...]:
    return (fused.up_gemm(args, args.w13, args.sorted_slots.shape[0], gpu),)


def _of_second_half(args: Any, gpu: Gpu) -> tuple[Gemm, ...]:
    return (fused.down_gemm(Operand("x", args.x), args.w2, gpu),)


def _of_activated_half(args: Any, gpu: Gpu) -> tuple[Gemm, ...]:
    (activated,) = gated_activation_program(args, gpu).buffers
    return (fused.down_gemm(Operand(activated.name, activated.meta), args.w2, gpu),)


def _of_experts(args: Any, gpu: Gpu) -> tuple[Gemm, ...]:
    return () if fused.is_gemv(args) else fused.grouped_products(args, gpu)


def _of_layer(args: Any, gpu: Gpu) -> tuple[Gemm, ...]:
    buffers, _ = routing_launches(args.router)
    return _of_experts(args.routed(*(buffer.meta for buffer in buffers)), gpu)


_PRODUCTS: dict[type, Callable[[Any, Gpu], tuple[Gemm, ...]]] = {
    of_operators.GroupedGemm: lambda args, gpu: (grouped_gemm.gemm_of(args, gpu),),
    of_operators.GatherGemm: lambda args, gpu: (fused.gathered_gemm(args, gpu),),
    of_operators.GatherGemmAct: _of_half,
    of_operators.GatherGemmFormula: _of_half,
    of_operators.GemmCombine: _of_second_half,
    of_operators.ActGemmCombine: _of_activated_half,
    of_operators.FusedExperts: _of_experts,
    of_operators.FusedExpertsFormula: _of_experts,
    of_operators.FusedMoe: _of_layer,
    of_operators.FusedMoeFormula: _of_layer,
}


def of(args: Any, gpu: Gpu) -> tuple[Gemm, ...]:
    """The products of the operator that takes `args`, described; none of a layer in the form for few tokens."""
    return _PRODUCTS[type(args)](args, gpu)
