"""What a router gives for tokens made to try it: logits that are alike, far apart, next to nothing, and tied."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import trial
from moe_ops import RoutingConfig, topk_routing
from moe_ops.types import RoutingOrder, ScoreFn

_SPREADS = (
    *((1.0, 0.0), (4.0, 0.0), (0.2, 1.0), (2.0, 8.0), (1.0, -340.0)),
    *((150.0, 0.0), (1.0, 600.0)),  # sigmoids are alike, softmaxes next to nothing; past most limits
    *((1.0, -14.0), (1.0, -21.0), (1.0, -28.0), (1.0, -46.0), (1.0, -60.0)),  # sigmoids of an epsilon's size
)
"""Scale and shift of the logits tried, row by row."""
_ROWS = 12 * len(_SPREADS)
_EPSILONS = (1e-20, 1e-15, 1e-12, 1e-9, 1e-8, 1e-6, 1e-5)


@dataclass(frozen=True, slots=True)
class Output:
    """What a router returned, whatever the order.

    Attributes:
        logits: [T, E].
        weights: [T, E], zero where an expert was not chosen.
        chosen: [T, K], the weights of those that were, ascending.
        others: whatever else was returned.
        gradient: [T, H], of the logits and weights, each times a number of its own.
        names: "logits", "weights", "ids", or "" for anything else, in the order returned.
        top_k: K.
        shapes: of what was returned.
    """

    logits: Tensor
    weights: Tensor
    chosen: Tensor
    others: tuple[Tensor, ...]
    gradient: Tensor
    names: tuple[str, ...]
    top_k: int
    shapes: tuple[torch.Size, ...] = ()

    @property
    def num_experts(self) -> int:
        return self.logits.shape[1]


@dataclass(frozen=True, slots=True)
class Tried:
    """A router's twin, and what it gave for some tokens."""

    twin: Any
    hidden_states: Tensor
    extra: tuple[Tensor, ...]
    output: Output


def numbers(router: nn.Module) -> list[float]:
    """The numbers among a router's attributes, which may be its options."""
    return sorted({float(value) for value in vars(router).values() if isinstance(value, int | float)} - {0.0})


def run(forward: Callable[..., Any], twin: Any, hidden_states: Tensor, *extra: Tensor) -> Any:
    """What a router returns in float64, with its gradient. Raises ValueError as `read` and `trial.run` do."""
    tokens = hidden_states.detach().clone().requires_grad_()
    return read(tokens, trial.run(forward, twin, tokens, *extra))


def parameter_gradients(tried: Tried, forward: Callable[..., Any], rows: Tensor) -> list[Tensor]:
    """Of the twin's parameters, flat, by what it gives for some rows in this forward."""
    tokens = tried.hidden_states.detach().clone().requires_grad_()
    returned = trial.run(forward, tried.twin, tokens, *tried.extra)
    flat = [each.reshape(-1, each.shape[-1]) for each in returned]
    logits, weights, ids = (
        flat[tried.output.names.index(name)][rows] for name in ("logits", "weights", "ids")
    )
    parameters = list(tried.twin.parameters())
    gradients = torch.autograd.grad(_total(logits, weights, ids.long()), parameters, allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return [(torch.zeros_like(each) if gradient is None else gradient).flatten() for each, gradient in pairs]


def read(tokens: Tensor, returned: Any) -> Output:
    """Finds logits, weights and ids in what a router returned.

    Raises:
        ValueError: they are not there.
    """
    if not isinstance(returned, tuple) or not all(isinstance(each, Tensor) for each in returned):
        raise ValueError("it does not return logits, weights and ids")
    flat = [each.reshape(-1, each.shape[-1]) for each in returned]
    ids = next((place for place, each in enumerate(flat) if not each.is_floating_point()), None)
    if ids is None:
        raise ValueError("it returns no expert ids")
    shape = flat[ids].shape
    floats = [place for place in range(len(flat)) if place != ids and flat[place].is_floating_point()]
    # Where all experts are chosen, weights have the shape of logits, which transformers' routers return first.
    weights = next((place for place in reversed(floats) if flat[place].shape == shape), None)
    logits = next((place for place in floats if place != weights and flat[place].shape[0] == shape[0]), None)
    if weights is None or logits is None:
        raise ValueError("it does not return logits and weights beside the ids")
    names = {ids: "ids", weights: "weights", logits: "logits"}
    columns = max(flat[logits].shape[1], int(flat[ids].max()) + 1)
    dense = torch.zeros(shape[0], columns, dtype=flat[weights].dtype)
    return Output(
        flat[logits].detach(),
        dense.scatter_add(1, flat[ids].long(), flat[weights].detach()),
        flat[weights].detach().sort(1)[0],
        tuple(each.detach() for place, each in enumerate(returned) if place not in names),
        _gradient(tokens, flat[logits], flat[weights], flat[ids].long()),
        tuple(names.get(place, "") for place in range(len(flat))),
        shape[1],
        tuple(each.shape for each in returned),
    )


def _gradient(tokens: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return torch.autograd.grad(_total(logits, weights, ids), tokens)[0].reshape(-1, tokens.shape[-1])


def _total(logits: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """A sum in which each expert counts by a number of its own, so that the order of ids is of no matter."""
    by_expert = torch.linspace(0.5, 2.0, max(logits.shape[1], int(ids.max()) + 1), dtype=torch.float64)
    return (weights * by_expert[ids]).sum() + (logits * by_expert[: logits.shape[1]].sin()).sum()


def tokens_for(weight: Tensor) -> Tensor:
    """[T, H] whose product with `weight` [E, H] is logits of all spreads, where H is large enough for that."""
    num_experts, hidden_size = weight.shape
    generator = torch.Generator().manual_seed(1)
    spreads = torch.tensor([_SPREADS[row % len(_SPREADS)] for row in range(_ROWS)], dtype=torch.float64)
    logits = torch.randn(_ROWS, num_experts, generator=generator, dtype=torch.float64)
    logits = logits * spreads[:, :1] + spreads[:, 1:]
    rest = torch.randn(_ROWS, max(hidden_size - num_experts, 0), generator=generator, dtype=torch.float64) / (
        hidden_size**0.5
    )
    if not rest.shape[1]:
        return spreads[:, :1] * torch.randn(_ROWS, hidden_size, generator=generator, dtype=torch.float64)
    return torch.cat([logits - rest @ weight[:, num_experts:].T, rest], 1)


def steer(weight: Tensor) -> None:
    """Makes the first E columns of a twin's [E, H] the identity, so that tokens can say what their logits are."""
    num_experts, hidden_size = weight.shape
    if hidden_size > num_experts:
        weight.data[:, :num_experts] = torch.eye(num_experts, dtype=weight.dtype)


def other_batches(flat: Tensor) -> dict[int, tuple[Tensor, ...]]:
    """By number of dimensions, tokens in other numbers and shapes than [T, H], among them some that are alike."""
    hot = flat[:1] + flat / 1e4  # they choose the same experts, of which some have no room for so many
    return {
        2: (flat[:1], flat[:7], hot),
        3: (flat.unflatten(0, (2, -1)), flat.unflatten(0, (-1, 2)), flat[:1, None], hot[None]),
    }


def same(ours: Output, theirs: Output, rows: Tensor) -> bool:
    """Whether two routers gave the same: logits and all else, and for some rows weights by expert and gradients."""
    pairs = (
        (ours.logits, theirs.logits),
        (ours.weights[rows, : theirs.weights.shape[1]], theirs.weights[rows]),
        (ours.gradient[rows], theirs.gradient[rows]),
        *zip(ours.others, theirs.others, strict=True),
    )
    return ours.top_k == theirs.top_k and all(trial.close(*pair) for pair in pairs)


def decided(logits: Tensor, routing: RoutingConfig, bias: Tensor | None) -> Tensor:
    """[T]: where no tie decides who is chosen, and so no order of the experts."""
    turned = _dense(logits.flip(1), routing, None if bias is None else bias.flip(0)).flip(1)
    return ((turned != 0) == (_dense(logits, routing, bias) != 0)).all(1)


def _dense(logits: Tensor, routing: RoutingConfig, bias: Tensor | None) -> Tensor:
    weights, ids = topk_routing(logits, routing, bias)
    return torch.zeros_like(logits).scatter(1, ids.long(), weights)


def configs(tried: Tried, bias: Tensor | None) -> Iterator[RoutingConfig]:
    """The options by which the logits become the weights that were tried: at most one for each way to select."""
    logits, wanted = tried.output.logits, tried.output.weights
    for selection in _selections(tried):
        plain = _dense(logits, selection, bias)
        rows = ((plain != 0) == (wanted != 0)).all(1)
        if 2 * int(rows.sum()) > len(rows) and bool(rows[decided(logits, selection, bias)].all()):
            yield from _weighed(selection, plain[rows], wanted[rows], numbers(tried.twin))


_SCORES: tuple[tuple[ScoreFn, RoutingOrder], ...] = (
    ("softmax", "score_then_topk"),
    # Sigmoids of large logits are alike, and rows in which such a tie decides are left out: logits are tried first.
    ("sigmoid", "topk_then_score"),
    ("sqrtsoftplus", "topk_then_score"),
    ("sigmoid", "score_then_topk"),
    ("sqrtsoftplus", "score_then_topk"),
    ("softmax", "topk_then_score"),
)


def _selections(tried: Tried) -> Iterator[RoutingConfig]:
    top_k = tried.output.top_k
    for groups in _groups(tried):
        for score_fn, order in _SCORES:
            yield RoutingConfig(top_k, score_fn, order, renormalize=False, **groups)


def _groups(tried: Tried) -> Iterator[dict[str, Any]]:
    """No groups, then those that two of the router's numbers may mean."""
    yield {}
    num_experts, counts = (
        tried.output.num_experts,
        [int(each) for each in numbers(tried.twin) if each % 1 == 0],
    )
    for num_groups, topk_groups in product(counts, counts):
        if (
            not 1 <= topk_groups <= num_groups <= num_experts // 2
            or num_groups == 1
            or num_experts % num_groups
        ):
            continue
        if topk_groups * (num_experts // num_groups) >= tried.output.top_k:
            for score, fill in product(("top2_sum", "max"), (float("-inf"), 0.0)):
                names = ("num_groups", "topk_groups", "group_score", "group_fill")
                yield dict(zip(names, (num_groups, topk_groups, score, fill), strict=True))


def _weighed(
    selection: RoutingConfig, plain: Tensor, wanted: Tensor, written: list[float]
) -> Iterator[RoutingConfig]:
    total = plain.sum(1, keepdim=True)
    epsilons = [0.0, *(number for number in written if 0 < number < 1e-3), *_EPSILONS]
    options = [(True, eps, plain / (total + eps)) for eps in epsilons]
    for renormalize, eps, ours in [(False, 0.0, plain), *options]:
        scale = float(wanted.sum() / ours.sum())
        simple = [1.0, *written, *(1 / number for number in written)]
        scale = next((each for each in simple if abs(each - scale) <= trial.CLOSE * scale), scale)
        if trial.close(ours * scale, wanted):
            yield replace(selection, renormalize=renormalize, renorm_eps=eps, scale=scale)
            return
