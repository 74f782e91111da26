"""What stands between rows and what is made of them, tried on random rows of few columns.

Operators in between add and multiply, and some move rows. What they make is a quotient of polynomials in rows and
weights: one that is ours at random numbers is ours. None of them lets two columns of a row meet, so few columns tell
of all.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import VIEWS, Cut, evaluate
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.views_of_rows import args, aten, is_one, rank, readers

COLUMNS = 5
ALIGNED = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.where.self,
    aten.addcmul.default,
    aten.gather.default,
    aten.scatter_add.default,
    aten.scatter.src,
)
"""Each column of what they give is made of the same column of what they read."""

_FILLS: dict[Any, int | None] = {
    aten.full.default: 1,
    aten.scalar_tensor.default: 0,
    aten.empty.memory_format: None,
}
"""Which argument is the number that all elements have."""


def place_of_columns(value: Tensor, columns: Any) -> int | None:
    """Which dimension, counted from the end, is that of columns: the last, of several rows perhaps, or another.

    Where several may be, that whose numbers lie side by side. None where it cannot be told.
    """
    if value.dim() < 2 or not isinstance(columns, int):
        return None
    sizes = [each if isinstance(each, int) else -1 for each in value.shape]
    found = [dim for dim in range(-len(sizes), -1) if sizes[dim] == columns]
    if sizes[-1] > 0 and sizes[-1] % columns == 0:
        found.append(-1)
    dense = [dim for dim in found if is_one(value.stride(dim))] if len(found) > 1 else found
    return dense[0] if len(dense) == 1 else None


Given = Callable[[int | torch.SymInt], int | None]
"""What a size of the graph is where rows are tried; None, or ValueError, where that is not known."""


class Steps(NamedTuple):
    """How a sum is computed: first what is made of weights, then what is made of rows."""

    between: Cut
    behind: set[Node]
    """Rows, and what is made of them."""
    constants: list[Node]
    """What is filled, and rows meet."""
    others: list[Node]
    """All else but rows."""


def steps_between(between: Cut, parts: Iterable[Node]) -> Steps:
    """What is between rows, those of some `parts`, and what is made of them."""
    behind = {*parts}
    for node in between.nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    constants = [
        node for node in between.nodes if filled_by(node) is not None and not behind.isdisjoint(node.users)
    ]
    alone = {node for node in constants if behind.issuperset(readers(node))}
    others = [node for node in between.nodes if node not in behind and node not in alone]
    return Steps(between, behind, constants, others)


def filled_by(node: Node) -> Node | None:
    """What has filled `node`, as it is seen, with one number, or with anything yet; None of an index."""
    while node.target in (*VIEWS, aten.slice.Tensor, aten.select.int):
        node = args(node)[0]
    return node if node.target in _FILLS and not is_integral(node) else None


class Few:
    """How rows are tried: with a small number of their `columns`, in sizes that are `given` for those of the graph.

    `unknown` is what memory holds that nobody has written to.
    """

    def __init__(self, columns: Any, given: Given, number: int = COLUMNS, unknown: float = math.nan) -> None:
        self.columns, self.given, self.number, self.unknown = columns, given, number, unknown
        self._shapes: dict[Node, list[int]] = {}  # asked for in every trial

    def shape(self, node: Node) -> list[int]:
        """The shape that rows have then. Raises ValueError where that is not known."""
        if node not in self._shapes:
            self._shapes[node] = self._shape(node)
        return self._shapes[node]

    def _shape(self, node: Node) -> list[int]:
        value = node.meta["val"]
        shape, place = value.shape, place_of_columns(value, self.columns)
        sizes = [self.given(each) for each in shape]
        if place is None or None in sizes:
            raise ValueError(f"{describe(node)} has a size that does not follow from the number of tokens")
        sizes[place] = shape[place] // self.columns * self.number
        return [each or 0 for each in sizes]

    def narrowed(self, value: Tensor, node: Node) -> Tensor:
        """What meets the rows that `node` gives. Raises ValueError where it differs along their columns."""
        place = place_of_columns(node.meta["val"], self.columns) or 0
        if value.dim() < -place:
            return value
        column = value.narrow(place, 0, 1)
        if value.stride(place) and not bool((value == column).all()):
            raise ValueError("columns are weighed differently")
        few = [-1] * value.dim()
        few[place] = self.shape(node)[place]
        return column.expand(few)


def computed(steps: Steps, known: Mapping[Node, Any], parts: Mapping[Node, Tensor], few: Few) -> Tensor:
    """What is at the end: weights are computed first, then rows, of few columns."""
    rows = {node: part.reshape(few.shape(node)) for node, part in parts.items()}
    filled = {node: _filled(node, few) for node in steps.constants}
    values = evaluate(steps.others, known) | filled | rows
    for node in steps.between.nodes:
        if node in steps.behind:
            values[node] = _row(node, values, steps.behind, few)
    *_, last = (*steps.between.leaves, *steps.between.nodes)  # rows themselves, where nothing is made of them
    return values[last]


def _filled(node: Node, few: Few) -> Tensor:
    """One number, as many times as there are rows."""
    source: Any = filled_by(node)
    place = _FILLS[source.target]
    value = torch.tensor(few.unknown if place is None else args(source)[place], dtype=torch.float64)
    return value.expand(few.shape(node)) if rank(node) > 1 else value


def _row(node: Node, known: Mapping[Node, Any], behind: set[Node], few: Few) -> Any:
    if isinstance(node.meta["val"], tuple | list):
        return evaluate([node], known)[node]
    wanted = few.shape(node)
    if node.target in VIEWS:
        source = known[args(node)[0]]
        return source.expand(wanted) if node.target is aten.expand.default else source.reshape(wanted)
    given = {each: known[each] for each in node.all_input_nodes}
    if node.target in ALIGNED:
        others = [each for each in given if each not in behind and isinstance(given[each], Tensor)]
        given |= {each: few.narrowed(given[each], node) for each in others}
    value = evaluate([node], given)[node]
    if list(value.shape) != wanted:
        raise ValueError(f"{describe(node)} takes some columns from others")
    return value
