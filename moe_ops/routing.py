"""topk_routing: router logits to K weighted experts per token.

    score     = softmax(logits) or sigmoid(logits)                 order "score_then_topk"
    selection = score + correction_bias     ("topk_then_score": logits + correction_bias)
    groups    : experts outside the best `topk_groups` of `num_groups` groups get selection `group_fill`
    ids       = the K largest selections, descending, ties to the lowest id
    weight    = score[ids]                  ("topk_then_score": score_fn over the K selected logits)
    weight    = weight / (sum(weight) + renorm_eps) * scale         (division only when `renormalize`)

T tokens, E experts, K experts per token. A selection that is not finite ranks last and its slot has weight 0; a
zero sum divides by 1. Sources: Mixtral and Qwen-MoE (softmax, renormalised), gpt-oss (top-k first), DeepSeek-V3
(arXiv 2412.19437: sigmoid, bias for selection only, groups). `build_dispatch` and `combine` consume the result.
Static output shapes, no host sync.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.errors import describe, type_error
from moe_ops.types import RoutingConfig

_NEG_INF = float("-inf")


def topk_routing(
    router_logits: Tensor, routing: RoutingConfig, correction_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Chooses `routing.top_k` experts per token and weighs them.

    Args:
        router_logits: [T, E], any floating dtype; computed in float32 (float64 for float64).
        routing: which formula; see `RoutingConfig`.
        correction_bias: [E], any floating dtype: added for the selection only, never to a weight, and has no
            gradient.

    Returns:
        topk_weights [T, K] float32 (float64 for float64 logits) and topk_ids [T, K] int32: K distinct ids in
        [0, E), ordered by descending selection score.

    Raises:
        ValueError: wrong rank or size, K > E, groups that do not divide E or hold fewer than K experts.
        TypeError: logits or bias not floating, routing not a RoutingConfig.

    Gradient: to router_logits; twice differentiable.

    Example:
        >>> weights, ids = moe_ops.topk_routing(logits, moe_ops.RoutingConfig(top_k=8))
    """
    return _library.call("topk_routing", router_logits, correction_bias, routing_spec(routing))


def routing_spec(routing: RoutingConfig) -> str:
    """The canonical string of `routing`. Raises TypeError when it is not a RoutingConfig."""
    if not isinstance(routing, RoutingConfig):
        type_error("routing={}: expected a RoutingConfig", describe(routing))
    return routing.spec


def check_router(router_logits: Tensor, correction_bias: Tensor | None, routing: str) -> None:
    """The checks every operator that routes shares; see `topk_routing` for what raises."""
    _checks.expect_floating("router_logits", router_logits)
    _checks.expect_shape("router_logits", router_logits, ("T", "E"))
    num_experts = router_logits.shape[1]
    if correction_bias is not None:
        _checks.expect_floating("correction_bias", correction_bias)
        _checks.expect_shape("correction_bias", correction_bias, (num_experts,))
    _checks.expect_same_device(
        router_logits.device, "router_logits", router_logits=router_logits, correction_bias=correction_bias
    )
    _checks.expect_routing(RoutingConfig.from_spec(routing), num_experts)


def reference(router_logits: Tensor, correction_bias: Tensor | None, routing: str) -> tuple[Tensor, Tensor]:
    """The definition of `topk_routing`, in plain PyTorch."""
    config = RoutingConfig.from_spec(routing)
    logits = router_logits.to(_checks.compute_dtype(router_logits.dtype))
    scores = _scores(logits, config)
    selection = scores if correction_bias is None else scores + correction_bias.to(scores.dtype)
    unusable = ~selection.isfinite()
    selection = selection.masked_fill(unusable, _NEG_INF)
    if config.num_groups > 1:  # A finite group_fill must not make an unusable score usable.
        selection = _keep_best_groups(selection, config).masked_fill(unusable, _NEG_INF)
    # A stable sort, not topk: ties must go to the lowest id.
    ranked, ids = selection.sort(dim=-1, descending=True, stable=True)
    ids, valid = ids[:, : config.top_k], ranked[:, : config.top_k].isfinite()
    return _weigh(scores.gather(1, ids), valid, config), ids.to(torch.int32)


def _scores(logits: Tensor, config: RoutingConfig) -> Tensor:
    """What experts are selected by: scores, or the logits themselves."""
    return logits if config.order == "topk_then_score" else _score(logits, config)


def _score(logits: Tensor, config: RoutingConfig) -> Tensor:
    return logits.softmax(-1) if config.score_fn == "softmax" else logits.sigmoid()


def _keep_best_groups(selection: Tensor, config: RoutingConfig) -> Tensor:
    grouped = selection.unflatten(-1, (config.num_groups, -1))
    best = grouped.amax(-1) if config.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order[:, : config.topk_groups], True)
    return grouped.masked_fill(~kept.unsqueeze(-1), config.group_fill).flatten(-2)


def _weigh(picked: Tensor, valid: Tensor, config: RoutingConfig) -> Tensor:
    chosen = picked.masked_fill(~valid, 0.0)
    if config.order == "topk_then_score":
        chosen = _score_chosen(picked, valid, config)
    if config.renormalize:
        total = chosen.sum(-1, keepdim=True) + config.renorm_eps
        chosen = chosen / total.masked_fill(total == 0, 1.0)
    return chosen * config.scale


def _score_chosen(picked: Tensor, valid: Tensor, config: RoutingConfig) -> Tensor:
    return _score(picked.masked_fill(~valid, _NEG_INF), config).masked_fill(~valid, 0.0)


def _reference_backward(
    grad_weights: Tensor, router_logits: Tensor, topk_weights: Tensor, topk_ids: Tensor, routing: str
) -> Tensor:
    config = RoutingConfig.from_spec(routing)
    logits = router_logits.to(_checks.compute_dtype(router_logits.dtype))
    ids = topk_ids.long()
    scores = _scores(logits, config)
    picked, valid = scores.gather(1, ids), topk_weights != 0
    chosen = picked.masked_fill(~valid, 0.0)
    if config.order == "topk_then_score":
        chosen = _score_chosen(picked, valid, config)
    grad = _weigh_backward(grad_weights.to(logits.dtype), chosen, config).masked_fill(~valid, 0.0)
    if config.score_fn == "sigmoid":
        grad = grad * chosen * (1 - chosen)
    elif config.order == "topk_then_score":
        grad = chosen * (grad - (grad * chosen).sum(-1, keepdim=True))
    sparse = torch.zeros_like(logits).scatter(1, ids, grad)
    if config.score_fn == "softmax" and config.order == "score_then_topk":
        finite = scores.masked_fill(~scores.isfinite(), 0.0)
        sparse = finite * (sparse - (grad * chosen).sum(-1, keepdim=True))
    return sparse.to(router_logits.dtype)


def _weigh_backward(grad: Tensor, chosen: Tensor, config: RoutingConfig) -> Tensor:
    grad = grad * config.scale
    if not config.renormalize:
        return grad
    total = chosen.sum(-1, keepdim=True) + config.renorm_eps
    zero = total == 0
    total = total.masked_fill(zero, 1.0)
    through_total = ((grad * chosen).sum(-1, keepdim=True) / total).masked_fill(zero, 0.0)
    return (grad - through_total) / total


def _cuda(router_logits: Tensor, correction_bias: Tensor | None, routing: str) -> tuple[Tensor, Tensor]:
    if router_logits.shape[0] == 0:
        return fake(router_logits, correction_bias, routing)
    from moe_ops.kernels import routing as kernels

    return kernels.launch(router_logits, correction_bias, RoutingConfig.from_spec(routing))


def fake(router_logits: Tensor, correction_bias: Tensor | None, routing: str) -> tuple[Tensor, Tensor]:
    """Outputs of the right metadata, uninitialised."""
    shape = (router_logits.shape[0], RoutingConfig.from_spec(routing).top_k)
    weights = router_logits.new_empty(shape, dtype=_checks.compute_dtype(router_logits.dtype))
    return weights, router_logits.new_empty(shape, dtype=torch.int32)


def _check_backward(
    grad_weights: Tensor, router_logits: Tensor, topk_weights: Tensor, topk_ids: Tensor, routing: str
) -> None:
    check_router(router_logits, None, routing)
    _checks.expect_floating("grad_weights", grad_weights)
    _checks.expect_floating("topk_weights", topk_weights)
    _checks.expect_index("topk_ids", topk_ids, (torch.int32,))
    shape = (router_logits.shape[0], RoutingConfig.from_spec(routing).top_k)
    tensors = {"grad_weights": grad_weights, "topk_weights": topk_weights, "topk_ids": topk_ids}
    for name, tensor in tensors.items():
        _checks.expect_shape(name, tensor, shape)
    _checks.expect_same_device(router_logits.device, "router_logits", **tensors)


def _cuda_backward(
    grad_weights: Tensor, router_logits: Tensor, topk_weights: Tensor, topk_ids: Tensor, routing: str
) -> Tensor:
    if router_logits.shape[0] == 0:
        return _fake_backward(grad_weights, router_logits, topk_weights, topk_ids, routing)
    from moe_ops.kernels import routing as kernels

    config = RoutingConfig.from_spec(routing)
    return kernels.launch_backward(grad_weights, router_logits, topk_weights, topk_ids, config)


def _fake_backward(
    grad_weights: Tensor, router_logits: Tensor, topk_weights: Tensor, topk_ids: Tensor, routing: str
) -> Tensor:
    return router_logits.new_empty(router_logits.shape)


_library.define(
    "topk_routing(Tensor router_logits, Tensor? correction_bias, str routing) "
    "-> (Tensor topk_weights, Tensor topk_ids)",
    check=check_router,
    cpu=reference,
    cuda=_cuda,
    fake=fake,
)
_library.define(
    "topk_routing_backward(Tensor grad_weights, Tensor router_logits, Tensor topk_weights, Tensor topk_ids, "
    "str routing) -> Tensor",
    check=_check_backward,
    cpu=_reference_backward,
    cuda=_cuda_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    router_logits, _, ctx.routing = inputs
    ctx.save_for_backward(router_logits, *output)


def _backward(ctx: Any, grad_weights: Tensor, grad_ids: Tensor | None) -> tuple[Tensor, None, None]:
    logits, topk_weights, topk_ids = ctx.saved_tensors
    return routing_gradient(grad_weights, logits, topk_weights, topk_ids, ctx.routing), None, None


def routing_gradient(
    grad_weights: Tensor, router_logits: Tensor, topk_weights: Tensor, topk_ids: Tensor, routing: str
) -> Tensor:
    """Gradient of `topk_routing` to router_logits [T, E], from its outputs.

    A weight of exactly zero marks a slot whose selection was not finite: it is constant, whatever its score. Where
    a valid score underflows to zero the derivative does, too.
    """
    return _library.call(
        "topk_routing_backward", grad_weights.contiguous(), router_logits, topk_weights, topk_ids, routing
    )


def routing_tangent(
    router_logits: Tensor, to_logits: Tensor | None, outputs: tuple[Tensor, Tensor], routing: str
) -> Tensor | None:
    """Tangent of topk_weights [T, K] along `to_logits` [T, E], from the outputs of `topk_routing`."""
    if to_logits is None:
        return None
    config, (topk_weights, topk_ids) = RoutingConfig.from_spec(routing), outputs

    def weights_of(logits: Tensor) -> Tensor:
        picked = _scores(logits.to(topk_weights.dtype), config).gather(1, topk_ids.long())
        return _weigh(picked, topk_weights != 0, config)

    return _autograd.tangent_of(weights_of)((router_logits,), (to_logits,))[0]


def _tangent(inputs: Sequence[Any], tangents: Sequence[Any]) -> _autograd.Tangents:
    router_logits, _, routing = inputs
    outputs = _library.operator("topk_routing")(*inputs)
    return routing_tangent(router_logits, tangents[0], outputs, routing), None


_autograd.define_gradient("topk_routing", _setup_context, _backward, _tangent)
_autograd.define_gradient_of_formula(
    "topk_routing_backward", _reference_backward, ("grad_weights", "router_logits")
)
_library.define_vmap("topk_routing", token_args=("router_logits",))
_library.define_vmap(
    "topk_routing_backward", token_args=("grad_weights", "router_logits", "topk_weights", "topk_ids")
)
