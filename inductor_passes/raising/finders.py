"""What is known of expert ids by the operator that found them."""

from typing import Any

from torch.fx import Node

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


def _finder(ids: Node) -> tuple[Node | None, int]:
    """The operator that found `ids`, and along which dimension of what it reads."""
    node, output = getitem_source(ids) or (ids, 1)
    target: Any = node.target
    if target not in _FINDERS or output != 1 or not node.all_input_nodes[0].meta["val"].dim():
        return None, 0
    given: dict[str, Any] = {each.name: each.default_value for each in target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | dict(node.kwargs)
    dim = given.get("dim", -1)  # a draw is one of the last
    return (None, 0) if dim is None else (node, dim)
