"""Graphs as our passes get them, without generating code, and a printer whose output is stable across torch."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from inductor_passes import _compat
from inductor_passes.base import PassLog
from inductor_passes.pipeline import FUSIONS, run_passes


def post_grad(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> list[GraphModule]:
    """The post-grad graphs of one call of `function`: one for inference, forward and backward for training."""
    graphs: list[GraphModule] = []
    torch._dynamo.reset()
    backend = _compat.post_grad_backend(lambda gm, _: graphs.append(GraphModule(gm, _copy(gm.graph))))
    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    return graphs


class _Seen(BaseException):
    """Ends a compile at its graph; Dynamo catches exceptions."""


def _inference_graph(function: Callable[..., Any], *args: Any, dynamic: bool | None) -> GraphModule:
    """The post-grad graph of `function`, neither run nor guarded: that takes up to a fifth of a compile."""
    graphs: list[GraphModule] = []

    def stop(gm: GraphModule, _: Any) -> None:
        graphs.append(GraphModule(gm, _copy(gm.graph)))
        raise _Seen

    torch._dynamo.reset()
    backend = _compat.post_grad_backend(stop)
    with contextlib.suppress(_Seen):
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    (module,) = graphs
    return module


def _copy(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node, original in zip(copy.nodes, graph.nodes, strict=True):
        node.meta = dict(original.meta)
    return copy


@dataclass
class Rewritten:
    """A graph before and after passes."""

    module: GraphModule
    before: str
    log: PassLog = field(default_factory=PassLog)

    @property
    def graph(self) -> Graph:
        return self.module.graph

    @property
    def after(self) -> str:
        return show(self.graph)

    @property
    def reasons(self) -> list[str]:
        return [refused.reason for refused in self.log.refused]

    def ops(self) -> list[str]:
        """Our operators, in order."""
        return [str(n.target).split(".")[1] for n in self.graph.nodes if str(n.target).startswith("moe.")]


def rewrite(
    function: Callable[..., Any], *args: Any, passes: tuple[Any, ...] = FUSIONS, dynamic: bool | None = None
) -> Rewritten:
    """Runs `passes` over the inference graph of `function`."""
    with torch.no_grad():
        module = _inference_graph(function, *args, dynamic=dynamic)
    result = Rewritten(module, show(module.graph))
    run_passes(module.graph, passes, result.log)
    module.recompile()
    return result


def computed(
    function: Callable[..., Any], *args: Any, passes: tuple[Any, ...] = FUSIONS
) -> tuple[Rewritten, Any]:
    """What `rewrite` gives, and what the rewritten graph computes: operator by operator, no code is generated."""
    results: list[Rewritten] = []

    def rewritten(module: GraphModule, _: Any) -> None:
        result = Rewritten(module, show(module.graph))
        run_passes(module.graph, passes, result.log)
        module.recompile()
        results.append(result)

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(function, backend=_compat.post_grad_backend(rewritten), fullgraph=True)(*args)
    (result,) = results
    return result, out


def show(graph: Graph) -> str:
    """One line per node: name, operator, arguments, dtype and shape. Inputs come where they are first read, because
    their order differs between torch versions; names and symbols are numbered in order of appearance.
    """
    names: dict[Node, str] = {}
    lines: list[str] = []
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            if argument not in names:
                _add_line(argument, "input()", names, lines)
        if node.op == "output":
            lines.append(f"return {_argument(node.args[0], names)}")
        elif node.op == "call_function":
            args = ", ".join(_argument(arg, names) for arg in node.args)
            _add_line(node, f"{_target(node)}({args})", names, lines)
    return _number_symbols("\n".join(lines))


def _add_line(node: Node, what: str, names: dict[Node, str], lines: list[str]) -> None:
    names[node] = f"%{len(names)}"
    lines.append(f"{names[node]} = {what} : {_value(node.meta.get('val'))}")


def _target(node: Node) -> str:
    overload = isinstance(node.target, torch._ops.OpOverload)
    return str(node.target) if overload else node.target.__name__  # type: ignore[union-attr]


def _argument(arg: Any, names: dict[Node, str]) -> str:
    if isinstance(arg, list | tuple):
        return "[" + ", ".join(_argument(each, names) for each in arg) + "]"
    return names[arg] if isinstance(arg, Node) else repr(arg)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{len(value)} tensors"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__


def _number_symbols(text: str) -> str:
    symbols = list(dict.fromkeys(re.findall(r"\bs\d+\b", text)))
    return re.sub(r"\bs\d+\b", lambda match: f"T{symbols.index(match.group())}", text)
