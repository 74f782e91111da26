"""gather_gemm_formula: `gather_gemm_act` with a captured gate in the place of one that has a name.

    out[row] = formula(w13[e] @ hidden_states[sorted_slots[row] // K] + bias[e])

A target of passes, which make the formula of what stands between two products, see `Formula`. It and the tensors it
reads are applied to the float32 accumulator. Rows of dropped slots are zeros.
"""

from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import GatherGemmFormula
from moe_ops.formula import Formula
from moe_ops.gate import apply_formula, check_gate, launch
from moe_ops.grouped_gemm import check_linear, check_offsets, product, product_flops
from moe_ops.paired import up_features
from moe_ops.permute import check_slots, permute


def _check(args: GatherGemmFormula) -> None:
    x = args.hidden_states
    _checks.expect_floating("hidden_states", x)
    _checks.expect_shape("hidden_states", x, ("T", "H"))
    check_slots(args.sorted_slots, x.shape[0])
    _checks.expect_same_device(x.device, "hidden_states", sorted_slots=args.sorted_slots)
    check_linear("w13", args.w13, ("E", "2I", x.shape[1]), "hidden_states", x)
    check_offsets(args.expert_offsets, args.w13, "hidden_states", x)
    check_gate(args.gate, args.w13.weight.shape[0], _features(args), x)


def _features(args: GatherGemmFormula) -> int:
    return up_features(args.w13, Formula.from_spec(args.gate.formula))


def run_stages(args: GatherGemmFormula) -> Tensor:
    """The definition of `gather_gemm_formula`: its stages, one after the other."""
    gate_up = product(permute(args.hidden_states, args.sorted_slots), args.w13, args.expert_offsets)
    return apply_formula(gate_up, args.gate, args.expert_offsets)


def _cuda(args: GatherGemmFormula) -> Tensor:
    return _fake(args) if args.sorted_slots.shape[0] == 0 else launch(args)


def _fake(args: GatherGemmFormula) -> Tensor:
    return args.hidden_states.new_empty((args.sorted_slots.shape[0], _features(args)))


_library.define(GatherGemmFormula, "Tensor", check=_check, cpu=run_stages, cuda=_cuda, fake=_fake)
_autograd.define_gradient_of_formula(GatherGemmFormula, run_stages)
_library.define_flops(GatherGemmFormula, lambda shapes: product_flops(shapes.sorted_slots[0], shapes.w13))
_library.define_vmap(GatherGemmFormula)
