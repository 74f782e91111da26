"""RaiseForTraining: layers of graphs that will have a backward are raised before autograd sees them.

Behind AOTAutograd forward and backward are two graphs, or one in which every intermediate has two readers. Before it
there is one forward. What is raised there is differentiated as our operators are, so its gradients are right by
construction, and what is saved for them is what the operators say. It sits in `pre_grad_custom_pass`. A graph in which
nothing is raised stays as it is; one without a backward is left to the passes behind autograd.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from inductor_passes import _compat, compile_log
from inductor_passes.base import LOGGER, PassLog, Refusal, layer_of
from inductor_passes.fuse_for_backward import FuseForBackward
from inductor_passes.image import VALUE, Image, image_of
from inductor_passes.pipeline import RAISES, run_passes
from inductor_passes.raising.as_written import as_written
from inductor_passes.raising.experts import layers_of_all, product_layers
from inductor_passes.raising.read_sizes import read_sizes_first
from inductor_passes.slot import InSlot
from inductor_passes.transplant import Transplant, inputs_of

_BEFORE_AUTOGRAD = (*RAISES, FuseForBackward())


@dataclass(frozen=True)
class RaiseForTraining(InSlot, _compat.CustomGraphPass):
    """Raises the layers of a Dynamo graph that has a backward, then runs the user's passes of the slot.

    Torch 2.11 does not ask for its key: there the pass has run before the key of what it leaves is made.
    """

    slot: ClassVar[str] = _compat.PRE_GRAD_SLOT

    note: Callable[[PassLog], None] = compile_log.layers_raised

    def __call__(self, graph: Graph) -> None:
        """Rewrites a Dynamo graph in place, or leaves it alone."""
        log = raise_layers(graph)
        if log is not None:
            self.note(log)
        for user_pass in self.users():
            user_pass(graph)


def raise_layers(graph: Graph) -> PassLog | None:
    """Raises every layer of a Dynamo graph that it can; None for a graph that no layer is in or no backward follows."""
    if not _has_backward(graph) or not any(map(_may_be_a_product, graph.nodes)):
        return None
    try:
        image = image_of(graph)
    except Exception as error:  # whatever a model calls: then it trains as it is
        LOGGER.warning("a training graph is not looked into: %r", error)
        return None
    read_sizes_first(image.graph)
    with as_written(image.graph):
        found = [each.node for layer in product_layers(image.graph) for each in layer]
        found += [node for layer in layers_of_all(image.graph) for node in layer.nodes]
        products = [_traced(image, node) for node in found]
    return _raised(graph, image, products) if products else None


def _raised(graph: Graph, image: Image, products: list[Node]) -> PassLog:
    transplant, log = Transplant(graph, image, inputs_of(image.graph)), PassLog()
    run_passes(image.graph, _BEFORE_AUTOGRAD, log)
    left: set[str] = set()
    for refusal, node in transplant.commit():
        log.refuse(refusal, node)
        left.add(layer_of(node))
    raised = [node for node in products if node._erased and layer_of(node) not in left]
    for product in transplant.still_read(raised):
        transplant.take_back()
        log.refuse(Refusal(product, "something else also reads a product of the experts"), product)
        left.update(each.layer for each in log.raised)
    log.raised[:] = [each for each in log.raised if each.layer not in left]
    log.fused.clear()  # seen, and told, behind autograd
    return log


def _traced(image: Image, product: Node) -> Node:
    """A product or, where it stands for something else for now, what that is."""
    while product not in image.sources:
        (product,) = product.users
    return product


def _has_backward(graph: Graph) -> bool:
    inputs = (node.meta.get(VALUE) for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    return torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in inputs)


def _may_be_a_product(node: Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    return any(word in name for word in ("mm", "matmul", "einsum", "linear"))
