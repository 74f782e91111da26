"""RaiseRouters: what computes topk_weights and topk_ids from logits becomes topk_routing, if it is one of its configs.

A router is known by what it computes: it is run in float64 on logits of many sizes and compared with the configs that
its shapes and its constants allow.
"""

import math
import operator
from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import LAYER_KEY, PassLog, Refusal, layer_of
from inductor_passes.forms import form
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
from inductor_passes.raising.asserted import erase_held
from inductor_passes.raising.chosen_once import expect_one_choice, first_held
from inductor_passes.raising.evaluation import Cut, concrete, cut, is_plain, is_size, numbers
from inductor_passes.raising.router_trials import (
    CLOSE,
    Choice,
    Trial,
    agrees,
    agrees_at_the_edges,
    decided_rows,
    dense_weights,
    tried,
    where_scores_are_alike,
)
from inductor_passes.raising.views_of_rows import args, aten
from inductor_passes.raising.writing import erase_unread, in_shape, in_shape_of, or_as_it_was, record, written
from inductor_passes.sizes import is_open
from moe_ops.types import RoutingConfig

Known = dict[Hashable, RoutingConfig | None]
"""What each kind of router is; None for one that is no config."""
_KNOWN: Known = {}
"""Those whose sizes are all numbers, which say the same in every graph of the process."""
_MOST = 256


class RaiseRouters:
    """What computes the weights and ids of a dispatch from logits becomes topk_routing."""

    name = "raise_routers"
    requires: tuple[str, ...] = ("build_dispatch",)
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Raises the router of every dispatch whose ids are computed in this graph."""
        known: Known = {}
        for dispatch in find(graph, "build_dispatch"):
            try:
                with _compat.real_tensors():
                    _rewrite(graph, dispatch, log, known)
            except Refusal as refusal:
                log.refuse(refusal, dispatch)
        _compat.stable_topological_sort(graph)


def _rewrite(graph: Graph, dispatch: Node, log: PassLog, known: Known) -> None:
    plan = arguments(dispatch)
    combines = (
        [user for user in outputs(dispatch)[1].users if is_op(user, "combine")]
        if 1 in outputs(dispatch)
        else []
    )
    ids = _undropped(plan.topk_ids)
    if not combines or ids.op != "call_function" or is_moe_op(_source(ids)):
        return
    weights = arguments(combines[0]).topk_weights
    choice, config = _recognised(weights, ids, plan.num_experts, known)
    first = first_held(choice.ids)
    expect_one_choice(choice, first)
    with or_as_it_was(graph), graph.inserting_before(choice.weights):
        router = _router(graph, dispatch, choice, config)
        new_weights, new_ids = (pick(graph, router, index) for index in range(2))
        alike = in_shape_of(graph, first, choice.logits)
        shown = in_shape(graph, new_ids, first.meta["val"].shape[:-1], alike)
    log.lift("topk_routing", dispatch, choice.cut.nodes)
    erase_held(graph, choice.ids, plan.num_experts)
    for old, new in ((choice.weights, new_weights), (choice.ids, new_ids), (first, shown)):
        if not old._erased:
            _replace(graph, old, new)
    erase_unread(graph, shown)


def _router(graph: Graph, dispatch: Node, choice: Choice, config: RoutingConfig) -> Node:
    bias, logits = choice.bias, choice.logits
    if logits.meta["val"].dim() != 2:
        logits = written(graph, lambda rows: rows.flatten(0, -2), (logits,), dispatch)
    if bias is not None and bias.meta["val"].dim() != 1:
        bias = written(graph, torch.flatten, (bias,), dispatch)
    router = call(graph, record.TopkRouting(record.Router(logits, bias, config.spec)), choice.weights)
    router.meta[LAYER_KEY] = layer_of(dispatch)
    return router


def _source(node: Node) -> Node:
    return args(node)[0] if node.target is operator.getitem else node


def _undropped(ids: Node) -> Node:
    """The ids before some were set to -1, as those of slots without a place are (`places.py`)."""
    if ids.target is not aten.where.self:
        return ids
    _, kept, dropped = args(ids)
    is_none = dropped.target in (aten.full.default, aten.scalar_tensor.default) and args(dropped)[-1] == -1
    return kept if is_none else ids


def _replace(graph: Graph, old: Node, new: Node) -> None:
    """Our operators take weights and ids of any dtype; whoever else reads them gets the dtype they had."""
    for user in [user for user in old.users if is_moe_op(user)]:
        user.replace_input_with(old, new)
    if old.users and new.meta["val"].dtype != old.meta["val"].dtype:
        with graph.inserting_before(new.next):
            new = written(graph, lambda value: value.to(old.meta["val"].dtype), (new,), old)
    old.replace_all_uses_with(new)
    erase_unread(graph, old)


def _recognised(weights: Node, ids: Node, num_experts: int, known: Known) -> tuple[Choice, RoutingConfig]:
    """The router behind weights and ids or, where weights are scaled further, behind what is scaled."""
    first: Refusal | None = None
    for candidate in (weights, *_other_weights(weights, ids)):
        try:
            for choice in _choices(candidate, ids, num_experts):
                config = _known_config(choice, num_experts, known)
                if config is not None:
                    _expect_one_order(choice)
                    return choice, config
            raise Refusal(
                candidate, "the router is no RoutingConfig: none gives its weights for the logits tried"
            )
        except Refusal as refusal:
            first = first or refusal
    assert first is not None
    raise first


def _expect_one_order(choice: Choice) -> None:
    """Refuses where weights of another order would be read beside new ids: a top-k that does not sort gives any."""
    pending = [user for node in choice.cut.nodes if _is_unsorted(node) for user in _values_of(node)]
    while pending:
        node = pending.pop()
        if node is choice.weights:
            continue
        others = [user for user in node.users if user not in choice.cut.nodes]
        if others:
            raise Refusal(others[0], f"{describe(others[0])} reads weights in the order of a top-k unsorted")
        pending += node.users


def _is_unsorted(node: Node) -> bool:
    return node.target is aten.topk.default and args(node)[4:5] == (False,)


def _values_of(topk: Node) -> list[Node]:
    return [user for user in topk.users if user.args[1] == 0]


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
    return node.op == "call_function" and is_plain(node) and node.target not in _PRODUCTS


_PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
)


def _choices(weights: Node, ids: Node, num_experts: int) -> list[Choice]:
    """Which of what a router reads may be its logits, and which its bias: of one token both are E numbers.

    Behind them come numbers [T, E] of its own: a model that scales or caps its logits, or adds noise, has a router
    behind that.
    """
    found = cut([weights, ids], lambda node: not _is_in_router(node))
    choices = []
    for logits in (*found.leaves, *found.nodes):
        if _are_logits(logits, ids.meta["val"].shape[0], num_experts):
            behind = cut(
                [weights, ids], lambda node, logits=logits: node is logits or not _is_in_router(node)
            )
            others = [leaf for leaf in behind.leaves if leaf is not logits and not is_size(leaf)]
            if not others or (len(others) == 1 and _is_vector(others[0], num_experts)):
                choices.append(Choice(weights, ids, logits, others[0] if others else None, behind))
    if not choices:
        leaves = (leaf for leaf in found.leaves if not is_size(leaf))
        raise Refusal(weights, f"the router reads {', '.join(map(describe, leaves))}, not logits and a bias")
    return choices


def _are_logits(leaf: Node, tokens: int | torch.SymInt, num_experts: int) -> bool:
    """Whether `leaf` is [T, E], or [B, S, E] with as many tokens."""
    value: Any = leaf.meta.get("val")
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or value.dim() < 2:
        return False
    same = (value.shape[-1] == num_experts, math.prod(value.shape[:-1]) == tokens)
    return all(map(_compat.statically_known_true, same))


def _is_vector(leaf: Node, size: int) -> bool:
    value: Any = leaf.meta.get("val")
    is_floating = isinstance(value, Tensor) and value.dtype.is_floating_point
    return is_floating and leaf.op != "call_function" and value.numel() == size


def _has_shape(node: Node, shape: tuple[int | torch.SymInt, ...]) -> bool:
    value: Any = node.meta.get("val")
    is_floating = isinstance(value, Tensor) and value.dtype.is_floating_point and value.dim() == len(shape)
    return is_floating and all(map(_compat.statically_known_true, map(operator.eq, value.shape, shape)))


def _known_config(choice: Choice, num_experts: int, known: Known) -> RoutingConfig | None:
    """As `_config`, which tries each kind of router once for a graph; for the process, where no size is open."""
    values: list[Any] = [node.meta.get("val") for node in (*choice.cut.leaves, *choice.cut.nodes)]
    known = known if any(map(is_open, values)) else _KNOWN
    nodes = (choice.weights, choice.ids, choice.logits, choice.bias)
    places = {node: place for place, node in enumerate((*choice.cut.leaves, *choice.cut.nodes))}
    wanted = tuple(places[node] if node else None for node in nodes)
    key = (form(choice.cut.leaves, choice.cut.nodes), wanted, num_experts)
    if key not in known:
        found = _config(choice, num_experts)
        if len(known) >= _MOST:
            del known[next(iter(known))]
        known[key] = found
    return known[key]


def _config(choice: Choice, num_experts: int) -> RoutingConfig | None:
    """The config that gives what the router gives; rather one that chooses the same where weights are zero, too."""
    second: RoutingConfig | None = None
    for config in _agreeing(choice, num_experts):
        alike = where_scores_are_alike(config, choice, num_experts)
        if alike.chooses and alike.weighs:
            return config
        if alike.weighs and second is None:
            second = config
    return second


def _agreeing(choice: Choice, num_experts: int) -> Iterator[RoutingConfig]:
    trial = tried(choice, num_experts)
    top_k = concrete(choice.ids.meta["val"].shape[1]) or 0
    for config in _selections(choice.cut, num_experts, top_k):
        for weighed in _weighed(config, trial, choice.cut):
            if agrees(weighed, trial) and agrees_at_the_edges(weighed, choice, num_experts):
                yield weighed


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
    grouped = [
        shape[-2:] for shape in shapes if len(shape) == 3 and all(isinstance(n, int) for n in shape[-2:])
    ]
    counts = {number for number, in_group in grouped if number * in_group == num_experts and in_group > 1}
    best = (args(node)[1] for node in router.nodes if node.target is aten.topk.default)
    kept = {number for number in best if isinstance(number, int)}  # a capacity may follow from T
    limits = product(sorted(counts), sorted(kept), ("max", "top2_sum"), (float("-inf"), 0.0))
    names = ("num_groups", "topk_groups", "group_score", "group_fill")
    return [{}] + [
        dict(zip(names, limit, strict=True)) for limit in limits if limit[0] > 1 and limit[1] <= limit[0]
    ]


def _weighed(config: RoutingConfig, trial: Trial, router: Cut) -> Iterator[RoutingConfig]:
    """`config`, if it selects as the router does, with the scale that its weights have, renormalised or not."""
    plain, decided = dense_weights(config, trial), decided_rows(config, trial)
    if not decided.any() or not torch.equal((plain != 0)[decided], (trial.weights != 0)[decided]):
        return
    written = numbers(router.nodes)
    total = plain.sum(-1, keepdim=True)
    options = [(False, 0.0, plain)] + [
        (True, eps, plain / (total + eps)) for eps in (0.0, *(n for n in written if 0 < n < 1e-3))
    ]
    for renormalize, eps, ours in options:
        scale = float(trial.weights[decided].sum() / ours[decided].sum())
        if not math.isfinite(scale):  # a root, or a logarithm, of numbers that are not its logits
            continue
        scale = next((each for each in _simple(written) if abs(each - scale) <= CLOSE * scale), scale)
        yield replace(config, renormalize=renormalize, renorm_eps=eps, scale=scale)


def _simple(written: tuple[float, ...]) -> tuple[float, ...]:
    """Scales that a model may mean: its constants, and what divides by them."""
    return (1.0, *written, *(1 / number for number in written if number))
