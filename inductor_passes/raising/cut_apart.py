"""Equal parts of a weight, seen as what is selected of all by the passes that raise layers.

    w1[expert * size : (expert + 1) * size]  # of a weight [E * I, H], or a part of w1.split(size)
    w1.chunk(num_experts)[expert].squeeze(0)  # of a weight [E, I, H]

What is not raised is a part again.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.graph_tools import write_out
from inductor_passes.raising.stacks import one_step
from inductor_passes.raising.views_of_rows import args, aten, changes_dtype, is_shown, rank, size
from inductor_passes.raising.writing import erase_unread


class _Part(NamedTuple):
    """Rows of a weight [E * A, B], or [1, A, B] of one [E, A, B]."""

    source: Node
    length: int
    place: int


@contextmanager
def selected_parts(graph: Graph) -> Iterator[None]:
    """Every such part is one of a tensor of all, until the end."""
    before: dict[Node, tuple[Any, Any]] = {}
    for node in list(graph.nodes):
        if (part := _part(node)) is not None:
            before[node] = node.target, node.args
            _select(graph, node, part)
        elif (
            node.target is aten.select.int and _is_the_only_one(args(node)[0], before) and args(node)[1] == 0
        ):
            before[node] = node.target, node.args
            node.target, node.args = aten.squeeze.dim, args(node)[:2]
    try:
        yield
    finally:
        for node, (target, given) in before.items():
            source = given[0] if node._erased else args(node)[0]
            if not node._erased:
                node.target, node.args = target, given
            erase_unread(graph, source)


def _is_the_only_one(matrix: Node, before: Collection[Node]) -> bool:
    """Whether it is [1, A, B]."""
    return matrix in before and rank(matrix) > 2


def _select(graph: Graph, node: Node, part: _Part) -> None:
    def of_all(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (-1, part.length))

    with graph.inserting_before(node):
        if rank(part.source) > 2:
            (one,) = write_out(graph, lambda weight: weight.select(0, part.place), [part.source], node)
            node.target, node.args = aten.unsqueeze.default, (one, 0)
        else:
            (weights,) = write_out(graph, of_all, [part.source], node)
            node.target, node.args = aten.select.int, (weights, 0, part.place)


def _part(node: Node) -> _Part | None:
    found = one_step(node, 0) if node.op == "call_function" and rank(node) in (2, 3) else None
    if found is None or found[1][0] is not aten.slice.Tensor or not _is_stored(found[0]):
        return None
    source, (_, (dim, *bounds)) = found
    start, *others = (bounds[0] if bounds else 0, size(node, 0), size(source, 0))
    if dim != 0 or bounds[2:] not in ([], [1]) or not all(isinstance(each, int) for each in (start, *others)):
        return None
    length, whole = others
    is_equal = 0 < length < whole and whole % length == 0 and start % length == 0
    return _Part(source, length, start // length) if is_equal and (rank(node) == 2 or length == 1) else None


def _is_stored(weight: Node) -> bool:
    """Whether it is an input of the graph, seen in another shape or dtype perhaps."""
    while weight.op == "call_function" and (is_shown(weight) or changes_dtype(weight)):
        weight = weight.all_input_nodes[0]
    return weight.op != "call_function"
