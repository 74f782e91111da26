"""By which ids tokens choose, where every token meets every expert."""

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import cut
from inductor_passes.raising.indices import Indices, is_chosen, is_integral
from inductor_passes.raising.strays import stray_runs
from inductor_passes.raising.views_of_rows import args, aten, changes_dtype, is_shown, rank


def chosen_ids(columns: Iterable[Node], rows: Collection[Node] = ()) -> Node:
    """The ids of the first column that has some, as `ids_of_weights` finds them. Raises Refusal where none has."""
    column, *others = columns
    ids = ids_of_weights(column, rows)
    while isinstance(ids, tuple) and others:
        column, *others = others
        ids = ids_of_weights(column, rows)
    if isinstance(ids, tuple):
        raise Refusal(
            column, f"the weights of an expert come from {', '.join(map(describe, ids)) or 'nowhere'}"
        )
    return ids


def ids_of_weights(column: Node, rows: Collection[Node] = ()) -> Node | tuple[Node, ...]:
    """The ids that weights are computed from, but for `rows`; where it is not one, all that they are.

    Behind a product with a weight, that of a router, are those of layers before.
    """

    def is_ids(node: Node) -> bool:
        return is_integral(node) and node.meta["val"].dtype != torch.bool and rank(node) > 1

    leaves = cut(
        [column], lambda node: node in rows or is_of_router(node) or (is_ids(node) and is_chosen(node))
    ).leaves
    ids = [leaf for leaf in leaves if is_ids(leaf)]
    return ids[0] if len(ids) == 1 else tuple(leaf for leaf in leaves if leaf not in rows)


def is_of_router(node: Node) -> bool:
    """Whether `node` is a product with an input of the graph, as logits are."""
    return node.target in _PRODUCTS and any(_stored(each).op != "call_function" for each in args(node)[-2:])


def _stored(operand: Node) -> Node:
    """What `operand` shows, cast perhaps."""
    is_same = is_shown(operand) or changes_dtype(operand)
    return _stored(args(operand)[0]) if is_same else operand


_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def stray_ids(indices: Indices) -> Iterator[Tensor]:
    """Ids [T, K] that are out of range, if there may be any."""
    return (run.ids.flatten(0, -2) for run in stray_runs(indices))
