"""What does not need an exchange runs during it, in the generated code too.

sent = all_gather(x); got = wait(sent); experts = ...(got); shared = mm(act(mm(x, w13)), w2); out = experts + shared
->
sent = all_gather(x); gate_up = mm(x, w13) after sent; shared = mm(act(gate_up), w2); got = wait(sent) after shared; ...

Inductor puts what is read late next to its reader, and orders its kernels by who needs what and by memory: a wait
follows its start at once. So calls behind a wait that need nothing of it move in front of it, and whatever calls stand
between a start and its wait are held there, by an order that Inductor's scheduler keeps. Held are products and other
kernels that Inductor calls, of each chain the first and the last; what it generates around them fuses as ever. Nothing
moves over the next start, and nothing over a change in place.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.naming import module_path
from inductor_passes.records import Exchange
from inductor_passes.repeats import changes, is_call, may_move

_EMPTY = torch.ops.aten.empty.memory_format


def overlap_exchanges(graph: Graph) -> int:
    """Moves calls into exchanges and holds those that are in one; says for how many waits."""
    _fill_exchanges(graph)
    held: dict[Node, dict[Node, None]] = {}
    waits = 0
    for start, wait, between in _exchanges(graph):
        for first in _ends(between, lambda node: node.all_input_nodes):
            for node in _held_with(first):
                held.setdefault(node, {})[_result(start)] = None
        lasts = _ends(reversed(between), lambda node: node.users)
        if lasts:
            held.setdefault(wait, {}).update(dict.fromkeys(map(_result, lasts)))
            waits += 1
    _compat.order_behind(graph, held)
    return waits


def exchanges_of(graph: Graph) -> list[Exchange]:
    """What will run during each exchange. Changes the graph as `overlap_exchanges` does, and holds nothing."""
    _fill_exchanges(graph)
    first: dict[Node, Exchange] = {}  # of a start with several waits
    for start, wait, between in _exchanges(graph):
        first.setdefault(start, _told(start, wait, between))
    return list(first.values())


def _told(start: Node, wait: Node, between: list[Node]) -> Exchange:
    calls = tuple(
        " of ".join(filter(None, (_name(each), module_path(each)))) for each in filter(is_call, between)
    )
    return Exchange(_name(start), module_path(start), calls, "" if calls else _why_alone(wait))


def _why_alone(wait: Node) -> str:
    """Of a wait in front of which nothing could move."""
    behind, end = [], wait.next
    while end.op != "output" and not _is_start(end) and not changes(end):
        behind.append(end)
        end = end.next
    border = _border(end)
    if any(is_call(node) for node in behind):
        return f"every call behind it, up to {border}, needs what ranks have sent"
    return f"no call stands between it and {border}"


def _border(end: Node) -> str:
    """What calls do not move across, in words."""
    if changes(end):
        return f"{end.name}, which writes in place"
    return "the end" if end.op == "output" else "the next exchange"


def _name(node: Node) -> str:
    target: Any = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else node.name


def _fill_exchanges(graph: Graph) -> None:
    for wait, behind in _behind_first_waits(graph):
        _raise_in_front(wait, behind)


def _behind_first_waits(graph: Graph) -> Iterator[tuple[Node, list[Node]]]:
    """Of each run of starts the wait that comes first, and what stands behind it up to the next start."""
    wait, behind, is_under_way = None, [], False
    for node in [*graph.nodes]:
        if _is_start(node) or changes(node) or node.op == "output":
            if wait is not None:
                yield wait, behind
            wait, behind, is_under_way = None, [], _is_start(node)
        elif wait is not None:
            behind.append(node)
        elif is_under_way and _is_wait(node):
            wait = node


def _raise_in_front(wait: Node, behind: list[Node]) -> None:
    """Moves calls that need no wait, and what they need, in front of `wait`."""
    late = {wait}
    for node in behind:
        if _is_wait(node) or not may_move(node) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    needed: set[Node] = set()
    for node in reversed(behind):
        if node not in late and (is_call(node) or not needed.isdisjoint(node.users)):
            needed.add(node)
    for node in behind:
        if node in needed:
            wait.prepend(node)


def _exchanges(graph: Graph) -> list[tuple[Node, Node, list[Node]]]:
    """Start, wait, and what stands between the two. A start of several tensors has a wait for each."""
    nodes = list(graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    pairs = [(_start_of(node), node) for node in nodes if _is_wait(node)]
    return [
        (start, wait, nodes[places[start] + 1 : places[wait]]) for start, wait in pairs if _is_start(start)
    ]


def _start_of(wait: Node) -> Node:
    sent: Any = wait.args[0]
    return sent.args[0] if sent.target is operator.getitem else sent


def _ends(nodes: Iterable[Node], related: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """The calls that no other of `nodes` leads to: the first ones of each chain or, backwards, the last ones."""
    reached: set[Node] = set()
    found = []
    for node in nodes:
        if not reached.isdisjoint(related(node)):
            reached.add(node)
        elif is_call(node) and node.users:  # what returns nothing cannot be held
            reached.add(node)
            found.append(node)
    return found


def _held_with(call: Node) -> list[Node]:
    """What to hold back so that `call` is: itself, or the memory that a Triton launch writes."""
    if call.target is not _compat.triton_launch():
        return [call]
    given = call.kwargs["kwargs"].values()  # type: ignore[union-attr]
    return [each for each in given if isinstance(each, Node) and each.target is _EMPTY]


def _result(call: Node) -> Node:
    """A tensor that is there when `call` has run."""
    return call if isinstance(call.meta["val"], torch.Tensor) else next(iter(call.users))


def is_collective(node: object) -> bool:
    """Whether a node starts an exchange or waits for one."""
    target = node.target if isinstance(node, Node) else None
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional"


def _is_wait(node: Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def _is_start(node: object) -> bool:
    return is_collective(node) and not _is_wait(node)  # type: ignore[arg-type]
