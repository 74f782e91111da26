"""fused_moe_formula: `fused_moe` with a captured gate in the place of one that has a name.

A target of passes, see `gather_gemm_formula`. On a GPU it picks its kernels as `fused_moe` does.
"""

from typing import Any

from torch import Tensor

from moe_ops import _autograd, _library
from moe_ops.arguments import FusedMoeFormula, TopkRouting
from moe_ops.formula import Formula
from moe_ops.fused_experts import check_experts, fake, layer_flops
from moe_ops.fused_experts_formula import run_stages as run_experts
from moe_ops.fused_moe import check_placed_router
from moe_ops.gate import check_gate, launch
from moe_ops.types import RoutingConfig


def _check(args: FusedMoeFormula) -> None:
    (w13, w2), x = args.experts, args.hidden_states
    check_experts(x, args.experts, Formula.from_spec(args.gate.formula))
    check_placed_router(args)
    check_gate(args.gate, w13.weight.shape[0], w2.weight.shape[2], x)


def run_stages(args: FusedMoeFormula) -> Tensor:
    """The definition of `fused_moe_formula`: its stages, one after the other."""
    return run_experts(args.routed(*_library.call(TopkRouting(args.router))))


def _cuda(args: FusedMoeFormula) -> Tensor:
    return fake(args) if args.hidden_states.shape[0] == 0 else launch(args)


def _flops(shapes: Any) -> int:
    top_k = RoutingConfig.from_spec(shapes.router.routing).top_k
    return layer_flops(shapes.hidden_states[0] * top_k, shapes.experts)


_library.define(FusedMoeFormula, "Tensor", check=_check, cpu=run_stages, cuda=_cuda, fake=fake)
_autograd.define_gradient_of_formula(FusedMoeFormula, run_stages)
_library.define_flops(FusedMoeFormula, _flops)
_library.define_vmap_over_tokens(FusedMoeFormula)
