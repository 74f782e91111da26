"""fused_experts: the experts of a whole MoE layer in one call, from expert ids.

    out[t] = sum over k of topk_weights[t, k] * w2[e] @ act(w13[e] @ hidden_states[t])  [+ joined[t]]
    e      = topk_ids[t, k]

What joins the sum is as in `combine`.

Traced by a compiler it emits the stage operators, so that passes can fuse across every border, or where a backward
follows the two halves that save least for it; eager it is one operator, which picks its kernels on the host from the
token count. That operator saves inputs, routing and plan for its gradient and recomputes the rest.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _compat, _library
from moe_ops._cpu_experts import run_experts
from moe_ops._expansion import define_expansions
from moe_ops.act_gemm_combine import gradients as down_gradients
from moe_ops.activation import activation_spec, gated_activation
from moe_ops.arguments import (
    ActGemmCombine,
    BuildDispatch,
    ExpertWeights,
    FusedExperts,
    GatherGemm,
    GroupedLinear,
    Placement,
)
from moe_ops.combine import check_joined, combine, joined_saved, with_joined, with_joined_gradients
from moe_ops.dispatch import build_dispatch, check_ids
from moe_ops.errors import describe, type_error, value_error
from moe_ops.formula import Formula
from moe_ops.gate import Custom, GateFunction, apply_function, custom
from moe_ops.gather_gemm import gradients as up_gradients, product_args
from moe_ops.grouped_gemm import check_linear, expect_linear, product, product_flops
from moe_ops.invariant_arguments import BatchInvariantExperts
from moe_ops.paired import Weight, expect_halves, linear_of, up_features
from moe_ops.permute import permute
from moe_ops.records import partial
from moe_ops.types import Activation, DispatchPlan, is_gated_spec, is_interleaved_spec

Emit = Literal["auto", "stages", "halves", "fused", "batch_invariant"]


def fused_experts(
    hidden_states: Tensor,
    w13: Weight,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str | Activation | GateFunction = "silu",
    *,
    w13_bias: Weight | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    shared: Tensor | None = None,
    per_expert: Sequence[Tensor] = (),
    emit: Emit = "auto",
) -> Tensor:
    """Runs the chosen experts of each token and sums them with their weights.

    Args:
        hidden_states: [T, H], any floating dtype.
        w13: [E, 2I, H] gate and up rows ([E, I, H] for an ungated activation), w2: [E, H, I]; dtype of
            hidden_states, stride 1 in either of the last two dimensions, never copied. Where gate and up are tensors of
            their own, w13 is (gate, up), [E, I, H] each, with the same strides.
        topk_weights: [T, K], any floating dtype. topk_ids: [T, K] int32 or int64; an id out of range (padding,
            remote expert) contributes exactly zero.
        activation: a name, an `Activation`, or a function of plain PyTorch: `activation(gate, up)` of both halves
            [S, I] where w13 has 2I rows, `activation(x)` where it has I. It gets float32 (float64 for float64).
        w13_bias: [E, 2I], for a pair (gate, up) of [E, I]; w2_bias: [E, H], dtype of hidden_states.
        expert_map: [E_global] int32, global to local ids, -1 for remote ones; see `build_dispatch`.
        apply_router_weight_on_input: weigh the experts' input instead of their output; only for K = 1.
        shared: [T, H] output of shared experts, added after the routed sum in the compute dtype.
        per_expert: tensors [E] or [E, I] that a function reads: it gets, behind gate and up, what each is for the
            expert of every row, [S, 1] or [S, I].
        emit: "auto" follows the compiler; "stages", "halves" or "fused" fixes what is emitted: an operator for each
            stage, two that keep gate_up for backward, or one that keeps its inputs. A function runs between stages.
            "batch_invariant": a token's bits do not depend on the other tokens, nor on how many there are or where it
            stands among them; see `moe_ops.batch_invariant`.

    Returns:
        [T, H], dtype of hidden_states.

    Raises:
        ValueError, TypeError: the message names argument, value and expectation. Under `torch.compile` the same
            text is inside the compiler's error.

    Gradient: to every floating argument; twice differentiable.

    Example:
        >>> out = moe_ops.fused_experts(hidden_states, w13, w2, topk_weights, topk_ids)
    """
    experts = ExpertWeights(linear_of("w13", w13, w13_bias), GroupedLinear(w2, w2_bias))
    spec, gate = gate_given(activation, per_expert, experts)
    args = FusedExperts(hidden_states, experts, topk_weights, topk_ids, Placement(expert_map), shared, spec)
    args = weigh_input(args) if apply_router_weight_on_input else args
    return run(args, emit) if gate is None else run_custom(args, gate, emit)


def gate_given(
    activation: str | Activation | GateFunction, per_expert: Sequence[Tensor], experts: ExpertWeights
) -> tuple[str, Custom | None]:
    """The spec of an activation, or a user's function. Raises ValueError, TypeError as `fused_experts`."""
    if not isinstance(per_expert, (tuple, list, torch.nn.ParameterList)):
        type_error("per_expert={}: expected a tuple or list of tensors", describe(per_expert))
    if isinstance(activation, str | Activation) or not callable(activation):
        if len(per_expert):
            value_error(
                "per_expert has {} tensors: expected none, {} reads none",
                len(per_expert),
                "a named activation",
            )
        return activation_spec(activation), None  # type: ignore[arg-type]
    if isinstance(activation, type):
        type_error("activation={}: expected a name, an Activation or a function", describe(activation))
    return "", custom(activation, per_expert, experts)


def run(args: FusedExperts, emit: Emit) -> Tensor:
    """`fused_experts` of its arguments as one value."""
    args = _autocast(args)
    if emit == "batch_invariant":
        return _library.call(BatchInvariantExperts(*args))
    return _in_parts(args, emit) if emits_stages(emit) else _library.call(args)


def _autocast(args: FusedExperts) -> FusedExperts:
    if not _library.autocasts(args.hidden_states):
        return args
    x, experts, shared, epilogue = _library.autocast(
        (args.hidden_states, args.experts, args.shared, args.epilogue)
    )
    return args._replace(hidden_states=x, experts=experts, shared=shared, epilogue=epilogue)


def run_custom(args: FusedExperts, gate: Custom, emit: Emit) -> Tensor:
    """`fused_experts` with a user's function between its products."""
    if emit in ("halves", "fused", "batch_invariant"):
        value_error(
            "emit={!r} with a function as activation: expected 'auto' or 'stages'; a pass fuses it", emit
        )
    emits_stages(emit)  # for what it raises
    args = _autocast(args)
    features = args.experts.w2.weight.shape[2]
    _check_in_callers_names(args, args.experts.w13.columns != features)
    return _between_stages(args, lambda gate_up, offsets: apply_function(gate_up, gate, features, offsets))


def emits_stages(emit: Emit) -> bool:
    """The one switch between several operators and the fused one.

    In `torch.vmap` a batch of tokens becomes tokens of the fused operator; stages would be as many plans.
    """
    if emit == "auto":
        return torch.compiler.is_compiling() and not _compat.is_in_vmap()
    if emit not in ("stages", "halves", "fused"):
        value_error("emit={!r}: expected 'auto', 'stages', 'halves', 'fused' or 'batch_invariant'", emit)
    return emit != "fused"


def weigh_input(args: FusedExperts) -> FusedExperts:
    """Weighs the experts' input instead of their output.

    Raises ValueError unless K = 1, and what the operator would of tokens and routing, which a product broadcasts.
    """
    topk_weights = args.topk_weights
    _check_tokens(args.hidden_states)
    expect_routed(args)
    _checks.expect_floating("topk_weights", topk_weights)
    if topk_weights.shape[1] != 1:
        value_error(
            "apply_router_weight_on_input=True with topk_weights of shape {}: expected [T, 1]",
            list(topk_weights.shape),
        )
    (hidden_states,) = _library.autocast((args.hidden_states,))  # as if the operator weighed it
    weighed = hidden_states * topk_weights.to(hidden_states.dtype)
    return args._replace(hidden_states=weighed, topk_weights=torch.ones_like(topk_weights))


def run_stages(args: FusedExperts) -> Tensor:
    """`fused_experts` as its stage operators."""
    _check_in_callers_names(args, is_gated_spec(args.activation))
    return _between_stages(args, lambda gate_up, _: gated_activation(gate_up, args.activation))


def _between_stages(args: FusedExperts, activate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    plan = build_dispatch(args.topk_ids, args.experts.w13.weight.shape[0], args.placement.expert_map)
    rows = permute(args.hidden_states, plan.sorted_slots)
    gate_up = product(rows, args.experts.w13, plan.expert_offsets)
    activated = activate(gate_up, plan.expert_offsets)
    expert_out = product(activated, args.experts.w2, plan.expert_offsets)
    return combine(expert_out, args.topk_weights, plan.inverse, args.shared, *args.epilogue)


def run_halves(args: FusedExperts) -> Tensor:
    """`fused_experts` as the two operators that keep nothing for their backward but tokens and gate_up."""
    _check_in_callers_names(args, is_gated_spec(args.activation))
    plan = build_dispatch(args.topk_ids, args.experts.w13.weight.shape[0], args.placement.expert_map)
    up, down = _halves(args, plan)
    return _library.call(down(_library.call(up)))


def _halves(args: FusedExperts, plan: DispatchPlan) -> tuple[GatherGemm, Callable[[Tensor], ActGemmCombine]]:
    """Arguments of both halves, of the second those that follow gate_up."""
    (w13, w2), (slots, inverse, offsets) = args.experts, plan

    def down(gate_up: Tensor) -> ActGemmCombine:
        weights, shared = args.topk_weights, args.shared
        return ActGemmCombine(
            gate_up, w2, offsets, weights, slots, inverse, shared, args.activation, args.epilogue
        )

    return GatherGemm(args.hidden_states, w13, slots, offsets), down


def _check_in_callers_names(args: FusedExperts, gated: bool) -> None:
    """What the stages' own checks would say of `x` and `weight`. Dynamo traces it at times, so it stays plain."""
    x, (w13, w2) = args.hidden_states, args.experts
    _check_tokens(x)
    expect_linear("w13", w13, ("E", "2I", x.shape[1]), "hidden_states", x)
    expect_halves("w13", w13, gated, is_interleaved_spec(args.activation))
    columns = w13.columns
    if gated and isinstance(columns, int) and columns % 2:
        value_error(
            "w13 has {} gate and up features: expected an even number for {!r}", columns, args.activation
        )
    features = columns // 2 if gated else columns
    expect_linear("w2", w2, (w13.weight.shape[0], x.shape[1], features), "hidden_states", x)
    expect_routed(args)


def _check_tokens(hidden_states: Tensor) -> None:
    _checks.expect_floating("hidden_states", hidden_states)
    _checks.expect_shape("hidden_states", hidden_states, ("T", "H"))


def expect_routed(args: Any) -> None:
    """Raises TypeError or ValueError unless there are ids and weights for each of the tokens."""
    x, weights, ids = args.hidden_states, args.topk_weights, args.topk_ids
    _checks.expect_shape("topk_ids", ids, (x.shape[0], "K"))
    _checks.expect_shape("topk_weights", weights, tuple(ids.shape))
    _checks.expect_same_device(x.device, "hidden_states", topk_weights=weights, topk_ids=ids)


def check(args: FusedExperts) -> None:
    """The checks of `fused_experts`."""
    check_experts(args.hidden_states, args.experts, Activation.from_spec(args.activation))
    check_routed(args)


def check_routed(args: Any) -> None:
    """The checks of what experts are given besides their input and weights: routing, placement, what is added."""
    x, placement, num_experts = args.hidden_states, args.placement, args.experts.w13.weight.shape[0]
    check_ids(BuildDispatch(args.topk_ids, placement, num_experts))
    _checks.expect_shape("topk_ids", args.topk_ids, (x.shape[0], "K"))
    _checks.expect_floating("topk_weights", args.topk_weights)
    _checks.expect_shape("topk_weights", args.topk_weights, tuple(args.topk_ids.shape))
    check_joined(args, x.shape[1], "hidden_states", x)
    tensors = {"topk_weights": args.topk_weights, "topk_ids": args.topk_ids, **placement._asdict()}
    _checks.expect_same_device(x.device, "hidden_states", **tensors)


def check_experts(hidden_states: Tensor, experts: ExpertWeights, gate: Activation | Formula) -> None:
    """The checks of a layer's input and weights."""
    (w13, w2), x = experts, hidden_states
    _check_tokens(x)
    check_linear("w13", w13, ("E", "2I", x.shape[1]), "hidden_states", x)
    if w13.weight.shape[0] < 1:
        value_error("w13 has shape {}: expected at least one expert", list(w13.weight.shape))
    features = up_features(w13, gate)
    check_linear("w2", w2, (w13.weight.shape[0], x.shape[1], features), "hidden_states", x)


def reference(args: FusedExperts) -> Tensor:
    """The definition of `fused_experts`, in plain PyTorch."""
    return with_joined(run_experts(args), args).to(args.hidden_states.dtype)


def _cuda(args: FusedExperts) -> Tensor:
    return fake(args) if args.hidden_states.shape[0] == 0 else _library.launch(args)


def fake(args: Any) -> Tensor:
    """An output of the right metadata, uninitialised, for operators on hidden states."""
    return args.hidden_states.new_empty(args.hidden_states.shape)


_library.define(FusedExperts, "Tensor", check=check, cpu=reference, cuda=_cuda, fake=fake)


def _save(args: FusedExperts, output: Tensor) -> Any:
    plan = build_dispatch(args.topk_ids, args.experts.w13.weight.shape[0], args.placement.expert_map)
    return joined_saved(args)._replace(topk_ids=None, placement=Placement()), plan


def _backward(saved: Any, needs: FusedExperts, grad: Tensor) -> FusedExperts:
    args, plan = saved
    return with_joined_gradients(expert_gradients(grad, args, plan, needs), grad, args, needs)


def expert_gradients(
    grad: Tensor, args: FusedExperts, plan: DispatchPlan, needs: FusedExperts
) -> FusedExperts:
    """The gradients that `needs` asks for. Recomputes the first product of the layer, not the second."""
    up, down = _halves(args, plan)
    rows = product_args(up)
    gate_up = product(*rows)
    needs_up = partial(GatherGemm, hidden_states=needs.hidden_states, w13=needs.experts.w13)
    needs_down = partial(
        ActGemmCombine,
        gate_up=needs_up.hidden_states or any(needs_up.w13),
        w2=needs.experts.w2,
        topk_weights=needs.topk_weights,
    )
    to_down = down_gradients(grad, down(gate_up), needs_down)
    to_up = partial(GatherGemm)
    if to_down.gate_up is not None:
        to_up = up_gradients(to_down.gate_up, rows, up, needs_up)
    to_experts = ExpertWeights(to_up.w13, to_down.w2)
    to_weights = to_down.topk_weights
    return partial(
        FusedExperts, hidden_states=to_up.hidden_states, experts=to_experts, topk_weights=to_weights
    )


_autograd.define_gradient(FusedExperts, _save, _backward, _autograd.tangent_of(run_stages))
_in_parts = define_expansions(FusedExperts, stages=run_stages, halves=run_halves)


def layer_flops(num_slots: int, experts: Any) -> int:
    """Of both products of a layer; `experts` holds shapes."""
    return product_flops(num_slots, experts.w13) + product_flops(num_slots, experts.w2)


_library.define_flops(
    FusedExperts, lambda shapes: layer_flops(shapes.topk_ids[0] * shapes.topk_ids[1], shapes.experts)
)
_library.define_vmap_over_tokens(FusedExperts)
