"""fused_experts_with_shared: the experts of a layer and the expert that every token visits, in one call.

    out[t] = fused_experts(hidden_states, ...)[t]
             + shared_weights[t] * shared_w2 @ act(shared_w13 @ hidden_states[t])

On CUDA both of its products are part of the routed experts' launches, with the few tokens for which these read each
slot's weights. Where they cannot be (its activation is another, weights lie by columns), it runs on a second stream
while the routed experts are on their way, and joins their sum in its last launch, or first, if that is not faster
(docs/PERFORMANCE.md has the figures). Fork and join lie inside the operator: a captured graph has them as edges, and no
stream crosses its border. The idea is that of vLLM's auxiliary stream for shared experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ops import _autograd, _checks, _library
from moe_ops.activation import activation_spec, gated_activation, out_features
from moe_ops.arguments import (
    ExpertWeights,
    FusedExperts,
    FusedExpertsWithShared,
    GroupedLinear,
    PairedLinear,
    Placement,
    SharedExpert,
)
from moe_ops.dispatch import build_dispatch
from moe_ops.fused_experts import check, expert_gradients, fake, layer_flops, reference, run_stages
from moe_ops.paired import Weight, expect_halves, expect_like_gate, linear_of
from moe_ops.records import partial
from moe_ops.types import Activation
from moe_ops.values import SharedAlone


def fused_experts_with_shared(
    hidden_states: Tensor,
    w13: Weight,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_w13: Weight,
    shared_w2: Tensor,
    activation: str | Activation = "silu",
    *,
    shared_weights: Tensor | None = None,
    shared_activation: str | Activation | None = None,
    w13_bias: Weight | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Runs the chosen experts of each token and the shared one, and sums them.

    Args:
        hidden_states, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias, expert_map: see `fused_experts`.
        shared_w13: [2J, H] gate and up rows of the shared expert ([J, H] for an ungated activation), shared_w2: [H, J],
            for any J; dtype of hidden_states. Where gate and up are tensors of their own, shared_w13 is (gate, up),
            [J, H] each, with the same strides.
        shared_weights: [T, 1], any floating dtype: its weight, such as that of a sigmoid gate; None for 1.
        shared_activation: None for that of the routed experts.

    Returns:
        [T, H], dtype of hidden_states. The shared expert's output is rounded to it before it is added.

    Raises:
        ValueError, TypeError: the message names argument, value and expectation.

    Gradient: to every floating argument; twice differentiable.

    Example:
        >>> out = moe_ops.fused_experts_with_shared(hidden, w13, w2, topk_weights, topk_ids, shared_w13, shared_w2)
    """
    spec = activation_spec(activation)
    experts = ExpertWeights(linear_of("w13", w13, w13_bias), GroupedLinear(w2, w2_bias))
    args = FusedExperts(hidden_states, experts, topk_weights, topk_ids, Placement(expert_map), None, spec)
    other = spec if shared_activation is None else activation_spec(shared_activation)
    gate, _, up, _ = linear_of("shared_w13", shared_w13, None)
    return run(args, SharedExpert(gate, shared_w2, shared_weights, other, up))


def run(args: FusedExperts, shared: SharedExpert) -> Tensor:
    """`fused_experts_with_shared` of its arguments as two values."""
    matrices = shared.shared_w13, shared.shared_up, shared.shared_w2
    x, experts, gate, up, down = _library.autocast((args.hidden_states, args.experts, *matrices))
    shared = shared._replace(shared_w13=gate, shared_up=up, shared_w2=down)
    weights, ids, placement = args.topk_weights, args.topk_ids, args.placement
    return _library.call(FusedExpertsWithShared(x, experts, weights, ids, placement, shared, args.activation))


def _alone(hidden_states: Tensor, shared: SharedExpert) -> Tensor:
    """[T, H]: the shared expert's output, in operations that have gradients."""
    gate_up = F.linear(hidden_states, shared.shared_w13)
    if shared.shared_up is not None:
        gate_up = torch.cat((gate_up, F.linear(hidden_states, shared.shared_up)), 1)
    out = F.linear(gated_activation(gate_up, shared.shared_activation), shared.shared_w2)
    return out if shared.shared_weights is None else (out * shared.shared_weights).to(out.dtype)


def _check(args: FusedExpertsWithShared) -> None:
    check(args.routed)
    x, (w13, w2, weights, spec, up) = args.hidden_states, args.shared
    activation = Activation.from_spec(spec)
    _checks.expect_shape("shared_w13", w13, ("2J", x.shape[1]))
    expect_halves("shared_w13", PairedLinear(w13, None, up), activation.is_gated, activation.interleaved)
    features = out_features(w13.shape[0] * (1 if up is None else 2), activation, "shared_w13")
    _checks.expect_shape("shared_w2", w2, (x.shape[1], features))
    matrices = {"shared_w13": w13, "shared_w2": w2}
    _checks.expect_same_dtype(x.dtype, "hidden_states", **matrices)
    for name, matrix in matrices.items():
        _checks.expect_weight_strides(name, matrix)
    if up is not None:
        expect_like_gate("shared_up", up, w13, "hidden_states", x)
    if weights is not None:
        _checks.expect_floating("shared_weights", weights)
        _checks.expect_shape("shared_weights", weights, (x.shape[0], 1))
    _checks.expect_same_device(x.device, "hidden_states", shared_weights=weights, **matrices)


def _reference(args: FusedExpertsWithShared) -> Tensor:
    return reference(args.routed._replace(shared=_alone(args.hidden_states, args.shared)))


def _cuda(args: FusedExpertsWithShared) -> Tensor:
    if args.hidden_states.shape[0] == 0:
        return fake(args)
    if _library.has_launches(args):
        return _library.launch(args)
    alone = SharedAlone(args.hidden_states, args.shared)
    return _library.launch_with_shared(args.routed, alone, lambda alone: _alone(*alone))


_library.define(FusedExpertsWithShared, "Tensor", check=_check, cpu=_reference, cuda=_cuda, fake=fake)


def _save(args: FusedExpertsWithShared, output: Tensor) -> Any:
    plan = build_dispatch(args.topk_ids, args.experts.w13.weight.shape[0], args.placement.expert_map)
    return args, plan


def _backward(saved: Any, needs: FusedExpertsWithShared, grad: Tensor) -> FusedExpertsWithShared:
    args, plan = saved
    routed = expert_gradients(grad, args.routed, plan, needs.routed)
    alone = _gradients_alone(grad, args, needs)
    to_hidden = alone.pop("hidden_states", None)
    return partial(
        FusedExpertsWithShared,
        hidden_states=None if to_hidden is None else to_hidden + routed.hidden_states,
        experts=routed.experts,
        topk_weights=routed.topk_weights,
        shared=partial(SharedExpert, **alone),
    )


def _gradients_alone(
    grad: Tensor, args: FusedExpertsWithShared, needs: FusedExpertsWithShared
) -> dict[str, Tensor]:
    """Gradients of `_alone` to those of its tensors that are asked for, by name."""
    tensors: dict[str, Any] = {"hidden_states": args.hidden_states, **args.shared._asdict()}
    asked = {"hidden_states": needs.hidden_states, **needs.shared._asdict()}
    wanted = [name for name in tensors if asked[name]]

    def of_wanted(*values: Any) -> Tensor:
        replaced = tensors | dict(zip(wanted, values, strict=True))
        return _alone(replaced.pop("hidden_states"), SharedExpert(**replaced))

    pullback = torch.func.vjp(of_wanted, *(tensors[name] for name in wanted))[1]
    return dict(zip(wanted, pullback(grad), strict=True))


def _stages(args: FusedExpertsWithShared) -> Tensor:
    return run_stages(args.routed._replace(shared=_alone(args.hidden_states, args.shared)))


def _flops(shapes: Any) -> int:
    num_tokens, top_k = shapes.topk_ids
    w13, w2, *_, up = ((1, *shape) if shape else None for shape in shapes.shared)
    alone: Any = ExpertWeights(PairedLinear(w13, None, up), GroupedLinear(w2))  # type: ignore[arg-type]  # shapes
    return layer_flops(num_tokens * top_k, shapes.experts) + layer_flops(num_tokens, alone)


_autograd.define_gradient(FusedExpertsWithShared, _save, _backward, _autograd.tangent_of(_stages))
_library.define_flops(FusedExpertsWithShared, _flops)
_library.define_vmap_over_tokens(FusedExpertsWithShared)
