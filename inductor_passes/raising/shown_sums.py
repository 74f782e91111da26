"""Products that sum over more than one matrix, seen as products with each and a sum, by passes that raise layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.graph_tools import write_out
from inductor_passes.raising.views_of_rows import args, aten, rank
from inductor_passes.raising.writing import erase_unread


class ShownSum(NamedTuple):
    """A product of a matrix, or a batch of one, that is the sum of several over a dimension."""

    rows: Node
    matrices: Node
    multiply: Callable[[Tensor, Tensor], Tensor]
    """Matrices, whose sizes the products have, and rows to these, before they are added up."""
    dim: int
    """That is summed."""
    factor: Callable[[Tensor], Tensor]
    """Matrices to the second factor of the product."""


@contextmanager
def shown_as_sums(graph: Graph, find: Callable[[Node], ShownSum | None]) -> Iterator[None]:
    """Every product that `find` knows is such a sum, until the end. What is not raised is one product again."""
    before: dict[Node, tuple[ShownSum, Any, Any]] = {}
    for node in list(graph.nodes):
        if (found := find(node)) is not None:
            before[node] = found, node.target, node.args
            with graph.inserting_before(node):
                product = write_out(graph, found.multiply, (found.matrices, found.rows), node)[0]
            node.target, node.args = aten.sum.dim_IntList, (product, [found.dim], rank(node) == 3)
    try:
        yield
    finally:
        for node, (found, target, factors) in before.items():
            if not node._erased:
                product, (rows, factor) = args(node)[0], factors
                node.target, node.args = target, (rows, _factor(graph, node, found, factor))
                erase_unread(graph, product)


def _factor(graph: Graph, node: Node, found: ShownSum, factor: Node) -> Node:
    """The second factor, once more where it went with a layer of the same weights: nobody read it meanwhile."""
    if not factor._erased:
        return factor
    with graph.inserting_before(node):
        return write_out(graph, found.factor, (found.matrices,), node)[0]
