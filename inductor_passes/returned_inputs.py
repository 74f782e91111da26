"""What a function of a graph returns as it was given is read where it came from, not from what the call returns.

y, again = invoke_subgraph(region, "region", x)      region returns (..., x), as forwards return what they save
f(again)   ->   f(x)                                 likewise of a view of x

Torch 2.11 to 2.14 take `again` for memory of its own: with no reader of `x` left they write other results into it,
and the backward of a nested compile region that is called twice reads those: wrong gradients, silently.
"""

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from inductor_passes.graph_tools import outputs


def read_inputs_themselves(graph: Graph) -> None:
    """Replaces results of functions in `graph` that are their inputs, or views of them."""
    for call in graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        function, _, *inputs = call.args
        body = getattr(graph.owning_module, function.target).graph
        results = body.output_node().args[0]
        copies = dict(zip(body.find_nodes(op="placeholder"), inputs, strict=True))
        for index, result in outputs(call).items():
            if _is_view_of(copies, results[index]):
                with graph.inserting_before(call):
                    again = _written_again(graph, copies, results[index])
                result.replace_all_uses_with(again)
                graph.erase_node(result)


def _is_view_of(inputs: Collection[Node], result: Node) -> bool:
    """Whether `result` is one of `inputs` or only views lie between."""
    if result in inputs:
        return True
    is_view = isinstance(result.target, torch._ops.OpOverload) and result.target.is_view
    return is_view and all(_is_view_of(inputs, each) for each in result.all_input_nodes)


def _written_again(graph: Graph, copies: dict[Node, Node], result: Node) -> Node:
    """`result` of a function as a node of the graph that calls it."""
    if result not in copies:
        for each in result.all_input_nodes:
            _written_again(graph, copies, each)
        copies[result] = graph.node_copy(result, copies.__getitem__)
    return copies[result]
