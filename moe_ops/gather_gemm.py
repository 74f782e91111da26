"""gather_gemm: permute and grouped_gemm with w13 in one operator: what a layer that trains keeps of its up half.

    gate_up[row] = w13[e] @ hidden_states[sorted_slots[row] // K] + bias[e]

The gradient saves the tokens and gathers their rows again; `act_gemm_combine` consumes the result and saves that, so
the two together keep T rows of H and S rows of 2I, and compute no product twice. Static shapes, no host sync.
"""

from typing import Any

from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import GatherGemm, GroupedGemm
from moe_ops.dispatch import expect_plan
from moe_ops.grouped_gemm import (
    check_linear,
    check_offsets,
    gradients as gemm_gradients,
    product,
    product_flops,
    reference as gemm_reference,
)
from moe_ops.paired import Weight, linear_of
from moe_ops.permute import check_slots, permute, permute_gradient
from moe_ops.records import partial
from moe_ops.types import DispatchPlan


def gather_gemm(hidden_states: Tensor, w13: Weight, plan: DispatchPlan, bias: Weight | None = None) -> Tensor:
    """`permute` and `grouped_gemm` in one operator: the gate and up projections of every slot.

    Args:
        hidden_states: [T, H].
        w13: [E, B, H], dtype of hidden_states; or (gate, up), two of them that are as their concatenation.
        plan: from `build_dispatch`.
        bias: [E, B], dtype of hidden_states; of a pair two.

    Returns:
        [S, B], of a pair [S, 2B], in expert order, dtype of hidden_states. Rows of dropped slots are zeros.

    Raises:
        ValueError, TypeError: as the two stages do.

    Gradient: to hidden_states, w13 and bias; saves these, not the gathered rows. Twice differentiable.

    Example:
        >>> gate_up = moe_ops.gather_gemm(hidden_states, w13, plan)
    """
    expect_plan(plan)
    hidden_states, linear = _library.autocast((hidden_states, linear_of("w13", w13, bias)))
    return _library.call(GatherGemm(hidden_states, linear, plan.sorted_slots, plan.expert_offsets))


def _check(args: GatherGemm) -> None:
    x = args.hidden_states
    _checks.expect_floating("hidden_states", x)
    _checks.expect_shape("hidden_states", x, ("T", "H"))
    check_slots(args.sorted_slots, x.shape[0])
    _checks.expect_same_device(x.device, "hidden_states", sorted_slots=args.sorted_slots)
    check_linear("w13", args.w13, ("E", "B", x.shape[1]), "hidden_states", x)
    check_offsets(args.expert_offsets, args.w13, "hidden_states", x)


def reference(args: GatherGemm) -> Tensor:
    """The definition of `gather_gemm`: its stages, one after the other."""
    top_k = max(args.sorted_slots.shape[0] // max(args.hidden_states.shape[0], 1), 1)
    rows = args.hidden_states.index_select(0, args.sorted_slots // top_k)
    return gemm_reference(GroupedGemm(rows, args.w13, args.expert_offsets))


def _cuda(args: GatherGemm) -> Tensor:
    return _fake(args) if args.sorted_slots.shape[0] == 0 else _library.launch(args)


def _fake(args: GatherGemm) -> Tensor:
    return args.hidden_states.new_empty((args.sorted_slots.shape[0], args.w13.columns))


_library.define(GatherGemm, "Tensor", check=_check, cpu=reference, cuda=_cuda, fake=_fake)


def _save(args: GatherGemm, output: Tensor) -> Any:
    return args


def _backward(args: GatherGemm, needs: GatherGemm, grad: Tensor) -> GatherGemm:
    return gradients(grad, product_args(args), args, needs)


def product_args(args: GatherGemm) -> GroupedGemm:
    """The product, of gathered rows."""
    return GroupedGemm(permute(args.hidden_states, args.sorted_slots), args.w13, args.expert_offsets)


def gradients(grad: Tensor, up: GroupedGemm, args: GatherGemm, needs: GatherGemm) -> GatherGemm:
    """The gradients that `needs` asks for; `up` is `product_args(args)`."""
    wanted = partial(GroupedGemm, x=needs.hidden_states, weight=needs.w13)
    to_rows, to_w13, _ = gemm_gradients(grad, up, wanted)
    num_tokens = args.hidden_states.shape[0]
    to_hidden = None if to_rows is None else permute_gradient(to_rows, args.sorted_slots, num_tokens)
    return partial(GatherGemm, hidden_states=to_hidden, w13=to_w13)


def stages(args: GatherGemm) -> Tensor:
    """`gather_gemm` as its stage operators."""
    return product(*product_args(args))


_autograd.define_gradient(GatherGemm, _save, _backward, _autograd.tangent_of(stages))
_library.define_flops(GatherGemm, lambda shapes: product_flops(shapes.sorted_slots[0], shapes.w13))
_library.define_vmap(GatherGemm)
