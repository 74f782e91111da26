"""gather_gemm_act: permute, grouped_gemm with w13 and gated_activation in one operator: the up half of the experts.

    out[row] = act(w13[e] @ hidden_states[sorted_slots[row] // K] + bias[e])

The activation is applied to the float32 accumulator and rounded to the storage dtype once, as the w2 product needs
it. The gradient saves the inputs and recomputes gate_up. `gemm_combine` consumes the result.
"""

from typing import Any

from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.activation import (
    activation_gradient,
    activation_spec,
    gated_activation,
    reference as activation_reference,
)
from moe_ops.arguments import GatedActivation, GatherGemmAct, GroupedGemm
from moe_ops.dispatch import expect_plan
from moe_ops.grouped_gemm import (
    check_linear,
    check_offsets,
    gradients as gemm_gradients,
    product,
    product_flops,
    reference as gemm_reference,
)
from moe_ops.paired import Weight, linear_of, up_features
from moe_ops.permute import check_slots, permute, permute_gradient
from moe_ops.records import partial
from moe_ops.types import Activation, DispatchPlan


def gather_gemm_act(
    hidden_states: Tensor,
    w13: Weight,
    plan: DispatchPlan,
    activation: str | Activation = "silu",
    bias: Weight | None = None,
) -> Tensor:
    """`permute`, `grouped_gemm` and `gated_activation` in one operator: the up half of the experts.

    Args:
        hidden_states: [T, H].
        w13: [E, 2I, H], dtype of hidden_states ([E, I, H] for an ungated activation); or (gate, up), [E, I, H] each.
        plan: from `build_dispatch`.
        activation: a name or an `Activation`.
        bias: [E, 2I], dtype of hidden_states; of a pair [E, I] each.

    Returns:
        [S, I] in expert order, dtype of hidden_states. Rows of dropped slots are zeros.

    Raises:
        ValueError, TypeError: as the three stages do.

    Example:
        >>> up = moe_ops.gather_gemm_act(hidden_states, w13, plan)
    """
    expect_plan(plan)
    hidden_states, linear = _library.autocast((hidden_states, linear_of("w13", w13, bias)))
    slots, offsets, spec = plan.sorted_slots, plan.expert_offsets, activation_spec(activation)
    return _library.call(GatherGemmAct(hidden_states, linear, slots, offsets, spec))


def _check(args: GatherGemmAct) -> None:
    x = args.hidden_states
    _checks.expect_floating("hidden_states", x)
    _checks.expect_shape("hidden_states", x, ("T", "H"))
    check_slots(args.sorted_slots, x.shape[0])
    _checks.expect_same_device(x.device, "hidden_states", sorted_slots=args.sorted_slots)
    check_linear("w13", args.w13, ("E", "2I", x.shape[1]), "hidden_states", x)
    check_offsets(args.expert_offsets, args.w13, "hidden_states", x)
    up_features(args.w13, Activation.from_spec(args.activation))


def reference(args: GatherGemmAct) -> Tensor:
    """The definition of `gather_gemm_act`: its stages, one after the other."""
    top_k = max(args.sorted_slots.shape[0] // max(args.hidden_states.shape[0], 1), 1)
    rows = args.hidden_states.index_select(0, args.sorted_slots // top_k)
    gate_up = gemm_reference(GroupedGemm(rows, args.w13, args.expert_offsets))
    return activation_reference(GatedActivation(gate_up, args.activation))


def _cuda(args: GatherGemmAct) -> Tensor:
    return _fake(args) if args.sorted_slots.shape[0] == 0 else _library.launch(args)


def _fake(args: GatherGemmAct) -> Tensor:
    features = up_features(args.w13, Activation.from_spec(args.activation))
    return args.hidden_states.new_empty((args.sorted_slots.shape[0], features))


_library.define(GatherGemmAct, "Tensor", check=_check, cpu=reference, cuda=_cuda, fake=_fake)


def _save(args: GatherGemmAct, output: Tensor) -> Any:
    return args


def _backward(args: GatherGemmAct, needs: GatherGemmAct, grad: Tensor) -> GatherGemmAct:
    slots, product_args = args.sorted_slots, _product_args(args)
    grad_gate_up = activation_gradient(grad.contiguous(), product(*product_args), args.activation)
    wanted = partial(GroupedGemm, x=needs.hidden_states, weight=needs.w13)
    to_rows, to_w13, _ = gemm_gradients(grad_gate_up, product_args, wanted)
    to_hidden = None if to_rows is None else permute_gradient(to_rows, slots, args.hidden_states.shape[0])
    return partial(GatherGemmAct, hidden_states=to_hidden, w13=to_w13)


def _product_args(args: GatherGemmAct) -> GroupedGemm:
    return GroupedGemm(permute(args.hidden_states, args.sorted_slots), args.w13, args.expert_offsets)


def _stages(args: GatherGemmAct) -> Tensor:
    return gated_activation(product(*_product_args(args)), args.activation)


_autograd.define_gradient(GatherGemmAct, _save, _backward, _autograd.tangent_of(_stages))
_library.define_flops(GatherGemmAct, lambda shapes: product_flops(shapes.sorted_slots[0], shapes.w13))
_library.define_vmap(GatherGemmAct)
