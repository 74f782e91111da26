"""Sizes read off the first tensor that has them: then nobody reads what is inside of a layer for its size.

Of tokens [B, S, H], B and S open, a size of `x.view(-1, H)` is no input of the graph: it is read off whatever has it.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.raising.evaluation import aten


def read_sizes_first(graph: Graph) -> None:
    """Every size that is read off a tensor is read off the first one that has it."""
    first: dict[Any, tuple[Node, int]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            for dim, size in enumerate(value.shape):
                if _is_open(size):
                    first.setdefault(size.node.expr, (node, dim))
        elif node.target is aten.sym_size.int and _is_open(value):
            node.args = first.get(value.node.expr, node.args)


def _is_open(size: object) -> TypeGuard[torch.SymInt]:
    return isinstance(size, torch.SymInt) and size.node.has_hint() and size.node.maybe_as_int() is None
