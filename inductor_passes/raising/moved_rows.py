"""Rows that are brought to places by what was chosen, and back to whose rows they were."""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from inductor_passes import _compat
from inductor_passes.raising.choices import is_of_router
from inductor_passes.raising.elsewhere import is_noise
from inductor_passes.raising.evaluation import VIEWS, cut, is_size
from inductor_passes.raising.finders import num_found_among
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.place_masks import is_found, num_choices
from inductor_passes.raising.row_trials import filled_by
from inductor_passes.raising.totals import is_understood
from inductor_passes.raising.views_of_rows import args, aten, changes_dtype, is_cast, is_shown, rank, size

_SHOWS = (
    *VIEWS,
    aten.permute.default,
    aten.clone.default,
    aten.repeat.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.unbind.int,
    aten.constant_pad_nd.default,
    operator.getitem,
)
"""Give rows of what they read first, wherever these are."""

_PICKS: dict[Any, int] = {
    aten.index.Tensor: 1,
    aten.embedding.default: 1,
    aten.index_select.default: 2,
    aten.gather.default: 2,
}
"""Give rows at an index, which is this argument."""

_PUTS: dict[Any, tuple[int, int]] = {
    aten.index_put.default: (1, 2),
    aten.index_add.default: (2, 3),
    aten.scatter_add.default: (2, 3),
    aten.scatter.src: (2, 3),
}
"""Put rows at an index into others: which arguments these two are."""

_PRODUCTS = (aten.mm.default, aten.bmm.default)
"""Give rows where the other factor has zeros and ones."""


Moved = dict[Node, tuple[Node, ...]]
"""Of which other nodes each node has rows; of none where it makes rows of its own."""


def num_rows(node: Node) -> int | torch.SymInt:
    """How many rows there are in all dimensions but the last."""
    return math.prod(node.meta["val"].shape[:-1])


def is_choice(node: Node, tokens: int | torch.SymInt, num_experts: int) -> bool:
    """Whether `node` has ids of experts for each of T tokens."""
    return num_choices(node, tokens) is not None and num_found_among(node) == num_experts


def is_drawn(node: Node) -> bool:
    """Whether `node` holds logits, or noise, which may be any."""
    return is_noise(node) or (is_of_router(node) and not any(map(_is_mask, args(node)[-2:])))


def _is_mask(factor: Node) -> bool:
    """Whether a factor holds integers, as floating numbers perhaps."""
    while not is_integral(factor) and (is_shown(factor) or changes_dtype(factor)):
        factor = args(factor)[0]
    return is_integral(factor)


def sources_of(rows: Sequence[Node], num_experts: int) -> list[Node]:
    """What may be the tokens that ids have brought to the places of all `rows`: the innermost [T, H] first.

    Of T tokens of which there are ids. Empty where no ids move them.
    """
    moved = _moved_rows(rows)
    found = [node for node in moved if _is_source(node, rows, moved, num_experts)]
    alike = [each for each in found if _compat.statically_known_true(num_rows(each) == num_rows(found[0]))]
    return sorted(alike, key=lambda node: rank(node) != 2)


def _moved_rows(rows: Sequence[Node]) -> Moved:
    """Everything that rows of experts are made of, innermost first."""
    columns, order, found = size(rows[0], -1), Moved(), Moved()
    pending = [(node, False) for node in rows]
    while pending:
        node, is_done = pending.pop()
        if is_done:
            order[node] = found[node]
        elif node not in found:
            found[node] = _rows_read(node, columns)
            pending.append((node, True))
            pending.extend((each, False) for each in found[node])
    return order


def _is_source(node: Node, rows: Sequence[Node], moved: Moved, num_experts: int) -> bool:
    """Whether all rows are rows of `node`, brought to their places by ids of experts."""
    if rank(node) < 2 or node in rows:
        return False
    tokens, pending, behind = num_rows(node), [*rows], {*rows}
    while pending:
        each = pending.pop()
        if each is not node and not moved[each]:
            return False
        inner = () if each is node else moved[each]
        pending += [other for other in inner if other not in behind]
        behind.update(inner)
    is_put = any(each.target in (*_PICKS, *_PUTS, *_PRODUCTS) for each in behind - {node})
    leaves = cut(
        rows, lambda each: each is node or is_drawn(each) or is_choice(each, tokens, num_experts)
    ).leaves
    return is_put and any(is_choice(leaf, tokens, num_experts) for leaf in leaves)


def _rows_read(node: Node, columns: Any) -> tuple[Node, ...]:
    """Those of which `node` has rows, wherever what was chosen puts them; none where it makes others of them."""
    if node.op != "call_function" or not is_understood(node, columns):
        return ()
    return tuple(each for each in _rows_in(node) if filled_by(each) is None)


def _rows_in(node: Node) -> Iterable[Node]:
    given = args(node)
    if node.target in _SHOWS or is_cast(node):
        return given[:1]
    if node.target is aten.cat.default:
        return given[0]
    if node.target is aten.slice_scatter.default:
        return given[:2]
    if node.target in _PICKS:
        return given[:1] if _are_of_ids(given[_PICKS[node.target]]) else ()
    if node.target in _PUTS:
        index, put = _PUTS[node.target]
        return (given[0], given[put]) if _are_of_ids(given[index]) else ()
    if node.target is aten.where.self:
        return given[1:] if _are_of_ids(given[0]) else ()
    if node.target is aten.add.Tensor:
        parts = [
            each for each in given if isinstance(each, Node) or each != 0
        ]  # Python's `sum` begins with zero
        return parts if not node.kwargs and all(map(_is_put, parts)) else ()
    return _multiplied(node)


def _is_put(node: object) -> bool:
    """Whether rows were put into `node`, or into all that it is the sum of."""
    while isinstance(node, Node) and (node.target in _SHOWS or is_cast(node)):
        node = args(node)[0]
    if not isinstance(node, Node) or node.target is not aten.add.Tensor:
        return isinstance(node, Node) and node.target in _PUTS
    return all(map(_is_put, node.all_input_nodes))


def _multiplied(node: Node) -> Iterator[Node]:
    """What is multiplied with zeros and ones."""
    if node.target is aten.mul.Tensor or node.target in _PRODUCTS:
        for one, other in (args(node), args(node)[::-1]):
            if isinstance(one, Node) and _is_counted(one) and isinstance(other, Node):
                yield other
                return


def _is_counted(node: Node) -> bool:
    """Whether `node` holds integers that follow from ids, as floating numbers perhaps."""
    leaves = cut([node], is_integral).leaves
    return _are_of_ids(node) and all(is_integral(leaf) or is_size(leaf) for leaf in leaves)


def _are_of_ids(index: Any) -> bool:
    """Whether integers follow from what was found, or from nothing at all."""
    nodes = [each for each in (index if isinstance(index, list | tuple) else [index]) if each is not None]
    leaves = cut(nodes, lambda node: is_found(node) or is_drawn(node)).leaves
    return all(is_found(leaf) or is_drawn(leaf) or is_size(leaf) for leaf in leaves)
