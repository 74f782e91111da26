"""Trials of routers: what a router of a graph gives for logits made for it, and whether a config gives the same."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes._compat_tracing import at_once
from inductor_passes.base import Refusal
from inductor_passes.raising.evaluation import Cut, concrete, evaluate, is_size, numbers
from inductor_passes.raising.indices import crowded_batches
from inductor_passes.sizes import size_given
from moe_ops.arguments import Router
from moe_ops.routing import reference
from moe_ops.types import RoutingConfig

CLOSE = 1e-9
_MIN_ROWS = 256
_SPREADS = ((1.0, 0.0), (4.0, 0.0), (0.2, 1.0), (1.0, -60.0), (2.0, 8.0))
"""Scale and shift of the logits tried, row by row: scores that are alike, far apart, and next to nothing."""
_EXTREME = ((400.0, 0.0),)
"""Logits of many of which float64 makes scores that are alike: sigmoids of one, shares of zero."""
_NOTHING = 1e-30
_SPOILT = (math.nan, -math.inf, math.nan)
_FURTHEST = 1e5
"""Constants up to this one may be limits of logits."""


class Choice(NamedTuple):
    """A router as a model wrote it."""

    weights: Node
    """[T, K]."""
    ids: Node
    """[T, K]."""
    logits: Node
    """[T, E], or [B, S, E] with as many tokens."""
    bias: Node | None
    """E numbers."""
    cut: Cut


class Trial(NamedTuple):
    """What a router gave for some logits and a bias."""

    logits: Tensor
    bias: Tensor | None
    weights: Tensor
    """[R, E], zero where an expert was not chosen."""
    ids: Tensor
    """[R, K]: others may read weights and ids column by column."""


def tried(choice: Choice, num_experts: int) -> Trial:
    """What the router gives for random logits. Raises Refusal where it cannot be run."""
    tokens, top_k = (concrete(size) for size in choice.ids.meta["val"].shape)
    if not tokens or not top_k:
        raise Refusal(
            choice.ids, f"expert ids of shape {list(choice.ids.meta['val'].shape)} cannot be tried out"
        )
    runs = -(-_MIN_ROWS // tokens)
    return _run(choice, _logits(runs * tokens, num_experts, _SPREADS).split(tokens))


def agrees_at_the_edges(config: RoutingConfig, choice: Choice, num_experts: int) -> bool:
    """Whether a router is a config for logits around each constant in it, for many tokens at the same experts, and for
    logits that are not finite wherever it makes finite weights of them.

    None of these limits shows where logits are random.
    """
    tokens, top_k = choice.ids.meta["val"].shape
    rows = concrete(tokens) or 1
    batches = crowded_batches(choice.ids.graph, tokens, concrete(top_k) or 1)
    crowd = _logits(1, num_experts, _SPREADS).repeat(batches * rows, 1)
    edges = [each for each in numbers(choice.cut.nodes) if 1.0 < each < _FURTHEST]
    spreads = [(4.0, each) for edge in edges for each in (edge, -edge)] or [(4.0, 0.0)]
    around = _logits(-(-len(spreads) // rows) * rows, num_experts, spreads)
    spoilt = _spoilt(-(-len(_SPREADS) * len(_SPOILT) // rows) * rows, num_experts)
    batches_tried = (crowd,), around.split(rows), spoilt.split(rows)
    return all(agrees(config, _finite(_run(choice, each)), most=False) for each in batches_tried)


class Alike(NamedTuple):
    """What a config does as a router does, of logits whose scores are alike."""

    chooses: bool
    weighs: bool


def where_scores_are_alike(config: RoutingConfig, choice: Choice, num_experts: int) -> Alike:
    """Whether a config does what the router does wherever the order of experts does not matter to the router.

    One that ranks logits tells those apart whose scores are alike; a config that ranks scores does not. What it chooses
    instead may have a weight of zero.
    """
    rows = concrete(choice.ids.meta["val"].shape[0]) or 1
    batches = _logits(-(-_MIN_ROWS // rows) * rows, num_experts, _EXTREME).split(rows)
    trial = _run(choice, batches)
    ours, theirs = (ids.sort(1).values for ids in (_routed(config, trial)[1], trial.ids))
    is_decided = trial.weights.isfinite().all(1)
    for order in _orders(trial.logits.shape[1], config.num_groups):
        turned = _run(choice, [each[:, order] for each in batches], order)
        is_decided &= (order[turned.ids].sort(1).values == theirs).all(1)
    off = (dense_weights(config, trial) - trial.weights).abs() > CLOSE * trial.weights.abs() + _NOTHING
    return Alike(torch.equal(ours[is_decided], theirs[is_decided]), not off[is_decided].any())


def _orders(num_experts: int, num_groups: int) -> list[Tensor]:
    """Some orders [E] of experts that leave groups together."""
    generator = torch.Generator().manual_seed(0)
    by_group = torch.arange(num_experts).view(num_groups, -1)
    drawn = [
        by_group[torch.randperm(size, generator=generator)][:, torch.randperm(width, generator=generator)]
        for size, width in [by_group.shape] * 3
    ]
    return [each.flatten() for each in (by_group.flip(0, 1), *drawn)]


def _logits(rows: int, num_experts: int, spreads: Sequence[tuple[float, float]]) -> Tensor:
    """Random logits [R, E], row by row of another of the spreads."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([spreads[row % len(spreads)] for row in range(rows)], dtype=torch.float64)
    logits = torch.randn(rows, num_experts, generator=generator, dtype=torch.float64)
    return logits * scales[:, :1] + scales[:, 1:]


def _spoilt(rows: int, num_experts: int) -> Tensor:
    """Random logits [R, E], row by row with another of `_SPOILT` for one expert, in the last case for all."""
    logits = _logits(rows, num_experts, _SPREADS)
    for row in range(rows):
        case = row % len(_SPOILT)
        logits[row, slice(None) if case == 2 else row % num_experts] = _SPOILT[case]
    return logits


def _finite(trial: Trial) -> Trial:
    """The rows of which the router made finite weights: of others nothing is known, and ours may be anything."""
    rows = trial.weights.isfinite().all(1)
    return trial._replace(logits=trial.logits[rows], weights=trial.weights[rows], ids=trial.ids[rows])


def _run(choice: Choice, batches: Sequence[Tensor], order: Tensor | None = None) -> Trial:
    """What the router gives for batches of logits [T, E]; `order` [E] is that of their experts."""
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(batches[0].shape[1], generator=generator, dtype=torch.float64) / 4
    bias = bias if order is None else bias[order]
    weights, ids = _given_to_all(choice, batches, bias)
    return Trial(torch.cat([*batches]), None if choice.bias is None else bias, weights, ids)


def _given_to_all(choice: Choice, batches: Sequence[Tensor], bias: Tensor) -> tuple[Tensor, Tensor]:
    """As `_given` of one batch after the other; of many in one run, unless an operator of the router takes only one."""
    if len(batches) > 1:
        try:
            given = at_once(lambda logits: _given(choice, logits, bias), torch.stack([*batches]))
            return given[0].flatten(0, 1), given[1].flatten(0, 1)
        except (Refusal, RuntimeError):
            pass
    each = [_given(choice, logits, bias) for logits in batches]
    return torch.cat([weights for weights, _ in each]), torch.cat([ids for _, ids in each])


def _given(choice: Choice, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The weights [T, E] that the router gives logits [T, E], and the ids [T, K]."""
    tokens = choice.ids.meta["val"].shape[0]
    values: dict[Node, Any] = {
        leaf: size_given(leaf.meta["val"], tokens, len(logits)) for leaf in choice.cut.leaves if is_size(leaf)
    }
    shape = choice.logits.meta["val"].shape
    values[choice.logits] = logits.view([size_given(size, tokens, len(logits)) or 0 for size in shape])
    if choice.bias is not None:
        values[choice.bias] = bias.view(choice.bias.meta["val"].shape)
    try:
        known = evaluate(choice.cut.nodes, values)
        ids = known[choice.ids].long()
        dense = torch.zeros_like(logits).scatter(1, ids, known[choice.weights].double())
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise Refusal(choice.weights, f"the router cannot be tried out: {error}") from error
    return dense, ids


def agrees(config: RoutingConfig, trial: Trial, most: bool = True) -> bool:
    """Whether a config gives what the router gave, where no tie decides; that must be `most` rows."""
    (ours, ids), decided = _routed(config, trial), decided_rows(config, trial)
    close = (ours - trial.weights).abs() <= CLOSE * trial.weights.abs()
    same = torch.equal(ids[decided], trial.ids[decided])
    return same and bool(close[decided].all()) and not (most and 2 * int(decided.sum()) < len(decided))


def decided_rows(config: RoutingConfig, trial: Trial) -> Tensor:
    """[R]: where no tie decides who is chosen, and so no order of the experts."""
    bias = None if trial.bias is None else trial.bias.flip(0)
    turned = dense_weights(config, trial._replace(logits=trial.logits.flip(1), bias=bias)).flip(1)
    return ((turned != 0) == (dense_weights(config, trial) != 0)).all(1)


def dense_weights(config: RoutingConfig, trial: Trial) -> Tensor:
    """The weights [R, E] that a config gives, zero where an expert is not chosen."""
    return _routed(config, trial)[0]


def _routed(config: RoutingConfig, trial: Trial) -> tuple[Tensor, Tensor]:
    """The weights [R, E] and ids [R, K] of `config`."""
    weights, ids = reference(Router(trial.logits, trial.bias, config.spec))
    return torch.zeros_like(trial.logits).scatter(1, ids.long(), weights), ids.long()
