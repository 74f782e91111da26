"""Parts of a graph, computed on real numbers: a router or a gate is known by what it computes, however it is written.

Everything floating is computed in float64, also where the graph rounds in between: two formulas that are the same agree
there to the last digits, and two that are not differ by more than any rounding could explain.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from inductor_passes import _compat


class Cut(NamedTuple):
    """The nodes between some leaves and some outputs."""

    leaves: tuple[Node, ...]
    nodes: tuple[Node, ...]
    """In an order in which they can be computed."""


def cut(outputs: Iterable[Node], is_leaf: Callable[[Node], bool]) -> Cut:
    """What `outputs` are computed from, back to leaves: inputs of the graph, and where `is_leaf` says so."""
    leaves: dict[Node, None] = {}
    nodes: dict[Node, None] = {}
    pending = [(node, False) for node in outputs]
    while pending:
        node, inputs_are_done = pending.pop()
        if inputs_are_done:
            nodes[node] = None
        elif node in leaves or node in nodes:
            continue
        elif node.op != "call_function" or is_leaf(node):
            leaves[node] = None
        else:
            pending.append((node, True))
            pending.extend((each, False) for each in node.all_input_nodes)
    return Cut(tuple(leaves), tuple(nodes))


def evaluate(nodes: Iterable[Node], values: Mapping[Node, Any]) -> dict[Node, Any]:
    """The values of `nodes` and what they came from: on the CPU, in float64.

    Raises:
        RuntimeError, ValueError, TypeError, IndexError: the nodes do not take these values.
    """
    known = dict(values)
    with torch.no_grad():
        for node in nodes:
            args = map_aggregate(map_arg(node.args, known.__getitem__), _on_cpu_in_float64)
            kwargs = map_aggregate(map_arg(node.kwargs, known.__getitem__), _on_cpu_in_float64)
            if (
                node.target is torch.ops.aten.histc.default
            ):  # counts integers on a GPU, only floating numbers here
                args = (args[0].double(), *args[1:])  # type: ignore[union-attr,index]
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator,misc]
    return known


def _on_cpu_in_float64(option: Any) -> Any:
    if isinstance(option, torch.dtype) and option.is_floating_point:
        return torch.float64
    return torch.device("cpu") if isinstance(option, torch.device) else option


def concrete(size: int | torch.SymInt) -> int | None:
    """A size as a number: a symbol's is the one it was traced with; None when it has none."""
    return _compat.size_hint(size)


def numbers(nodes: Iterable[Node]) -> tuple[float, ...]:
    """The constants written in `nodes`, without signs: limits, slopes, scales."""
    found: dict[float, None] = {}

    def note(value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[abs(float(value))] = None
        return value

    for node in nodes:
        map_aggregate((node.args, node.kwargs), note)
    return tuple(found)
