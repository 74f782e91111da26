"""fused_experts_formula: `fused_experts` with a captured gate in the place of one that has a name.

A target of passes, see `gather_gemm_formula`. On a GPU it picks its kernels as `fused_experts` does.
"""

from torch import Tensor

from moe_ops import _autograd, _library
from moe_ops.arguments import FusedExpertsFormula
from moe_ops.combine import combine
from moe_ops.dispatch import build_dispatch
from moe_ops.formula import Formula
from moe_ops.fused_experts import check_experts, check_routed, fake, layer_flops
from moe_ops.gate import check_gate, launch
from moe_ops.gather_gemm_formula import run_stages as run_first_half
from moe_ops.grouped_gemm import product


def _check(args: FusedExpertsFormula) -> None:
    (w13, w2), x = args.experts, args.hidden_states
    check_experts(x, args.experts, Formula.from_spec(args.gate.formula))
    check_routed(args)
    check_gate(args.gate, w13.weight.shape[0], w2.weight.shape[2], x)


def run_stages(args: FusedExpertsFormula) -> Tensor:
    """The definition of `fused_experts_formula`: its stages, one after the other."""
    w13, w2 = args.experts
    slots, inverse, offsets = build_dispatch(args.topk_ids, w13.weight.shape[0], args.placement.expert_map)
    activated = run_first_half(args.first_half(slots, offsets))
    return combine(product(activated, w2, offsets), args.topk_weights, inverse, args.shared, *args.epilogue)


def _cuda(args: FusedExpertsFormula) -> Tensor:
    return fake(args) if args.hidden_states.shape[0] == 0 else launch(args)


_library.define(FusedExpertsFormula, "Tensor", check=_check, cpu=run_stages, cuda=_cuda, fake=fake)
_autograd.define_gradient_of_formula(FusedExpertsFormula, run_stages)
_library.define_flops(
    FusedExpertsFormula, lambda shapes: layer_flops(shapes.topk_ids[0] * shapes.topk_ids[1], shapes.experts)
)
_library.define_vmap_over_tokens(FusedExpertsFormula)
