"""What is known of expert ids by the operator that found them."""

from typing import Any

from torch.fx import Node

from inductor_passes import _compat
from inductor_passes.graph_tools import getitem_source
from inductor_passes.raising.evaluation import aten

_OF_EACH = (aten.topk.default, aten.sort.default, aten.sort.stable)
"""Find several along a dimension, none of them twice."""
_FINDERS = (
    *_OF_EACH,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.kthvalue.default,
    aten.multinomial.default,
)


def num_found_among(ids: Node) -> int | None:
    """Among how many, numbered from 0, `ids` were found; None where that is not known."""
    finder, dim = _finder(ids)
    size = None if finder is None else finder.all_input_nodes[0].meta["val"].shape[dim]
    return size if isinstance(size, int) else None


def may_repeat(ids: Node) -> bool:
    """Whether a row of `ids` may have one of them twice."""
    finder, _ = _finder(ids)
    return finder is None or finder.target not in _OF_EACH or not is_found_in_rows(ids)


def is_found_in_rows(ids: Node) -> bool:
    """Whether `ids` were found along their last dimension, each row by itself."""
    finder, dim = _finder(ids)
    return finder is not None and dim in (-1, ids.meta["val"].dim() - 1)


def longer(ids: Node) -> Node | None:
    """The rows of which `ids` are a part: `scores.sort().indices[:, :K]`. None where they are no part of rows."""
    if not _is_slice(ids) or _dim(ids) != ids.meta["val"].dim() - 1 or _is_whole(ids):
        return None
    rows = ids.all_input_nodes[0]
    while _is_slice(rows) and _is_whole(rows):  # `[:, :K]` is two slices, of which the first takes all
        rows = rows.all_input_nodes[0]
    return rows


def is_cut_out(ids: Node) -> bool:
    """Whether `ids` are a part of longer rows of which nobody reads the rest."""
    rows = longer(ids)
    return rows is not None and _is_read_as(ids, rows)


def _is_read_as(ids: Node, rows: Node) -> bool:
    """Whether of `rows` everybody reads what `ids` are."""
    return all(
        _is_read_as(ids, user)
        if _is_slice(user) and _is_whole(user)
        else _is_slice(user) and user.args[1:] == ids.args[1:]
        for user in rows.users
    )


def _is_slice(node: Node) -> bool:
    return node.target is aten.slice.Tensor and len(node.all_input_nodes) == 1


def _dim(part: Node) -> int:
    dim: Any = part.args[1] if len(part.args) > 1 else 0
    return dim % part.meta["val"].dim()


def _is_whole(part: Node) -> bool:
    own, before = (each.meta["val"].shape[_dim(part)] for each in (part, part.all_input_nodes[0]))
    return _compat.statically_known_true(own == before)


def _finder(ids: Node) -> tuple[Node | None, int]:
    """The operator that found `ids`, or longer rows of which they are a part, and along which dimension."""
    ids = longer(ids) or ids
    node, output = getitem_source(ids) or (ids, 1)
    target: Any = node.target
    if target not in _FINDERS or output != 1 or not node.all_input_nodes[0].meta["val"].dim():
        return None, 0
    given: dict[str, Any] = {each.name: each.default_value for each in target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | dict(node.kwargs)
    dim = given.get("dim", -1)  # a draw is one of the last
    return (None, 0) if dim is None else (node, dim)
