"""What moves, weighs and adds rows, written once more for rows of fewer columns that say something else of them.

Which token stands in a place of a buffer, and what it is weighed by, is read off such rows: whatever brings rows to
their places and back treats all columns alike (`row_trials.py`).
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from inductor_passes import _compat
from inductor_passes.graph_tools import inherit_meta, write_out
from inductor_passes.raising.row_trials import ALIGNED, Steps, filled_by, place_of_columns
from inductor_passes.raising.views_of_rows import SHOWN, args, aten, is_cast, is_one, rank, size

_SHAPE: dict[Any, int] = {
    aten.expand.default: 1,
    aten.full.default: 0,
    aten.empty.memory_format: 0,
} | dict.fromkeys(SHOWN, 1)
"""Which argument of an operator is a shape."""


class Narrow(NamedTuple):
    """How rows are written: with a number of columns for each of their `columns`, in a dtype that has what they say."""

    columns: int
    number: int
    dtype: torch.dtype

    def of(self, columns: int) -> int:
        """How many columns there are for so many, which are those of one row or of several."""
        return columns // self.columns * self.number

    def in_dtype(self, option: Any) -> Any:
        """An option of a call, which may be a dtype."""
        return self.dtype if isinstance(option, torch.dtype) and option.is_floating_point else option


def write_narrow(graph: Graph, steps: Steps, parts: Mapping[Node, Node], narrow: Narrow) -> dict[Node, Node]:
    """Inserts what is made of rows, with `parts` for these; what is at each node. Nothing but zeros is in new memory.

    Casts are left out: they round.
    """
    copies = dict(parts)
    for node in steps.constants:
        _write_constant(graph, node, copies, narrow)
    for node in steps.between.nodes:
        if node in steps.behind and node not in copies:
            copies[node] = copies[args(node)[0]] if is_cast(node) else _copied(graph, node, copies, narrow)
    return copies


def _write_constant(graph: Graph, node: Node, copies: dict[Node, Node], narrow: Narrow) -> None:
    """What is filled, back to what fills it."""
    if node is not filled_by(node):
        _write_constant(graph, args(node)[0], copies, narrow)
    if node not in copies:
        copies[node] = _copied(graph, node, copies, narrow)


def _copied(graph: Graph, node: Node, copies: Mapping[Node, Node], narrow: Narrow) -> Node:
    others = {each: _met(graph, each, node, narrow) for each in node.all_input_nodes if each not in copies}
    target, given, options = _call(node, narrow)
    given, options = map_arg((given, options), {**others, **copies}.__getitem__)
    options = map_aggregate(options, narrow.in_dtype)
    new = graph.call_function(target, given, options)
    values, keywords = map_arg((given, options), lambda each: each.meta["val"])
    with _compat.detect_fake_mode([node.meta["val"]]) or nullcontext():
        new.meta["val"] = target(*values, **keywords)
    inherit_meta(new, node)
    return new


def _call(node: Node, narrow: Narrow) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What is called, with fewer columns where a shape is given."""
    given, options, place = [*args(node)], {**node.kwargs}, _SHAPE.get(node.target)
    dim = place_of_columns(node.meta["val"], narrow.columns) if rank(node) > 1 else None
    if place is not None and dim is not None:
        sizes = [*given[place]]
        if sizes[dim] != -1:
            sizes[dim] = narrow.of(size(node, dim))
        given[place] = sizes
    if node.target is aten.empty.memory_format:
        options.pop("memory_format", None)
        return aten.full.default, (given[0], 0), options
    if node.target is aten.squeeze.default:  # not of columns, which may be one
        shape = given[0].meta["val"].shape
        return aten.squeeze.dims, (given[0], [dim for dim, each in enumerate(shape) if is_one(each)]), options
    target = aten.reshape.default if node.target in SHOWN else node.target  # fewer columns may lie otherwise
    return target, tuple(given), options


def _met(graph: Graph, other: Node, node: Node, narrow: Narrow) -> Node:
    """What meets rows in `node`: fewer columns of it, which are all the same."""
    if node.target in (aten.mm.default, aten.bmm.default):
        return write_out(graph, lambda value: value.to(narrow.dtype), (other,), node)[0]
    place = place_of_columns(node.meta["val"], narrow.columns) or 0
    if node.target not in ALIGNED or rank(other) < -place or is_one(size(other, place)):
        return other
    sizes = [-1] * rank(other)
    sizes[place] = narrow.of(size(other, place))
    return write_out(graph, lambda value: value.narrow(place, 0, 1).expand(sizes), (other,), node)[0]
