"""Small helpers to read and rewrite graphs of MoE operators. Guards raise `Refusal` with a reason for people."""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from inductor_passes import _compat
from inductor_passes.base import LAYER_KEY, PassLog, Refusal
from inductor_passes.sizes import same_size
from moe_ops import records
from moe_ops.arguments import GroupedGemm
from moe_ops.values import GroupedLinear

# What a new node inherits from the one it replaces. Not "val", and not "eager_input_vals": they describe the
# arguments of the old node, and Inductor would apply them to the new one's.
_INHERITED_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "custom", "original_aten", LAYER_KEY)


def overload(name: str) -> Any:
    """The operator `torch.ops.moe.<name>.default`."""
    return getattr(torch.ops.moe, name).default


def is_op(node: object, *names: str) -> bool:
    """Whether `node` calls one of our operators."""
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and any(node.target is overload(n) for n in names)
    )


def is_moe_op(node: Node) -> bool:
    """Whether `node` calls any operator of `torch.ops.moe`."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "moe"


def find(graph: Graph, *names: str) -> list[Node]:
    """Calls of our operators `names`, in graph order."""
    return [node for node in graph.nodes if is_op(node, *names)]


def is_training(graph: Graph) -> bool:
    """Whether AOTAutograd split this graph into forward and backward: it names their inputs so, and no others."""
    names = (node.name for node in graph.nodes if node.op == "placeholder")
    return any(name.startswith(("primals_", "tangents_")) for name in names)


class Part(NamedTuple):
    """A graph or one of its subgraphs."""

    graph: Graph
    where: str
    """"true_graph_0 of cond" for a subgraph, "body of while_loop in true_graph_0 of cond" inside one, else empty."""
    calls: int
    """How often it is called each time the outermost graph runs; one for a loop."""


def parts(module: GraphModule, where: str = "", calls: int = 1) -> Iterator[Part]:
    """A graph module's own graph and those of its higher-order operators: branches, loop bodies, nested regions."""
    yield Part(module.graph, where, calls)
    callers: dict[str, list[Node]] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(module, node.target, None), GraphModule):
            callers.setdefault(node.target, []).extend(node.users)
    for name, nodes in callers.items():
        if nodes:
            inside = f"{name} of {_operator_name(nodes[0])}{f' in {where}' if where else ''}"
            yield from parts(getattr(module, name), inside, calls * len(nodes))


def _operator_name(node: Node) -> str:
    return str(node.target).removeprefix("higher_order.")


def arguments(node: Node) -> Any:
    """The arguments of a call of one of our operators: its record in `moe_ops.arguments`, of nodes and options."""
    record = records.RECORDS[operator_name(node)]
    given = dict(node.kwargs)
    given.update(zip(records.names(record), node.args, strict=False))
    return records.builder(record)(*(given[name] for name in records.names(record)))


def operator_name(node: Node) -> str:
    """Which of our operators `node` calls."""
    return node.target._schema.name.removeprefix("moe::")  # type: ignore[union-attr]


def getitem_source(node: object) -> tuple[Node, int] | None:
    """`(source, index)` when `node` picks one output of a node with several."""
    if isinstance(node, Node) and node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return None


def outputs(node: Node) -> dict[int, Node]:
    """The getitem nodes of a node with several outputs, by index."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def describe(value: object) -> str:
    """What produces `value`, in words for a refusal."""
    if not isinstance(value, Node):
        return repr(value)
    if value.op == "placeholder":
        return f"the graph input {value.name}"
    source = getitem_source(value)
    if source is not None:
        return f"output {source[1]} of {describe(source[0])}"
    return str(value.target).removesuffix(".default").replace("moe.", "")


def expect_op(value: object, name: str, role: str, consumer: Node) -> Node:
    """`value` as a call of our operator `name`; refuses otherwise."""
    if is_op(value, name):
        return value  # type: ignore[return-value]
    raise Refusal(consumer, f"{role} comes from {describe(value)}, not from {name}")


def expect_one_weight(product: GroupedGemm, node: Node) -> GroupedLinear:
    """What a product is with. Refuses, at `node`, gate and up in two tensors."""
    first, *others = product.weight.parts
    if others:
        raise Refusal(node, "the second product has two weights")
    return first


def expect_only_user(node: Node, user: Node, role: str) -> None:
    """Refuses when anything but `user` reads `node`."""
    for other in node.users:
        if other is not user:
            raise Refusal(node, f"{role} has another user: {describe(other)}")


def expect_one_plan(consumer: Node, **tensors: object) -> Node | None:
    """The dispatch whose outputs all `tensors` are, None when all are graph inputs; refuses a mixture."""
    sources = {name: (getitem_source(tensor) or (None, -1))[0] for name, tensor in tensors.items()}
    if len(set(sources.values())) == 1:
        return next(iter(sources.values()))
    raise Refusal(consumer, f"{' and '.join(tensors)} come from different dispatch plans")


def call(graph: Graph, arguments: Any, like: Node) -> Node:
    """Inserts a call of the operator that takes `arguments`, with value and inherited metadata.

    Inductor keeps the strides of an operator's arguments only where it finds `eager_input_vals`; without them a
    node that a pass inserted could be fed a re-laid-out tensor in spite of its `needs_exact_strides` tag.
    """
    name, args = records.operator_name(type(arguments)), records.flatten(arguments)
    target, values = overload(name), map_arg(args, lambda arg: arg.meta["val"])
    try:
        result = fake_call(target, values)
    except (TypeError, ValueError) as error:  # the fused operator's own checks
        raise Refusal(like, f"{name} does not take these arguments: {error}") from error
    node = graph.call_function(target, args)
    inherit_meta(node, like)
    node.meta["eager_input_vals"] = (values, {})
    node.meta["val"] = result
    return node


def inherit_meta(node: Node, like: Node) -> None:
    """Copies what describes where a node came from."""
    node.meta.update({key: like.meta[key] for key in _INHERITED_META if key in like.meta})


def fake_call(function: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Result of `function` on fake values: new fake tensors, no computation."""
    mode = _compat.detect_fake_mode(values)
    if mode is None:
        return function(*values)
    with mode:
        return function(*values)


def pick(graph: Graph, source: Node, index: int) -> Node:
    """Output `index` of a node with several outputs: the getitem that is there, or a new one behind it."""
    found = outputs(source).get(index)
    if found is not None:
        return found
    with graph.inserting_after(source):
        node = graph.call_function(operator.getitem, (source, index))
    inherit_meta(node, source)
    node.meta["val"] = source.meta["val"][index]
    return node


def expect_same_value(new: Node, old: Node) -> None:
    """Refuses when the fake result of `new` differs from that of `old` in shape, stride or dtype."""
    ours, theirs = new.meta["val"], old.meta["val"]
    pairs = zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()), strict=False)
    same_layout = ours.dim() == theirs.dim() and all(same_size(a, b) for a, b in pairs)
    if not same_layout or ours.dtype != theirs.dtype:
        raise Refusal(
            old, f"{describe(new)} gives {_layout(ours)} where {describe(old)} gives {_layout(theirs)}"
        )


def replacement(graph: Graph, arguments: Any, old: Node) -> Node:
    """Inserts a call of the operator of `arguments` in front of `old`, whose result it must equal; else refuses."""
    with graph.inserting_before(old):
        new = call(graph, arguments, like=old)
    try:
        expect_same_value(new, old)
    except Refusal:
        graph.erase_node(new)
        raise
    return new


def write_out(
    graph: Graph,
    function: Callable[..., Any],
    args: Sequence[Node],
    like: Node,
    results: Sequence[Node] = (),
    kept: Collection[Any] = (),
) -> list[Node]:
    """Inserts the ATen graph of `function(*args)`, in which operators that are `kept` are not decomposed; its outputs,
    which must equal `results`, if given.
    """
    traced = _compat.trace(function, [arg.meta["val"] for arg in args], kept).graph
    return write_traced(graph, traced, args, like, results, lambda copy: copy.meta["val"])


def write_traced(
    graph: Graph,
    traced: Graph,
    args: Sequence[Node],
    like: Node,
    results: Sequence[Node],
    value_of: Callable[[Node], Any],
) -> list[Node]:
    """Inserts a graph with `args` for its inputs; its outputs, which must equal `results`, if given."""
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    output = next(node for node in traced.nodes if node.op == "output").args[0]
    computed: tuple[Node, ...] = output if isinstance(output, tuple) else (output,)  # type: ignore[assignment]
    for new, old in zip(computed, results, strict=False):
        expect_same_value(new, old)
    copies: dict[Node, Node] = dict(zip(placeholders, args, strict=True))
    for node in traced.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta["val"] = value_of(copies[node])
            inherit_meta(copies[node], like)
    return [copies[result] for result in computed]


def _layout(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())}"


def erase_dead(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erases those of `nodes` that nothing reads any more, last first, with their getitems."""
    for node in nodes:
        for getitem in list(outputs(node).values()):
            if not getitem.users:
                graph.erase_node(getitem)
        if not node.users:
            graph.erase_node(node)


def drop_assertions(graph: Graph) -> None:
    """Erases what asserts the dtype of a tensor, as exported programs do behind each cast: here it is known.

    Inductor generates nothing of it; a pass would see a reader.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)


Rewrite = Callable[[Graph, Node, PassLog], None]
OnRefusal = Callable[[Refusal, Node], None]


def rewrite_each(
    graph: Graph, anchors: Iterable[Node], rewrite: Rewrite, log: PassLog, on_refusal: OnRefusal | None = None
) -> None:
    """Runs `rewrite` at every anchor. A refusal is recorded (`log.refuse` unless told) and the anchor left alone."""
    record = on_refusal if on_refusal is not None else log.refuse
    for anchor in anchors:
        try:
            rewrite(graph, anchor, log)
        except Refusal as refusal:
            record(refusal, anchor)
