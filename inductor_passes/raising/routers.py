"""RaiseRouters: what computes topk_weights and topk_ids from logits becomes topk_routing, if it is one of its configs.

A router is known by what it computes: it is run in float64 on logits of many sizes and compared with the configs that
its shapes and its constants allow.
"""

import operator
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import LAYER_KEY, PassLog, Refusal, layer_of
from inductor_passes.graph_tools import (
    arguments,
    call,
    describe,
    find,
    is_moe_op,
    is_op,
    outputs,
    pick,
)
from inductor_passes.raising.evaluation import Cut, concrete, cut, evaluate, is_plain, is_size, numbers
from inductor_passes.raising.views_of_rows import args, aten
from inductor_passes.raising.writing import erase_unread, record, written
from moe_ops.arguments import Router
from moe_ops.routing import reference
from moe_ops.types import RoutingConfig

_CLOSE = 1e-9
_MIN_ROWS = 256
_SPREADS = ((1.0, 0.0), (4.0, 0.0), (0.2, 1.0), (1.0, -60.0), (2.0, 8.0))
"""Scale and shift of the logits tried, row by row: scores that are alike, far apart, and next to nothing."""


class Choice(NamedTuple):
    """A router as a model wrote it."""

    weights: Node
    """[T, K]."""
    ids: Node
    """[T, K]."""
    logits: Node
    """[T, E]."""
    bias: Node | None
    """E numbers."""
    cut: Cut


class RaiseRouters:
    """What computes the weights and ids of a dispatch from logits becomes topk_routing."""

    name = "raise_routers"
    requires: tuple[str, ...] = ("build_dispatch",)
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Raises the router of every dispatch whose ids are computed in this graph."""
        for dispatch in find(graph, "build_dispatch"):
            try:
                with _compat.real_tensors():
                    _rewrite(graph, dispatch, log)
            except Refusal as refusal:
                log.refuse(refusal, dispatch)
        _compat.stable_topological_sort(graph)


def _rewrite(graph: Graph, dispatch: Node, log: PassLog) -> None:
    plan = arguments(dispatch)
    combines = (
        [user for user in outputs(dispatch)[1].users if is_op(user, "combine")]
        if 1 in outputs(dispatch)
        else []
    )
    if not combines or plan.topk_ids.op != "call_function" or is_moe_op(_source(plan.topk_ids)):
        return
    choice, config = _recognised(arguments(combines[0]).topk_weights, plan.topk_ids, plan.num_experts)
    with graph.inserting_before(choice.weights):
        bias = choice.bias
        if bias is not None and bias.meta["val"].dim() != 1:
            bias = written(graph, torch.flatten, (bias,), dispatch)
        router = call(
            graph, record.TopkRouting(record.Router(choice.logits, bias, config.spec)), choice.weights
        )
    log.lift("topk_routing", dispatch, choice.cut.nodes)
    router.meta[LAYER_KEY] = layer_of(dispatch)
    for index, old in ((0, choice.weights), (1, choice.ids)):
        _replace(graph, old, pick(graph, router, index))


def _source(node: Node) -> Node:
    return args(node)[0] if node.target is operator.getitem else node


def _replace(graph: Graph, old: Node, new: Node) -> None:
    """Our operators take weights and ids of any dtype; whoever else reads them gets the dtype they had."""
    for user in [user for user in old.users if is_moe_op(user)]:
        user.replace_input_with(old, new)
    if old.users and new.meta["val"].dtype != old.meta["val"].dtype:
        with graph.inserting_before(new.next):
            new = written(graph, lambda value: value.to(old.meta["val"].dtype), (new,), old)
    old.replace_all_uses_with(new)
    erase_unread(graph, old)


def _recognised(weights: Node, ids: Node, num_experts: int) -> tuple[Choice, RoutingConfig]:
    """The router behind weights and ids or, where weights are scaled further, behind what is scaled."""
    first: Refusal | None = None
    for candidate in (weights, *_other_weights(weights, ids)):
        try:
            for choice in _choices(candidate, ids, num_experts):
                config = _config(choice, num_experts)
                if config is not None:
                    return choice, config
            raise Refusal(
                candidate, "the router is no RoutingConfig: none gives its weights for the logits tried"
            )
        except Refusal as refusal:
            first = first or refusal
    assert first is not None
    raise first


def _other_weights(weights: Node, ids: Node) -> list[Node]:
    """Other tensors [T, K] that come out of a router with its ids, the last one first."""
    reached, pending = {}, [_source(ids)]
    while pending:
        node = pending.pop()
        if node not in reached and _is_in_router(node):
            reached[node] = None
            pending.extend(node.users)
    found = [
        node for node in ids.graph.nodes if node in reached and _has_shape(node, tuple(ids.meta["val"].shape))
    ]
    return [node for node in reversed(found) if node is not weights]


def _is_in_router(node: Node) -> bool:
    target = node.target
    if target is aten.slice.Tensor:  # Inductor pads a product of odd sizes, and cuts the result to size
        return args(node)[0].target not in _PRODUCTS
    if target is operator.getitem:
        return _is_in_router(args(node)[0])
    return node.op == "call_function" and is_plain(node) and target not in _PRODUCTS


_PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
)


def _choices(weights: Node, ids: Node, num_experts: int) -> list[Choice]:
    """Which of what a router reads may be its logits, and which its bias: of one token both are E numbers."""
    found = cut([weights, ids], lambda node: not _is_in_router(node))
    leaves = [leaf for leaf in found.leaves if not is_size(leaf)]
    tokens = ids.meta["val"].shape[0]
    choices = []
    for logits in leaves:
        others = [leaf for leaf in leaves if leaf is not logits]
        if _has_shape(logits, (tokens, num_experts)) and len(others) <= 1 and all(map(_is_vector, others)):
            if all(other.meta["val"].numel() == num_experts for other in others):
                choices.append(Choice(weights, ids, logits, others[0] if others else None, found))
    if not choices:
        raise Refusal(weights, f"the router reads {', '.join(map(describe, leaves))}, not logits and a bias")
    return choices


def _is_vector(leaf: Node) -> bool:
    value = leaf.meta.get("val")
    return isinstance(value, Tensor) and value.dtype.is_floating_point and leaf.op != "call_function"


def _has_shape(node: Node, shape: tuple[int | torch.SymInt, ...]) -> bool:
    value: Any = node.meta.get("val")
    is_floating = isinstance(value, Tensor) and value.dtype.is_floating_point and value.dim() == len(shape)
    return is_floating and all(map(_compat.statically_known_true, map(operator.eq, value.shape, shape)))


class _Trial(NamedTuple):
    """What a router gave for some logits and a bias."""

    logits: Tensor
    bias: Tensor | None
    weights: Tensor
    """[R, E], zero where an expert was not chosen."""
    ids: Tensor
    """[R, K]: others may read weights and ids column by column."""


def _config(choice: Choice, num_experts: int) -> RoutingConfig | None:
    """The config that gives what the router gives."""
    trial = _tried(choice, num_experts)
    top_k = concrete(choice.ids.meta["val"].shape[1]) or 0
    for config in _selections(choice.cut, num_experts, top_k):
        for weighed in _weighed(config, trial, choice.cut):
            if _agrees(weighed, trial):
                return weighed
    return None


def _tried(choice: Choice, num_experts: int) -> _Trial:
    tokens, top_k = (concrete(size) for size in choice.ids.meta["val"].shape)
    if not tokens or not top_k:
        raise Refusal(
            choice.ids, f"expert ids of shape {list(choice.ids.meta['val'].shape)} cannot be tried out"
        )
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(num_experts, generator=generator, dtype=torch.float64) / 4
    trials = [
        _run(choice, bias, tokens, num_experts, start, generator) for start in range(-(-_MIN_ROWS // tokens))
    ]
    logits, weights, ids = (torch.cat(each) for each in zip(*trials, strict=True))
    return _Trial(logits, None if choice.bias is None else bias, weights, ids)


def _run(
    choice: Choice, bias: Tensor, tokens: int, num_experts: int, start: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, E], the weights [T, E] that the router gives them, and the ids [T, K]."""
    spreads = torch.tensor(
        [_SPREADS[(start + row) % len(_SPREADS)] for row in range(tokens)], dtype=torch.float64
    )
    logits = torch.randn(tokens, num_experts, generator=generator, dtype=torch.float64)
    logits = logits * spreads[:, :1] + spreads[:, 1:]
    values: dict[Node, Any] = {
        leaf: concrete(leaf.meta["val"]) for leaf in choice.cut.leaves if is_size(leaf)
    }
    values[choice.logits] = logits
    if choice.bias is not None:
        values[choice.bias] = bias.view(choice.bias.meta["val"].shape)
    try:
        known = evaluate(choice.cut.nodes, values)
        ids = known[choice.ids].long()
        dense = torch.zeros_like(logits).scatter(1, ids, known[choice.weights].double())
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise Refusal(choice.weights, f"the router cannot be tried out: {error}") from error
    return logits, dense, ids


def _selections(router: Cut, num_experts: int, top_k: int) -> Iterator[RoutingConfig]:
    """Ways to select, with plain weights."""
    for order, score_fn, groups in product(
        ("score_then_topk", "topk_then_score"),
        ("softmax", "sigmoid", "sqrtsoftplus"),
        _groups(router, num_experts),
    ):
        try:
            yield RoutingConfig(top_k, score_fn, order, renormalize=False, **groups)
        except ValueError:  # more groups kept than there are
            continue


def _groups(router: Cut, num_experts: int) -> list[dict[str, Any]]:
    """Group limits that the shapes of a router allow: E experts seen as groups, and a top-k of these."""
    shapes = [node.meta["val"].shape for node in router.nodes if isinstance(node.meta.get("val"), Tensor)]
    counts = {
        shape[-2]
        for shape in shapes
        if len(shape) == 3 and shape[-2] * shape[-1] == num_experts and isinstance(shape[-2], int)
    }
    kept = {int(args(node)[1]) for node in router.nodes if node.target is aten.topk.default}
    limits = product(sorted(counts), sorted(kept), ("max", "top2_sum"), (float("-inf"), 0.0))
    names = ("num_groups", "topk_groups", "group_score", "group_fill")
    return [{}] + [
        dict(zip(names, limit, strict=True)) for limit in limits if limit[0] > 1 and limit[1] <= limit[0]
    ]


def _weighed(config: RoutingConfig, trial: _Trial, router: Cut) -> Iterator[RoutingConfig]:
    """`config`, if it selects as the router does, with the scale that its weights have, renormalised or not."""
    plain, decided = _dense(config, trial), _decided(config, trial)
    if not decided.any() or not torch.equal((plain != 0)[decided], (trial.weights != 0)[decided]):
        return
    written = numbers(router.nodes)
    total = plain.sum(-1, keepdim=True)
    options = [(False, 0.0, plain)] + [
        (True, eps, plain / (total + eps)) for eps in (0.0, *(n for n in written if 0 < n < 1e-3))
    ]
    for renormalize, eps, ours in options:
        scale = float(trial.weights[decided].sum() / ours[decided].sum())
        scale = next((each for each in _simple(written) if abs(each - scale) <= _CLOSE * scale), scale)
        yield replace(config, renormalize=renormalize, renorm_eps=eps, scale=scale)


def _simple(written: tuple[float, ...]) -> tuple[float, ...]:
    """Scales that a model may mean: its constants, and what divides by them."""
    return (1.0, *written, *(1 / number for number in written if number))


def _agrees(config: RoutingConfig, trial: _Trial) -> bool:
    (ours, ids), decided = _routed(config, trial), _decided(config, trial)
    close = (ours - trial.weights).abs() <= _CLOSE * trial.weights.abs()
    same = torch.equal(ids[decided], trial.ids[decided])
    return same and bool(close[decided].all()) and 2 * int(decided.sum()) >= len(decided)


def _decided(config: RoutingConfig, trial: _Trial) -> Tensor:
    """[R]: where no tie decides who is chosen, and so no order of the experts."""
    bias = None if trial.bias is None else trial.bias.flip(0)
    turned = _dense(config, trial._replace(logits=trial.logits.flip(1), bias=bias)).flip(1)
    return ((turned != 0) == (_dense(config, trial) != 0)).all(1)


def _dense(config: RoutingConfig, trial: _Trial) -> Tensor:
    return _routed(config, trial)[0]


def _routed(config: RoutingConfig, trial: _Trial) -> tuple[Tensor, Tensor]:
    """The weights [R, E] and ids [R, K] of `config`."""
    weights, ids = reference(Router(trial.logits, trial.bias, config.spec))
    return torch.zeros_like(trial.logits).scatter(1, ids.long(), weights), ids.long()
