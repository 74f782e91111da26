"""Weights that are gathered in other ways, seen as `weight[ids]` by the passes that raise layers.

    F.embedding(ids, weight.flatten(1)).view(*ids.shape, *weight.shape[1:])
    torch.take_along_dim(weight, ids[:, None, None], 0)

What is not raised is gathered as before.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.graph_tools import write_out
from inductor_passes.raising.evaluation import concrete
from inductor_passes.raising.finders import num_found_among
from inductor_passes.raising.instead import instead
from inductor_passes.raising.views_of_rows import (
    SHOWN,
    VIEWS,
    args,
    aten,
    has_layout,
    indexed,
    is_shown,
    is_view,
    rank,
    same_shape,
    seen_from,
    size,
    unseen,
)

_PRODUCTS = (aten.bmm.default, aten.baddbmm.default, aten.mm.default)


@contextmanager
def gathered_by_index(graph: Graph) -> Iterator[None]:
    """Every weight that is gathered is `weight[ids]`, until the end."""
    found = {}
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            other = _of_rows(graph, node) or _of_numbers(graph, node)
        if other is not None:
            found[node] = other
    with instead(graph, found):
        yield


def _of_rows(graph: Graph, view: Node) -> Node | None:
    """`view` [..., X, Y] of rows of a matrix [E, X * Y], as one of `weight[ids]`."""
    if view.target not in SHOWN or rank(view) < 3 or not _is_multiplied(view):
        return None
    source = indexed(args(view)[0])
    shape = view.meta["val"].shape[-2:]
    if source is None or rank(source[0]) != 2 or not same_shape([size(source[0], 1)], [shape[0] * shape[1]]):
        return None
    weight, ids = source
    if weight.target in VIEWS and same_shape(args(weight)[0].meta["val"].shape, (size(weight, 0), *shape)):
        weight = args(weight)[0]
    else:
        (weight,) = write_out(graph, lambda matrix: matrix.unflatten(1, shape), (weight,), view)
    (rows,) = write_out(graph, _index, (weight, ids), view)
    return graph.node_copy(view, lambda each: rows if each is args(view)[0] else each)


def _is_multiplied(node: Node) -> bool:
    """Whether a product reads `node`, in another shape perhaps: biases and tokens, cut apart, are no matrices."""
    return any(user.target in _PRODUCTS or (is_shown(user) and _is_multiplied(user)) for user in node.users)


def _of_numbers(graph: Graph, gather: Node) -> Node | None:
    """[..., X, Y] of `weight` [E, X, Y], whose numbers are gathered by ids that are the same for each matrix."""
    if gather.target is not aten.gather.default or rank(gather) < 3 or not _is_multiplied(gather):
        return None
    source, dim, index = args(gather)
    weight, ids = unseen(source), _ids(index, size(source, dim))
    is_by_matrix = dim % rank(source) == rank(source) - 3 and _is_repeated(weight, source)
    if ids is None or not is_by_matrix:
        return None
    wanted = (*ids.meta["val"].shape, *weight.meta["val"].shape[1:])
    if not same_shape(gather.meta["val"].shape, wanted):
        return None
    return write_out(graph, _index, (weight, ids), gather)[0]


def _ids(index: Node, num_experts: object) -> Node | None:
    """`ids` of which `index` [..., X, Y] repeats each as a matrix; `take_along_dim` counts those below zero from E."""
    wraps = index.target is aten.remainder.Scalar
    column = args(index)[0] if wraps else index
    if column.target is not aten.expand.default:
        return None
    ids = args(column)[0]
    while rank(ids) > rank(index) - 2 and is_view(ids):
        ids = args(ids)[0]
    is_in_range = not wraps or num_found_among(unseen(ids)) == num_experts == args(index)[1]
    return ids if is_in_range else None


def _is_repeated(weight: Node, source: Node) -> bool:
    """Whether `source` [..., E, X, Y] is `weight` [E, X, Y], as often as there is in front."""
    shown = seen_from(weight, source) if rank(weight) == 3 else None
    if shown is None:
        return False
    shape = [concrete(each) or 0 for each in weight.meta["val"].shape]
    strides = (shape[1] * shape[2], shape[2], 1)
    return has_layout(shown, (*shown.shape[:-3], *shape), (*[0] * (shown.dim() - 3), *strides))


def _index(weight: Tensor, ids: Tensor) -> Tensor:
    return weight[ids]
