"""Products that sum over more than one matrix, seen as products with each and a sum, by passes that raise layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.graph_tools import write_out
from inductor_passes.raising.views_of_rows import args, aten, rank
from inductor_passes.raising.writing import erase_unread, held


class ShownSum(NamedTuple):
    """A product of a matrix, or a batch of one, that is the sum of several over a dimension."""

    rows: Node
    matrices: Node
    multiply: Callable[[Tensor, Tensor], Tensor]
    """Matrices, whose sizes the products have, and rows to these, before they are added up."""
    dim: int
    """That is summed."""


@contextmanager
def shown_as_sums(graph: Graph, find: Callable[[Node], ShownSum | None]) -> Iterator[None]:
    """Every product that `find` knows is such a sum, until the end. What is not raised is one product again."""
    before: dict[Node, tuple[Any, Any]] = {}
    for node in list(graph.nodes):
        if (found := find(node)) is not None:
            before[node] = node.target, node.args
            with graph.inserting_before(node):
                product = write_out(graph, found.multiply, (found.matrices, found.rows), node)[0]
            node.target, node.args = aten.sum.dim_IntList, (product, [found.dim], rank(node) == 3)
    try:
        with held([(each, node) for node, (_, factors) in before.items() for each in factors]):
            yield
    finally:
        for node, (target, factors) in before.items():
            written = factors if node._erased else args(node)[:1]
            if not node._erased:
                node.target, node.args = target, factors
            for each in written:
                erase_unread(graph, each)
