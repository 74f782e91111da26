"""What part of a graph is, whatever it is called and reads: equal for parts that compute the same in the same way.

Sizes count as they are written, so forms are comparable within the graphs of one compile.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg


def form(
    inputs: Iterable[Node], nodes: Iterable[Node], kinds: Mapping[Node, Hashable] | None = None
) -> Hashable:
    """How `nodes` are put together, and the layouts of the `inputs` they read; `kinds` are theirs, if known."""
    inputs, nodes = tuple(inputs), tuple(nodes)
    places = {node: place for place, node in enumerate((*inputs, *nodes))}
    wired = (
        (kind_of(node) if kinds is None else kinds[node], *(places[each] for each in _sources(node)))
        for node in nodes
    )
    return (tuple(wired), tuple(_layout(node.meta.get("val")) for node in inputs))


def kind_of(node: Node) -> Hashable:
    """What a call does, whatever it reads: its operator, its options and what comes out."""
    options = map_arg((node.args, tuple(sorted(node.kwargs.items()))), lambda _: "a node")
    return (node.target, _hashable(options), _layout(node.meta.get("val")))


def _sources(node: Node) -> list[Node]:
    """Every node that is an argument, as often as it is one, in the order of `kind_of`."""
    found: list[Node] = []
    map_arg((node.args, tuple(sorted(node.kwargs.items()))), lambda each: found.append(each) or each)
    return found


def _hashable(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((key, _hashable(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return (type(value).__name__, repr(value))  # 1, 1.0 and True are equal, and not the same


def _layout(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        return (value.dtype, value.device, value.dim(), *map(str, sizes))
    if isinstance(value, list | tuple):
        return tuple(map(_layout, value))
    if isinstance(value, dict):
        return tuple((name, _layout(each)) for name, each in value.items())
    return str(value)
