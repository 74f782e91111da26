"""Stages written out as ATen, of which alike ones in a graph are traced once."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes import _compat
from inductor_passes.forms import form
from inductor_passes.graph_tools import fake_call, write_traced


class Written:
    """What one pass has written out of one graph, by the form of what it stood for."""

    def __init__(self) -> None:
        self._traced: dict[Hashable, Graph] = {}

    def inline(
        self,
        graph: Graph,
        function: Callable[..., Any],
        args: Sequence[Node],
        stage: Node,
        results: Sequence[Node],
    ) -> list[Node]:
        """Writes the ATen graph of `function(*args)` in front of `stage`; its outputs, which must equal `results`.

        What the function does must follow from what `stage` calls and with which options.
        """
        key, values = form(args, (stage,)), [arg.meta["val"] for arg in args]
        if key not in self._traced:
            self._traced[key] = _compat.trace(function, values).graph
        traced = self._traced[key]
        with graph.inserting_before(stage):
            return fake_call(lambda *_: write_traced(graph, traced, args, stage, results, _anew), values)


def _anew(node: Node) -> Any:
    """The fake result of a call; a tensor of its own, for two that share memory would be taken for views."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]
