"""RaiseExperts: the routed experts of a model that knows nothing of us become the stages.

The two products of a layer are found by what they multiply, everything around them by what it computes: which rows are
where, which gate stands between, how the rows of a token are summed.
"""

from collections.abc import Sequence

from torch.fx import Graph

from inductor_passes import _compat
from inductor_passes.base import PassLog, Refusal
from inductor_passes.raising import all_experts, loops, turns
from inductor_passes.raising.as_written import as_written
from inductor_passes.raising.buffers import Buffered
from inductor_passes.raising.dropped import expect_dropped
from inductor_passes.raising.indices import Found
from inductor_passes.raising.layer import Experts
from inductor_passes.raising.parts import parts_of
from inductor_passes.raising.places import Placed
from inductor_passes.raising.products import Product, ids_of, order_of, products
from inductor_passes.raising.read_sizes import read_sizes_first
from inductor_passes.raising.sums import weighted_sum
from inductor_passes.raising.unrouted import alone, unrouted
from inductor_passes.raising.writing import write


class RaiseExperts:
    """Grouped or gathered products with a gate between, and the sum behind, become stages."""

    name = "raise_experts"
    requires: tuple[str, ...] = ()
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Raises every layer; says why not at the last product of a layer that it leaves."""
        read_sizes_first(graph)
        with as_written(graph):
            _raise_all(graph, log)
        read_sizes_first(graph)


def _raise_all(graph: Graph, log: PassLog) -> None:
    found: Found = {}
    told = {each.node for each in products(graph)}
    chains = turns.chains(graph)
    for refusal in alone(graph, {each.node for chain in chains for each in chain}):
        log.refuse(refusal, refusal.node)
    for *firsts, second in turns.of_all_choices(chains):
        try:
            with _compat.real_tensors():
                write(graph, _experts(firsts, second, found))
            log.lift("experts", second.node, (each.node for each in (*firsts, second)))
        except Refusal as refusal:
            log.refuse(refusal, second.node)
    for layer in layers_of_all(graph):
        try:
            with _compat.real_tensors():
                write(graph, layer.experts())
            log.lift("experts", layer.nodes[-1], layer.nodes)
        except Refusal as refusal:
            log.refuse(refusal, layer.nodes[-1])
        told.update(layer.nodes)
    for refusal in unrouted(graph, told):
        log.refuse(refusal, refusal.node)


def layers_of_all(graph: Graph) -> list[turns.Turns | loops.Loop | all_experts.Everyone | Placed | Buffered]:
    """Every layer that takes its experts in turn, or multiplies all tokens with all of them."""
    return [*turns.turns(turns.chains(graph)), *loops.loops(graph), *all_experts.everyone(graph)]


def product_layers(graph: Graph) -> list[turns.Chain]:
    """The products of each layer that has one for all choices of a token, its last one at the end."""
    return turns.of_all_choices(turns.chains(graph))


def _experts(firsts: Sequence[Product], second: Product, found: Found) -> Experts:
    indices = ids_of(second, found)
    order = order_of(firsts[0], indices)
    parts = parts_of(firsts, second, order, indices)
    weighed = parts.tokens._replace(topk_weights=parts.topk_weights)
    layer = Experts(indices, parts, weighted_sum(parts.second.node, order, indices, weighed))
    expect_dropped(layer)
    return layer
