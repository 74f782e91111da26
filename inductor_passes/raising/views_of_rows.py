"""Nodes that show rows in another shape, pick them, or mask them."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes import _compat
from inductor_passes.raising.evaluation import VIEWS, WIDE, aten, concrete, cut, evaluate
from inductor_passes.raising.indices import Indices

prims = torch.ops.prims

SHOWN = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
"""Operators that show a tensor in a shape that is given as a whole."""

_COPIES = (aten.clone.default, aten.alias.default)
_FEW = 32  # nodes that nobody reads, in one place


def args(node: Node) -> Any:
    """The arguments of a call, each of the type that its operator takes."""
    return node.args


def rank(node: Any) -> int:
    """Number of dimensions of a tensor's node; -1 for anything else."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dim() if isinstance(value, Tensor) else -1


def size(node: Any, dim: int) -> Any:
    """One size of a tensor's node."""
    return node.meta["val"].shape[dim]


def is_one(size: object) -> bool:
    """Whether a size is the number 1. Asked so, a symbol is not guarded."""
    return isinstance(size, int) and size == 1


def same_shape(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    same = (_compat.statically_known_true(a == b) for a, b in zip(ours, theirs, strict=False))
    return len(ours) == len(theirs) and all(same)


def has_numbers(node: Node, number: int) -> bool:
    """Whether a tensor is known to have so many numbers."""
    return _compat.statically_known_true(node.meta["val"].numel() == number)


def is_view_of_rows(node: Node) -> bool:
    """Whether `node` shows rows [S, F] in another shape, such as [T, K, F] or [S, F, 1]: all rows, in their order."""
    if node.target in _COPIES or is_cast(node):
        return True
    if not is_view(node):
        return False
    before, after = (features(each.meta["val"]) for each in (args(node)[0], node))
    return _compat.statically_known_true(before == after)


def is_view(node: Node) -> bool:
    """Whether `node` shows all elements of a tensor, in their order, in another shape."""
    if node.target is aten.permute.default:
        kept = [dim for dim in args(node)[1] if not is_one(size(args(node)[0], dim))]
        return kept == sorted(kept)
    if node.target not in VIEWS:
        return False
    before, after = args(node)[0].meta["val"], node.meta["val"]
    return _compat.statically_known_true(before.numel() == after.numel())


def features(value: Tensor) -> Any:
    """The last size that is not 1."""
    return next((size for size in reversed(value.shape) if not is_one(size)), 1)


def without_views(node: Node, indices: Indices) -> Node:
    """What `node` shows, past views, copies and masks of rows whose ids are out of range; not past casts."""
    while node.op == "call_function":
        if is_view_of_rows(node) and not is_cast(node):
            node = args(node)[0]
        elif (kept := unmasked(node, indices)) is not None:
            node = kept
        else:
            break
    return node


def rows_shown(node: Node) -> Node:
    """The first of all that `node` shows, row by row: `rows[T, H]` may be `tokens[B, L, H]`; not past casts."""
    return [node, *shown_by(node)][-1]


def shown_by(node: Node) -> Iterator[Node]:
    """What `node` shows, and what that shows: the same rows, uncast."""
    while node.op == "call_function" and is_view_of_rows(node) and not is_cast(node):
        node = node.all_input_nodes[0]
        yield node


def is_cast(node: Node) -> bool:
    """Whether `node` changes a dtype and nothing else, but for rounding."""
    is_wide = (each.meta["val"].dtype in WIDE for each in (node, *node.all_input_nodes))
    return changes_dtype(node) and all(is_wide)


def changes_dtype(node: Node) -> bool:
    """Whether `node` gives the same numbers in another dtype, as far as that has them."""
    return node.target is prims.convert_element_type.default


def unmasked(node: Node, indices: Indices) -> Node | None:
    """Which operand of a `where` on ids is taken for every id in range."""
    if node.target is not aten.where.self:
        return None
    mask, if_true, if_false = args(node)
    if indices.is_everywhere(mask, False):
        return if_false
    return if_true if indices.is_everywhere(mask, True) else None


def operand(node: Node, other: Node) -> Node | None:
    """The operand of a binary operator that is not `other`; None for a number, or where `alpha` multiplies one."""
    rest = [each for each in args(node) if each is not other]
    return rest[0] if len(rest) == 1 and isinstance(rest[0], Node) and not node.kwargs else None


def only_user(node: Node) -> Node | None:
    """Who reads `node`, where it is one."""
    users = readers(node)
    return users[0] if len(users) == 1 else None


def readers(node: Node) -> list[Node]:
    """Who reads `node` for somebody: decompositions, and we ourselves, leave a few nodes that nobody reads."""
    return [user for user in node.users if not _is_unread(user)]


def is_read(node: Node) -> bool:
    """Whether somebody reads `node`, as `readers` has it: of thousands, as a loop makes them, the first will do."""
    return any(not _is_unread(user) for user in node.users)


def _is_unread(node: Node) -> bool:
    """Whether `node` and what is computed from it is read by nobody, and that little."""
    behind, pending = {node}, [node]
    while pending and len(behind) <= _FEW:
        node = pending.pop()
        if node.op == "output" or node.is_impure():
            return False
        pending.extend(user for user in node.users if user not in behind)
        behind.update(node.users)
    return not pending


def indexed(node: Node) -> tuple[Node, Node] | None:
    """`(source, index)` where `node` is `source[index]`, rows of a tensor."""
    if node.target is aten.index.Tensor and len(args(node)[1]) == 1:
        return args(node)[0], args(node)[1][0]
    if node.target is aten.index_select.default and args(node)[1] == 0:
        return args(node)[0], args(node)[2]
    if node.target is aten.embedding.default and args(node)[2:3] in ((), (-1,)) and not any(args(node)[3:]):
        return args(node)[:2]  # all rows have gradients, as they are
    if node.target is aten.gather.default and args(node)[1] == 0:
        index = row_index(args(node)[2])
        return None if index is None else (args(node)[0], index)
    return None


def row_index(index: Node) -> Node | None:
    """[S] where `index` is [S, F], the same number all along each row."""
    if index.target is not aten.expand.default:
        return None
    column = args(index)[0]
    is_column = rank(column) == 2 and is_one(size(column, 1))
    while is_column and rank(column) == 2 and is_view(column):
        column = column.args[0]
    return column if is_column and rank(column) == 1 else None


def gathered_rows(rows: Node, indices: Indices) -> Node | None:
    """`tokens[index]` behind `rows`, which may be weighed and rounded."""
    rows = without_views(rows, indices)
    if indexed(rows) is not None:
        return rows
    inner = rows.all_input_nodes if rows.target is aten.mul.Tensor or is_cast(rows) else []
    found = (gathered_rows(each, indices) for each in inner if rank(each) == 2 and size(each, 1) != 1)
    return next((each for each in found if each is not None), None)


def is_reshape(node: Node) -> bool:
    """Whether `node` shows a tensor in another shape, its dimensions exchanged perhaps."""
    return node.target in VIEWS or node.target is aten.permute.default


def unseen(node: Node) -> Node:
    """What `node` shows in another shape, its dimensions exchanged perhaps."""
    return unseen(args(node)[0]) if is_shown(node) else node


def is_shown(node: Node) -> bool:
    """Whether `node` shows a tensor in another shape, copied perhaps."""
    return is_reshape(node) or node.target is aten.clone.default


def seen_from(source: Node, shown: Node, past: Collection[object] = ()) -> Tensor | None:
    """`shown` as a view of `source`, were that dense, on the meta device: its strides tell which dimension is which.

    Copies may be in between, and calls `past` which elements keep their places. None where there is something else.
    """
    same = (aten.clone.default, *past)
    views = cut([shown], lambda node: node is source or not (is_reshape(node) or node.target in same))
    known: dict[Node, Any] = {leaf: concrete(leaf.meta["val"]) for leaf in views.leaves if rank(leaf) < 0}
    sizes: list[Any] = [concrete(each) for each in source.meta["val"].shape]
    others = [leaf for leaf in views.leaves if rank(leaf) >= 0 and leaf is not source]
    if others or None in sizes or None in known.values():
        return None
    known[source] = torch.empty(sizes, device="meta")
    for node in views.nodes:
        try:
            known[node] = known[args(node)[0]] if node.target in same else evaluate([node], known)[node]
        except (RuntimeError, ValueError):  # no view without the copy
            return None
    return known[shown]


def is_copy(source: Node, shown: Node, shape: Sequence[int], order: Sequence[int]) -> bool:
    """Whether `shown` has the elements of `source`, as it is in this shape, in this order of dimensions.

    Where they are copied to lie so, and dimensions merged, it is no view of `source`: strides end at the copy.
    """
    while is_view(shown) and shown.target is not aten.permute.default:
        shown = args(shown)[0]
    seen, wanted = seen_from(source, shown), torch.empty(tuple(shape), device="meta").permute(*order)
    try:
        return seen is not None and has_layout(seen.view(wanted.shape), wanted.shape, wanted.stride())
    except (RuntimeError, ValueError):  # dimensions are in another order
        return False


def has_layout(shown: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a view has this shape and, where a dimension is longer than 1, these strides."""
    return tuple(shown.shape) == tuple(shape) and all(
        size == 1 or ours == theirs for size, ours, theirs in zip(shape, shown.stride(), strides, strict=True)
    )
