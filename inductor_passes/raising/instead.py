"""Nodes that are others for as long as passes look for layers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.fx import Graph, Node

from inductor_passes.raising.writing import erase_unread, held


@contextmanager
def instead(graph: Graph, found: Mapping[Node, Node]) -> Iterator[None]:
    """Who reads a node reads what was `found` for it, until the end. What is left reads what it read."""
    for node, other in found.items():
        node.replace_all_uses_with(other)
    try:
        with held(found.items()):
            yield
    finally:
        for node, other in found.items():
            if other._erased:
                erase_unread(graph, node)
            else:
                other.replace_all_uses_with(node)
                erase_unread(graph, other)
