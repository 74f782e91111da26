"""What a report is made of, and what its drawing shows: plain values, so that text and page need not know a report."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Break:
    """Where and why Dynamo split the graph."""

    reason: str
    location: str
    """"file:line in function", empty when Dynamo does not say."""


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """Size of one MoE layer in the graph."""

    name: str
    before: int
    """Operator calls as traced."""
    after: int
    """Operator calls after the fusions."""
    launches: int
    """Triton kernels the compiled code launches itself in their place; 0 when it calls the operators."""
    where: str = ""
    """The subgraph it sits in, e.g. "true_graph_0 of cond"; empty in the graph itself."""
    calls: int = 1
    """How often the graph calls that subgraph; more than once where alike layers share one."""


@dataclass(frozen=True, slots=True)
class Unfused:
    """A module that looks like an MoE layer and runs none of our operators."""

    name: str
    kind: str
    """Its class."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of a drawn graph."""

    name: str
    label: str
    detail: str
    inputs: tuple[str, ...]
    layer: str
    """Its MoE layer, empty for a neighbour."""


@dataclass(frozen=True, slots=True)
class GraphView:
    """The MoE part of one graph, before and after the passes."""

    before: tuple[NodeView, ...]
    after: tuple[NodeView, ...]
    where: str = ""
    """The subgraph it is, empty for a graph that Dynamo traced."""
