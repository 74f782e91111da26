"""Tensors that hold something for each expert, a matrix or a row: stored so, or shown so."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from inductor_passes.raising.views_of_rows import SHOWN, args, aten, changes_dtype, prims, rank, same_shape

Step = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A view: what shows it, and how."""


_TURN: Step = (aten.permute.default, ((0, 2, 1),))


class Stack(NamedTuple):
    """`source`, seen through `steps`: a weight [E, A, B], or a bias [E, B]."""

    source: Node
    steps: tuple[Step, ...] = ()

    def shown(self, stored: Tensor) -> Tensor:
        """What is seen of the tensor that `source` gives."""
        for show, how in self.steps:
            stored = show(stored, *how)
        return stored

    @property
    def value(self) -> Tensor:
        """Its fake value."""
        return self.shown(self.source.meta["val"])

    def holds(self, number: int) -> bool:
        """Whether it is of so many experts."""
        return same_shape(self.value.shape[:1], [number])

    @property
    def is_turned(self) -> bool:
        """Whether what is stored is seen transposed."""
        return _TURN in self.steps

    def transposed(self) -> "Stack":
        """[E, B, A] of [E, A, B]."""
        return Stack(self.source, _without_turns((*self.steps, _TURN)))


def of_expert(node: Node, is_choice: Callable[[Node, int], bool]) -> tuple[Stack, int] | None:
    """The stack of which `node` is what belongs to one expert, and which one; None for anything else.

    Args:
        node: a matrix, or a bias.
        is_choice: of an expert: given what is selected from along its first dimension, and which.
    """
    outer: list[Step] = []
    while (chosen := selected(node)) is None or chosen[1] != 0 or not is_choice(chosen[0], chosen[2]):
        found = one_step(node, 1)
        if found is None:
            return None
        node, step = found
        outer.append(step)
    stack, _, expert = chosen
    inner: list[Step] = []
    while selected(stack) is None and (found := one_step(stack, 0)) is not None:
        stack, step = found
        inner.append(step)
    return Stack(stack, _without_turns((*reversed(inner), *reversed(outer)))), expert


def selected(node: Node) -> tuple[Node, int, int] | None:
    """What `node` is one of, along which dimension and which: `select` gives it, or `unbind` with all others."""
    if node.target is aten.select.int:
        source, dim, index = args(node)
        return source, dim % rank(source), index
    if node.target is operator.getitem and args(node)[0].target is aten.unbind.int:
        source, *dim = args(args(node)[0])
        return source, (dim[0] if dim else 0) % rank(source), args(node)[1]
    return None


def one_step(node: Node, more: int) -> tuple[Node, Step] | None:
    """What `node` shows a part of or turns, and how that is done to a tensor with so `more` dimensions in front.

    None where a size or a place is not known.
    """
    target = node.target
    if len(node.all_input_nodes) > 1:
        return None
    if target is aten.permute.default:
        source, dims = args(node)
        turned = (*range(more), *(dim % len(dims) + more for dim in dims))
        return source, (aten.permute.default, (turned,))
    if target is aten.slice.Tensor:
        source, dim, *bounds = args(node)
        return source, (aten.slice.Tensor, (dim % rank(source) + more, *bounds))
    if target in SHOWN and not more:  # matrices of all experts, stored as one
        shape = tuple(node.meta["val"].shape)
        return (args(node)[0], (aten.view.default, (shape,))) if _are_known(shape) else None
    if changes_dtype(node):  # autocast's
        return args(node)[0], (prims.convert_element_type.default, args(node)[1:])
    if (chosen := selected(node)) is not None:
        source, dim, index = chosen
        return source, (aten.select.int, (dim + more, index))
    if target is operator.getitem:
        return _part(args(node)[0], args(node)[1], more)
    return None


def _are_known(sizes: tuple[Any, ...]) -> bool:
    return all(isinstance(each, int) for each in sizes)


def _part(split: Node, index: int, more: int) -> tuple[Node, Step] | None:
    """One of the parts that a tensor was cut into."""
    is_split = split.target in (aten.split.Tensor, aten.split_with_sizes.default)
    if not is_split or len(split.all_input_nodes) > 1:
        return None
    source, sizes, dim = args(split) if len(args(split)) > 2 else (*args(split), 0)
    if isinstance(sizes, int):
        start, end = index * sizes, (index + 1) * sizes
    else:
        start, end = sum(sizes[:index]), sum(sizes[: index + 1])
    return source, (aten.slice.Tensor, (dim % rank(source) + more, start, end))


def _without_turns(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Without two turns in a row that undo each other."""
    kept: list[Step] = []
    for step in steps:
        if kept and kept[-1] == step == _TURN:
            kept.pop()
        else:
            kept.append(step)
    return tuple(kept)
