"""topk_routing: router logits to K weighted experts per token.

    score     = softmax(logits), sigmoid(logits) or sqrt(softplus(logits))     order "score_then_topk"
    selection = score + correction_bias     ("topk_then_score": logits + correction_bias)
    groups    : experts outside the best `topk_groups` of `num_groups` groups get selection `group_fill`
    ids       = the K largest selections, descending, ties to the lowest id
    weight    = score[ids]                  ("topk_then_score": score_fn over the K selected logits)
    weight    = weight / (sum(weight) + renorm_eps) * scale         (division only when `renormalize`)

T tokens, E experts, K experts per token. A selection that is not finite ranks last and its slot has weight 0; a
zero sum divides by 1. Sources: Mixtral and Qwen-MoE (softmax, renormalised), gpt-oss (top-k first), DeepSeek-V3
(arXiv 2412.19437: sigmoid, bias for selection only, groups), DeepSeek-V4 (sqrtsoftplus). `build_dispatch` and `combine`
consume the result. Static output shapes, no host sync.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _compat, _library
from moe_ops.arguments import Router, TopkRouting, TopkRoutingBackward
from moe_ops.errors import describe, type_error
from moe_ops.invariant_arguments import BatchInvariantRouting
from moe_ops.records import partial
from moe_ops.types import RoutingConfig, number_in

_NEG_INF = float("-inf")


def topk_routing(
    router_logits: Tensor,
    routing: RoutingConfig,
    correction_bias: Tensor | None = None,
    *,
    emit: Literal["auto", "batch_invariant"] = "auto",
) -> tuple[Tensor, Tensor]:
    """Chooses `routing.top_k` experts per token and weighs them.

    Args:
        router_logits: [T, E], any floating dtype; computed in float32 (float64 for float64).
        routing: which formula; see `RoutingConfig`.
        correction_bias: [E], any floating dtype: added for the selection only, never to a weight, and has no
            gradient.
        emit: "batch_invariant" as in `fused_experts`.

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
    kind = BatchInvariantRouting if _checks.asks_for_invariance(emit) else TopkRouting
    return _library.call(kind(Router(router_logits, correction_bias, routing_spec(routing))))


def routing_weights(router_logits: Tensor, topk_ids: Tensor, routing: RoutingConfig) -> Tensor:
    """Weighs experts that are chosen already, as `topk_routing` would had it chosen them. Plain PyTorch.

    Args:
        router_logits: [T, E], any floating dtype; computed in float32 (float64 for float64).
        topk_ids: [T, K] int32 or int64. An id outside [0, E) has weight 0, and no part in the others' sum.
        routing: which formula; see `RoutingConfig`. Its groups play no part.

    Returns:
        topk_weights [T, K] float32 (float64 for float64 logits).

    Raises:
        ValueError: wrong rank, another number of tokens, different devices.
        TypeError: logits not floating, ids not integers, routing not a RoutingConfig.

    Example:
        >>> weights = moe_ops.routing_weights(logits, ids_of_an_earlier_run, moe_ops.RoutingConfig(top_k=8))
    """
    spec = routing_spec(routing)
    _checks.expect_floating("router_logits", router_logits)
    _checks.expect_shape("router_logits", router_logits, ("T", "E"))
    _checks.expect_index("topk_ids", topk_ids)
    _checks.expect_shape("topk_ids", topk_ids, (router_logits.shape[0], "K"))
    _checks.expect_same_device(router_logits.device, "router_logits", topk_ids=topk_ids)
    scores, ids = _scores(_computed(router_logits), routing), topk_ids.long()
    known = (ids >= 0) & (ids < scores.shape[1])
    picked = scores.gather(1, ids.masked_fill(~known, 0))
    # From the text: Dynamo reads no float of an object that layers share in two checkpoints.
    eps, scale = number_in(spec, "renorm_eps", default=0.0), number_in(spec, "scale", default=1.0)
    return _weigh(_chosen(picked, known & picked.isfinite(), routing), routing, eps, scale)


def routing_spec(routing: RoutingConfig) -> str:
    """The canonical string of `routing`. Raises TypeError when it is not a RoutingConfig."""
    if not isinstance(routing, RoutingConfig):
        type_error("routing={}: expected a RoutingConfig", describe(routing))
    return routing.spec


def check_router(router: Router) -> None:
    """The checks every operator that routes shares; see `topk_routing` for what raises."""
    router_logits, correction_bias, routing = router
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


def largest_by_sorting(scores: Tensor, count: int) -> Tensor:
    """[T, count] int64: the columns of the largest of scores [T, N] in each row, descending, ties to the lowest."""
    # A stable sort, not topk: ties must go to the lowest.
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


Largest = Callable[[Tensor, int], Tensor]
Kept = Callable[[Tensor], Tensor]


def reference(
    router: Router, largest: Largest = largest_by_sorting, kept: Kept = lambda values: values
) -> tuple[Tensor, Tensor]:
    """The definition of `topk_routing`, in plain PyTorch. No score that `largest` sees is NaN or +inf.

    `kept` returns what it is given: weights before they are divided by their sum.
    """
    config = RoutingConfig.from_spec(router.routing)
    scores = _scores(_computed(router.router_logits), config)
    bias = router.correction_bias
    selection = scores if bias is None else scores + bias.to(scores.dtype)
    unusable = ~selection.isfinite()
    selection = selection.masked_fill(unusable, _NEG_INF)
    if config.num_groups > 1:  # A finite group_fill must not make an unusable score usable.
        selection = _keep_best_groups(selection, config, largest).masked_fill(unusable, _NEG_INF)
    ids = largest(selection, config.top_k)
    valid = selection.gather(1, ids).isfinite()
    chosen = kept(_chosen(scores.gather(1, ids), valid, config))
    return _weigh(chosen, config, config.renorm_eps, config.scale), ids.to(torch.int32)


def _computed(router_logits: Tensor) -> Tensor:
    return router_logits.to(_checks.compute_dtype(router_logits.dtype))


def _scores(logits: Tensor, config: RoutingConfig) -> Tensor:
    """What experts are selected by: scores, or the logits themselves."""
    return logits if config.order == "topk_then_score" else _score(logits, config)


def _score(logits: Tensor, config: RoutingConfig) -> Tensor:
    if config.score_fn == "sqrtsoftplus":
        root, decay = _root_and_decay(logits)
        return root * decay
    return logits.softmax(-1) if config.score_fn == "softmax" else logits.sigmoid()


def _slope(logits: Tensor, score: Tensor, config: RoutingConfig) -> Tensor:
    """The derivative of an elementwise score."""
    if config.score_fn == "sigmoid":
        return score * (1 - score)
    root, decay = _root_and_decay(logits)
    return _near_and_beyond(logits)[0].sigmoid() * decay / (2 * root)


def _root_and_decay(logits: Tensor) -> tuple[Tensor, Tensor]:
    """sqrt(log(1 + e^x)) as two factors: the root down to x = -36 and, from there on, e^(x/2).

    So the score is positive as long as e^(x/2) is, though e^x underflows at half of that; and its slope
    sigmoid(x) / (2 sqrt(log(1 + e^x))), in the limit 0 / 0, is e^(x/2) / 2.
    """
    near, beyond = _near_and_beyond(logits)
    root = torch.logaddexp(near, near.new_zeros(())).sqrt()
    return root, torch.exp(-beyond / 2)


def _near_and_beyond(logits: Tensor) -> tuple[Tensor, Tensor]:
    """x down to -36, below which log(1 + e^x) is e^x to the last bit of float64, and how far it is below that."""
    lowest = -36.0  # no global: Dynamo reads no shared float in two checkpoints
    return logits.masked_fill(logits < lowest, lowest), torch.relu(lowest - logits)


def _keep_best_groups(selection: Tensor, config: RoutingConfig, largest: Largest) -> Tensor:
    grouped = selection.unflatten(-1, (config.num_groups, -1))
    best = grouped.amax(-1) if config.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, largest(best, config.topk_groups), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), config.group_fill).flatten(-2)


def _chosen(picked: Tensor, valid: Tensor, config: RoutingConfig) -> Tensor:
    """The scores of those that are chosen, zero where nobody is."""
    if config.order == "topk_then_score":
        picked = _score(picked.masked_fill(~valid, _NEG_INF), config)
    return picked.masked_fill(~valid, 0.0)


def _weigh(chosen: Tensor, config: RoutingConfig, renorm_eps: float, scale: float) -> Tensor:
    if config.renormalize:
        total = chosen.sum(-1, keepdim=True) + renorm_eps
        chosen = chosen / total.masked_fill(total == 0, 1.0)
    return chosen * scale


def reference_backward(args: TopkRoutingBackward) -> Tensor:
    """The gradient of `topk_routing`, in plain PyTorch."""
    config, ids = RoutingConfig.from_spec(args.routing), args.topk_ids.long()
    scores = _scores(logits := _computed(args.router_logits), config)
    valid = args.topk_weights != 0
    chosen = _chosen(scores.gather(1, ids), valid, config)
    grad = _weigh_backward(args.grad_weights.to(logits.dtype), chosen, config).masked_fill(~valid, 0.0)
    if config.score_fn != "softmax":
        grad = grad * _slope(logits.gather(1, ids).masked_fill(~valid, 0.0), chosen, config)
    elif config.order == "topk_then_score":
        grad = chosen * (grad - (grad * chosen).sum(-1, keepdim=True))
    sparse = torch.zeros_like(logits).scatter(1, ids, grad)
    if config.score_fn == "softmax" and config.order == "score_then_topk":
        finite = scores.masked_fill(~scores.isfinite(), 0.0)
        sparse = finite * (sparse - (grad * chosen).sum(-1, keepdim=True))
    return sparse.to(args.router_logits.dtype)


def _weigh_backward(grad: Tensor, chosen: Tensor, config: RoutingConfig) -> Tensor:
    grad = grad * config.scale
    if not config.renormalize:
        return grad
    total = chosen.sum(-1, keepdim=True) + config.renorm_eps
    zero = total == 0
    total = total.masked_fill(zero, 1.0)
    through_total = ((grad * chosen).sum(-1, keepdim=True) / total).masked_fill(zero, 0.0)
    return (grad - through_total) / total


def _check(args: TopkRouting) -> None:
    check_router(args.router)


def _reference(args: TopkRouting) -> tuple[Tensor, Tensor]:
    return reference(args.router)


def _cuda(args: TopkRouting) -> tuple[Tensor, Tensor]:
    return _fake(args) if args.router.router_logits.shape[0] == 0 else _library.launch(args)


def _fake(args: TopkRouting) -> tuple[Tensor, Tensor]:
    return fake(args.router)


def fake(router: Router) -> tuple[Tensor, Tensor]:
    """Outputs of the right metadata, uninitialised."""
    logits, shape = router.router_logits, _shape(router.router_logits, router.routing)
    weights = logits.new_empty(shape, dtype=_checks.compute_dtype(logits.dtype))
    return weights, logits.new_empty(shape, dtype=torch.int32)


def _shape(logits: Tensor, routing: str) -> tuple[int, int]:
    return logits.shape[0], RoutingConfig.from_spec(routing).top_k


def _check_backward(args: TopkRoutingBackward) -> None:
    check_router(Router(args.router_logits, None, args.routing))
    _checks.expect_floating("grad_weights", args.grad_weights)
    _checks.expect_floating("topk_weights", args.topk_weights)
    _checks.expect_index("topk_ids", args.topk_ids, (torch.int32,))
    tensors = {
        "grad_weights": args.grad_weights,
        "topk_weights": args.topk_weights,
        "topk_ids": args.topk_ids,
    }
    for name, tensor in tensors.items():
        _checks.expect_shape(name, tensor, _shape(args.router_logits, args.routing))
    _checks.expect_same_device(args.router_logits.device, "router_logits", **tensors)


def _cuda_backward(args: TopkRoutingBackward) -> Tensor:
    return _fake_backward(args) if args.router_logits.shape[0] == 0 else _library.launch(args)


def _fake_backward(args: TopkRoutingBackward) -> Tensor:
    return args.router_logits.new_empty(args.router_logits.shape)


_library.define(
    TopkRouting,
    "(Tensor topk_weights, Tensor topk_ids)",
    check=_check,
    cpu=_reference,
    cuda=_cuda,
    fake=_fake,
)
_library.define(
    TopkRoutingBackward,
    "Tensor",
    check=_check_backward,
    cpu=reference_backward,
    cuda=_cuda_backward,
    fake=_fake_backward,
)


def _save(args: TopkRouting, output: tuple[Tensor, Tensor]) -> Any:
    return args.router.router_logits, *output, args.router.routing


def _backward(saved: Any, needs: TopkRouting, grad_weights: Tensor, _: Tensor | None) -> TopkRouting:
    return TopkRouting(partial(Router, router_logits=routing_gradient(grad_weights, *saved)))


def routing_gradient(
    grad_weights: Tensor, router_logits: Tensor, topk_weights: Tensor, topk_ids: Tensor, routing: str
) -> Tensor:
    """Gradient of `topk_routing` to router_logits [T, E], from its outputs.

    A weight of exactly zero marks a slot whose selection was not finite: it is constant, whatever its score. Where
    a valid score underflows to zero the derivative does, too.
    """
    grad_weights = grad_weights.contiguous()
    return _library.call(TopkRoutingBackward(grad_weights, router_logits, topk_weights, topk_ids, routing))


def routing_tangent(
    router: Router, to_logits: Tensor | None, outputs: tuple[Tensor, Tensor]
) -> Tensor | None:
    """Tangent of topk_weights [T, K] along `to_logits` [T, E], from the outputs of `topk_routing`."""
    if to_logits is None:
        return None
    config, (topk_weights, topk_ids) = RoutingConfig.from_spec(router.routing), outputs
    logits = _compat.make_dual(router.router_logits, to_logits).to(topk_weights.dtype)
    picked = _scores(logits, config).gather(1, topk_ids.long())
    chosen = _chosen(picked, topk_weights != 0, config)
    return _compat.unpack_dual(_weigh(chosen, config, config.renorm_eps, config.scale))[1]


def _tangent(args: TopkRouting, tangents: TopkRouting) -> _autograd.Tangents:
    return routing_tangent(args.router, tangents.router.router_logits, _library.run(args)), None


_autograd.define_gradient(TopkRouting, _save, _backward, _tangent)
_autograd.define_gradient_of_formula(TopkRoutingBackward, reference_backward)
_library.define_vmap_over_tokens(TopkRouting)
_library.define_vmap_over_tokens(TopkRoutingBackward)
