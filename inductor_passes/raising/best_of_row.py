"""The best of each row, found without its dimension, seen as ids [T, 1] by the passes that raise layers.

`probs.argmax(-1)` and `probs.max(-1)` give ids [T], or [B, S], a top-1 gives [T, 1]. What is not raised reads them as
before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.graph_tools import getitem_source, write_out
from inductor_passes.raising.choices import is_of_router
from inductor_passes.raising.evaluation import cut
from inductor_passes.raising.views_of_rows import args, aten, rank, same_shape


class _Best(NamedTuple):
    """Ids of the best of each row."""

    ids: Node
    kept: tuple[Node, ...]
    """The same with a dimension of size 1 at the end, and what finds that."""
    shown: Node
    """These without it, which those read who read `ids`."""


@contextmanager
def best_kept(graph: Graph) -> Iterator[None]:
    """Ids of the best of each row come out of a dimension of their own, until the end."""
    found = [_with_dimension(graph, node) for node in list(graph.nodes) if _is_best(node)]
    try:
        yield
    finally:
        for each in found:
            _show(graph, each)


_MAXIMUM = ((aten.max.dim, 0), (aten.max.dim, 1))


def _is_best(node: Node) -> bool:
    """Whether `node` [T] is the largest of each row [T, E], or which that is, or [B, S] of [B, S, E].

    Of heads [T, K, E] they are [T, K] as it is.
    """
    finder, output = getitem_source(node) or (node, None)
    if (finder.target, output) not in (*_MAXIMUM, (aten.argmax.default, None)) or not node.users:
        return False
    source, *how = args(finder)
    is_last = bool(how) and how[0] in (-1, rank(source) - 1)
    return is_last and how[1:] in ([], [False]) and (rank(source) == 2 or _are_of_tokens(source))


def _are_of_tokens(scores: Node) -> bool:
    """Whether each row of scores [B, S, E] is one of logits [T, E], the product of a router.

    Where logits are an input of the graph it is that of tokens [B, S, H], which are another.
    """
    leaves = cut([scores], is_of_router).leaves
    products = [leaf for leaf in leaves if is_of_router(leaf)]
    same = (_compat.statically_known_true(_numel(each) == _numel(scores)) for each in products)
    others = (each for each in scores.graph.find_nodes(op="placeholder") if each not in leaves)
    return rank(scores) == 3 and (all(same) if products else any(_lie_alike(each, scores) for each in others))


def _numel(node: Node) -> int | torch.SymInt:
    return node.meta["val"].numel()


def _lie_alike(tokens: Node, scores: Node) -> bool:
    """Whether there is a row for each of scores [B, S, E]."""
    return rank(tokens) == 3 and same_shape(tokens.meta["val"].shape[:2], scores.meta["val"].shape[:2])


def _with_dimension(graph: Graph, ids: Node) -> _Best:
    finder, output = getitem_source(ids) or (ids, None)

    def keep(source: Tensor) -> Tensor:
        return source.argmax(-1, True) if output is None else source.max(-1, True)[output]

    readers = [*ids.users]
    with graph.inserting_before(ids.next):
        (kept,) = write_out(graph, keep, args(finder)[:1], ids)
        (shown,) = write_out(graph, lambda kept: kept.squeeze(-1), (kept,), ids)
    for each in readers:
        each.replace_input_with(ids, shown)
    return _Best(ids, (kept, *kept.all_input_nodes) if output is not None else (kept,), shown)


def _show(graph: Graph, best: _Best) -> None:
    if not best.shown._erased:
        best.shown.replace_all_uses_with(best.ids)
        graph.erase_node(best.shown)
    for node in best.kept:  # the layer may have done without
        if not node._erased and not node.users:
            graph.erase_node(node)
