"""Whether a gate gives each row of it alone: only then may the rows lie in another order, as those of stages do."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes import _compat
from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import Cut
from inductor_passes.raising.views_of_rows import args, aten, is_one, is_view

Size = int | torch.SymInt

_ON_A_DIMENSION: Mapping[Any, int] = {
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.unbind.int: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}
"""Operators on one dimension, the first if not given, and which argument it is."""


def expect_rowwise(gate: Cut, products: Iterable[Node], masks: Iterable[Node], num_slots: Size) -> None:
    """Refuses a gate in which a row meets another, or what depends on where it lies.

    Args:
        gate: what stands between products with experts.
        products: its leaves that are rows, S of them in the order of slots, in any shape such as [T, K, F].
        masks: its leaves of which the value is known for each row.
        num_slots: S.
    """
    of_rows = {node: leading(node, num_slots) for node in products}
    same = {*masks}
    for node in gate.nodes:
        if of_rows.keys().isdisjoint(node.all_input_nodes):
            continue  # a constant
        of_rows[node] = _rows_of(node, of_rows, same, num_slots)


def _rows_of(node: Node, of_rows: Mapping[Node, int], same: set[Node], num_slots: Size) -> int:
    """How many dimensions of `node`, the first ones, are those of rows."""
    source: Any = next(each for each in node.all_input_nodes if each in of_rows)
    if is_view(node):
        return leading(node, num_slots)
    place = _ON_A_DIMENSION.get(node.target)
    if place is not None:
        dim = args(node)[place] if len(args(node)) > place else 0
        if dim % _value(source).dim() < of_rows[source]:
            raise Refusal(node, f"the gate takes some rows from others: {describe(node)}")
    elif isinstance(node.meta.get("val"), Tensor):
        for each in node.all_input_nodes:
            if each not in same and not _is_filled(each) and isinstance(each.meta.get("val"), Tensor):
                _expect_aligned(node, each, of_rows.get(each), of_rows[source])
    return of_rows[source]


def _expect_aligned(node: Node, given: Node, of_rows: int | None, expected: int) -> None:
    """Refuses an operand that is not the same for all rows, nor has one row for each."""
    ours, theirs = _value(node).shape, _value(given).shape
    if of_rows is None:
        extra = theirs[: max(0, expected - len(ours) + len(theirs))]
        fits = all(map(is_one, extra))
    else:
        same = map(_same, ours[:expected], theirs[:of_rows])
        fits = len(ours) == len(theirs) and of_rows == expected and all(same)
    if not fits:
        raise Refusal(node, f"the gate tells rows apart by where they lie: {describe(given)}")


def leading(node: Node, num_slots: Size) -> int:
    """How many dimensions, the first ones, are those of the S rows in a gate. Raises Refusal where none are."""
    shape, total = _value(node).shape, 1
    for count, size in enumerate((*shape, 1)):
        if _same(total, num_slots):
            return count
        total = total * size
    raise Refusal(node, f"the gate shows rows as {list(shape)}, several as one")


def _same(one: Size, other: Size) -> bool:
    return _compat.statically_known_true(one == other)


def _is_filled(node: Node) -> bool:
    return node.target is aten.full.default


def _value(node: Node) -> Any:
    """The tensor that a node gives, or the first of its tensors."""
    value = node.meta["val"]
    return value[0] if isinstance(value, tuple | list) else value
