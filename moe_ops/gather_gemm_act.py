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
    out_features,
    reference as activation_reference,
)
from moe_ops.dispatch import expect_plan
from moe_ops.grouped_gemm import (
    check_bias,
    check_weight,
    gradients as gemm_gradients,
    product,
    product_flops,
    reference as gemm_reference,
)
from moe_ops.permute import check_slots, permute, permute_gradient
from moe_ops.types import Activation, DispatchPlan


def gather_gemm_act(
    hidden_states: Tensor,
    w13: Tensor,
    plan: DispatchPlan,
    activation: str | Activation = "silu",
    bias: Tensor | None = None,
) -> Tensor:
    """`permute`, `grouped_gemm` and `gated_activation` in one operator: the up half of the experts.

    Args:
        hidden_states: [T, H].
        w13: [E, 2I, H], dtype of hidden_states ([E, I, H] for an ungated activation).
        plan: from `build_dispatch`.
        activation: a name or an `Activation`.
        bias: [E, 2I], dtype of hidden_states.

    Returns:
        [S, I] in expert order, dtype of hidden_states. Rows of dropped slots are zeros.

    Raises:
        ValueError, TypeError: as the three stages do.

    Example:
        >>> up = moe_ops.gather_gemm_act(hidden_states, w13, plan)
    """
    expect_plan(plan)
    hidden_states, w13, bias = _library.autocast(hidden_states, w13, bias)
    spec = activation_spec(activation)
    return _library.call(
        "gather_gemm_act", hidden_states, w13, plan.sorted_slots, plan.expert_offsets, bias, spec
    )


def _check(
    hidden_states: Tensor,
    w13: Tensor,
    sorted_slots: Tensor,
    expert_offsets: Tensor,
    w13_bias: Tensor | None,
    activation: str,
) -> None:
    _checks.expect_floating("hidden_states", hidden_states)
    _checks.expect_shape("hidden_states", hidden_states, ("T", "H"))
    check_slots(sorted_slots, hidden_states.shape[0])
    check_weight("w13", w13, hidden_states.shape[1], expert_offsets)
    check_bias("w13_bias", w13_bias, w13)
    out_features(w13.shape[1], Activation.from_spec(activation), "w13")
    _checks.expect_same_dtype(hidden_states.dtype, "hidden_states", w13=w13, w13_bias=w13_bias)
    _checks.expect_same_device(
        hidden_states.device,
        "hidden_states",
        hidden_states=hidden_states,
        w13=w13,
        sorted_slots=sorted_slots,
        expert_offsets=expert_offsets,
        w13_bias=w13_bias,
    )


def reference(
    hidden_states: Tensor,
    w13: Tensor,
    sorted_slots: Tensor,
    expert_offsets: Tensor,
    w13_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """The definition of `gather_gemm_act`: its stages, one after the other."""
    top_k = max(sorted_slots.shape[0] // max(hidden_states.shape[0], 1), 1)
    rows = hidden_states.index_select(0, sorted_slots // top_k)
    gate_up = gemm_reference(rows, w13, expert_offsets, w13_bias)
    return activation_reference(gate_up, activation)


def _cuda(
    hidden_states: Tensor,
    w13: Tensor,
    sorted_slots: Tensor,
    expert_offsets: Tensor,
    w13_bias: Tensor | None,
    activation: str,
) -> Tensor:
    if sorted_slots.shape[0] == 0:
        return _fake(hidden_states, w13, sorted_slots, expert_offsets, w13_bias, activation)
    from moe_ops.kernels import fused as kernels

    config = Activation.from_spec(activation)
    return kernels.gather_gemm_act(hidden_states, w13, sorted_slots, expert_offsets, w13_bias, config)


def _fake(
    hidden_states: Tensor,
    w13: Tensor,
    sorted_slots: Tensor,
    expert_offsets: Tensor,
    w13_bias: Tensor | None,
    activation: str,
) -> Tensor:
    features = out_features(w13.shape[1], Activation.from_spec(activation), "w13")
    return hidden_states.new_empty((sorted_slots.shape[0], features))


_library.define(
    "gather_gemm_act(Tensor hidden_states, Tensor w13, Tensor sorted_slots, Tensor expert_offsets, "
    "Tensor? w13_bias, str activation) -> Tensor",
    check=_check,
    cpu=reference,
    cuda=_cuda,
    fake=_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    hidden_states, w13, sorted_slots, expert_offsets, bias = ctx.saved_tensors
    rows = permute(hidden_states, sorted_slots)
    gate_up = product(rows, w13, expert_offsets, bias)
    grad_gate_up = activation_gradient(grad.contiguous(), gate_up, ctx.activation)
    needs = ctx.needs_input_grad
    to_rows, to_weight, to_bias = gemm_gradients(
        grad_gate_up, rows, w13, expert_offsets, (needs[0], needs[1], bias is not None and needs[4])
    )
    to_hidden = None if to_rows is None else permute_gradient(to_rows, sorted_slots, hidden_states.shape[0])
    return to_hidden, to_weight, None, None, to_bias, None


def _stages(
    hidden_states: Tensor,
    w13: Tensor,
    sorted_slots: Tensor,
    expert_offsets: Tensor,
    w13_bias: Tensor | None,
    activation: str,
) -> Tensor:
    gate_up = product(permute(hidden_states, sorted_slots), w13, expert_offsets, w13_bias)
    return gated_activation(gate_up, activation)


_autograd.define_gradient("gather_gemm_act", _setup_context, _backward, _autograd.tangent_of(_stages))
_library.define_flops("gather_gemm_act", lambda hidden_states, w13, slots, *_: product_flops(slots[0], w13))
_library.define_vmap("gather_gemm_act")
