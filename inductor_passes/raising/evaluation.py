"""Parts of a graph, computed on real numbers: a router or a gate is known by what it computes, however it is written.

Everything floating is computed in float64, also where the graph rounds in between: two formulas that are the same agree
there to the last digits, and two that are not differ by more than any rounding could explain.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from inductor_passes.sizes import size_hint

aten = torch.ops.aten

VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.expand.default,
)
"""Operators that show a tensor in another shape."""

WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes between which a cast rounds. One to float8 is part of what is computed, as one to an integer is."""

_OF_BITS = (aten.view.dtype,)
"""Read the bits of a number, which are others in float64."""

_INSTEAD: dict[Any, Callable[..., Any]] = {torch.ops.prims.convert_element_type.default: torch.Tensor.to}
"""What computes the same, and may be run on many at once."""


class Cut(NamedTuple):
    """The nodes between some leaves and some outputs."""

    leaves: tuple[Node, ...]
    nodes: tuple[Node, ...]
    """In an order in which they can be computed."""


def cut(outputs: Iterable[Node], is_leaf: Callable[[Node], bool]) -> Cut:
    """What `outputs` are computed from, back to leaves: inputs of the graph, sizes, and where `is_leaf` says so."""
    leaves: dict[Node, None] = {}
    nodes: dict[Node, None] = {}
    pending = [(node, False) for node in outputs]
    while pending:
        node, inputs_are_done = pending.pop()
        if inputs_are_done:
            nodes[node] = None
        elif node in leaves or node in nodes:
            continue
        elif node.op != "call_function" or is_size(node) or is_leaf(node):
            leaves[node] = None
        else:
            pending.append((node, True))
            pending.extend((each, False) for each in node.all_input_nodes)
    return Cut(tuple(leaves), tuple(nodes))


def is_size(node: Node) -> bool:
    """Whether `node` is a size. What it comes from tells no more: a subgraph asks it of any tensor that it gets."""
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def evaluate(nodes: Iterable[Node], values: Mapping[Node, Any]) -> dict[Node, Any]:
    """The values of `nodes` and what they came from: on the CPU, in float64.

    Raises:
        RuntimeError, ValueError, TypeError, IndexError: the nodes do not take these values, or are not plain.
    """
    known = dict(values)
    with torch.no_grad():
        for node in nodes:
            if not is_plain(node) or node.target in _OF_BITS:
                raise RuntimeError(f"{node.target} is not computed while compiling")
            args = map_aggregate(map_arg(node.args, known.__getitem__), _on_cpu_in_float64)
            kwargs = map_aggregate(map_arg(node.kwargs, known.__getitem__), _on_cpu_in_float64)
            called: Any = _INSTEAD.get(node.target, node.target)
            known[node] = called(*_taken_here(node, args), **kwargs)
    return known


def is_plain(node: Node) -> bool:
    """Whether a call is one of PyTorch's own that gives the same whenever and wherever it runs.

    Others draw random numbers, talk to other processes, or run branches and code of which nothing is known.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return not isinstance(target, torch._ops.HigherOrderOperator)
    return target.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in target.tags


def _taken_here(node: Node, args: Any) -> Any:
    """The arguments with which an operator runs on a CPU and in one order."""
    if node.target is torch.ops.aten.histc.default:  # counts integers on a GPU, only floating numbers here
        return (args[0].double(), *args[1:])
    if node.target is torch.ops.aten.topk.default:  # who asks for no order takes the sorted one, too
        return args[:4]
    return args


def _on_cpu_in_float64(option: Any) -> Any:
    if isinstance(option, torch.dtype) and option.is_floating_point:
        if option not in WIDE:
            raise ValueError(f"{option} has other numbers than float64")
        return torch.float64
    return torch.device("cpu") if isinstance(option, torch.device) else option


def concrete(size: int | torch.SymInt) -> int | None:
    """A size as a number: a symbol's is the one it was traced with; None when it has none."""
    return size_hint(size)


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
