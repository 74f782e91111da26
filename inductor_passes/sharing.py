"""Layers that are alike are compiled once: one becomes a function of the generated code, and each a call of it.

Inductor lowers, schedules and generates every node of a graph for itself, and analyses each launch of a Triton kernel
several times. What happened to a graph before stays: stretches begin and end where Inductor would fuse nothing.
"""

import torch
from torch.fx import Graph, GraphModule, Node

from inductor_passes import _compat
from inductor_passes.base import LOGGER
from inductor_passes.graph_tools import inherit_meta, pick
from inductor_passes.overlap import overlap_exchanges
from inductor_passes.repeats import Repeats, Stretch, repeats

_NAME = "repeated_layer"


def share_layers(graph: Graph) -> int:
    """Puts calls of one function in the place of alike stretches of an inference graph; says how many there are."""
    found = repeats(graph) if _compat.can_call_regions() else None
    if found is None:
        return 0
    region = _region(graph, found)
    setattr(graph.owning_module, _NAME, region)
    for stretch in reversed(found.stretches):  # so that what one reads is there yet
        _call(graph, stretch, found.outputs)
    LOGGER.debug(
        "%d alike stretches of %d nodes are compiled once", len(found.stretches), len(region.graph.nodes)
    )
    return len(found.stretches)


def _region(graph: Graph, found: Repeats) -> GraphModule:
    """The function, after Inductor's own passes, which have gone through the subgraphs of `graph` already."""
    body, stretch = Graph(), found.stretches[0]
    copies: dict[Node, Node] = {}
    for index, source in enumerate(stretch.inputs):
        copies[source] = body.placeholder(f"arg{index}")
        copies[source].meta["val"] = source.meta["val"]
    for node in stretch.nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
    results = [copies[stretch.nodes[place]] for place in found.outputs]
    output = body.output(tuple(results))
    output.meta["val"] = tuple(each.meta["val"] for each in results)
    region = GraphModule(graph.owning_module or torch.nn.Module(), body)
    _compat.finish_region(region)
    overlap_exchanges(region.graph)
    return region


def _call(graph: Graph, stretch: Stretch, outputs: tuple[int, ...]) -> None:
    results, inside = [stretch.nodes[place] for place in outputs], set(stretch.nodes)
    with graph.inserting_after(stretch.nodes[-1]):
        function = graph.get_attr(_NAME)
    with graph.inserting_after(function):
        call = graph.call_function(_compat.call_region, (function, _NAME, *stretch.inputs))
    inherit_meta(call, results[-1])
    call.meta["val"] = tuple(each.meta["val"] for each in results)
    for index, old in enumerate(results):
        old.replace_all_uses_with(pick(graph, call, index), delete_user_cb=lambda user: user not in inside)
    for node in reversed(stretch.nodes):
        graph.erase_node(node)
