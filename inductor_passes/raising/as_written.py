"""Graphs as models wrote them, for as long as passes look for layers: Inductor has rewritten products by then."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import Graph

from inductor_passes.raising.padding import unpadded
from inductor_passes.raising.written_out import multiplied


@contextmanager
def as_written(graph: Graph) -> Iterator[None]:
    """Products are products, without padding. Those that are left get back what Inductor made of them."""
    with multiplied(graph), unpadded(graph):
        yield
