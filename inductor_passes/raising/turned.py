"""What is turned twice, seen as turned once by the passes that raise layers: einsums turn what they read and give."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import Graph

from inductor_passes.raising.views_of_rows import args, aten
from inductor_passes.raising.writing import erase_unread


@contextmanager
def turned_once(graph: Graph) -> Iterator[None]:
    """Every `permute` of another is one of what that reads, until the end."""
    found = {}
    for node in graph.find_nodes(op="call_function", target=aten.permute.default):
        inner, dims = args(node)
        if inner.target is aten.permute.default:
            found[node] = inner, dims
            source, order = args(inner)
            node.args = (source, [order[dim] for dim in dims])
    try:
        yield
    finally:
        for node, (inner, dims) in found.items():
            if node._erased:
                erase_unread(graph, inner)
            else:
                node.args = (inner, dims)
