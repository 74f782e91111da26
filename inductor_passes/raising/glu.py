"""`aten.glu` as the product that it is: gates are made of operators of one number each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.fx import Graph

from inductor_passes.raising.views_of_rows import aten
from inductor_passes.raising.writing import erase_unread, written


@contextmanager
def multiplied_glu(graph: Graph) -> Iterator[None]:
    """Writes every `aten.glu` out, as Inductor's lowering does. Those that are left are what they were."""
    found = {}
    for node in graph.find_nodes(op="call_function", target=aten.glu.default):
        with graph.inserting_before(node):
            found[node] = written(graph, _glu(*node.args[1:]), (node.args[0],), node)
        node.replace_all_uses_with(found[node])
    try:
        yield
    finally:
        for node, product in found.items():
            if not product._erased:
                product.replace_all_uses_with(node)
                erase_unread(graph, product)
            elif not node._erased:
                graph.erase_node(node)


def _glu(dim: int = -1) -> Callable[[Tensor], Tensor]:
    def run(rows: Tensor) -> Tensor:
        left, right = rows.chunk(2, dim)
        return left * right.sigmoid()

    return run
