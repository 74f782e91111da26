"""What a report is made of, and what its drawing shows: plain values, so that text and page need not know a report."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Break:
    """Where and why Dynamo split the graph."""

    reason: str
    location: str
    """"file:line in function", empty when Dynamo does not say."""
    source: str = ""
    """That line of the user's code."""
    layers: tuple[str, ...] = ()
    """MoE modules whose code the line is in, or was called from."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that a pass did to a layer, or did not do."""

    action: str
    """"raised", "fused", "captured", "refused", "lowered", "kept": the name of its list in a `PassLog`."""
    layer: str
    nodes: tuple[str, ...]
    """Those that were replaced, or the one that a refusal is about."""
    kind: str
    """What the nodes became; empty for a refusal."""
    reason: str
    """Why nothing was done; empty for what was."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run of one layer is estimated to take on a GPU, the one at hand or an H200."""

    kernels: int = 0
    """Launches. Of our operators as planned; elementwise operators that read one another count as one."""
    bytes: int = 0
    """Read and written: every tensor once for each kernel it is given to, weights of no more experts than slots."""
    flops: int = 0
    """Of matrix products, two per multiplication, as `torch.utils.flop_counter` counts them."""


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
    cost_before: Cost = Cost()
    """Of one call as traced."""
    cost_after: Cost = Cost()
    """Of one call after the fusions."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective, and what runs while it is on its way."""

    kind: str
    """The operator's name, such as "all_gather_into_tensor"."""
    module: str
    """Where it was traced."""
    during: tuple[str, ...]
    """Calls between its start and its wait, each with its module: "mm of mlp.shared_experts"."""
    reason: str
    """Why there are none; empty where there are some."""


@dataclass(frozen=True, slots=True)
class Unfused:
    """A module that looks like an MoE layer and runs none of our operators."""

    name: str
    kind: str
    """Its class."""
    size: LayerGraph | None = field(default=None, compare=False, repr=False)
    """Its operator calls, where it was traced."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of a drawn graph."""

    name: str
    label: str
    detail: str
    inputs: tuple[str, ...]
    layer: str
    """Its MoE layer, empty for a neighbour."""
    is_input: bool = False
    """Whether it is a weight or another input of the graph."""
    aliases: tuple[str, ...] = ()
    """Nodes that pick one of its outputs or view it, and are not drawn."""


@dataclass(frozen=True, slots=True)
class GraphView:
    """The MoE part of one graph, before and after the fusions: also of MoE modules that run no operator of ours."""

    before: tuple[NodeView, ...]
    after: tuple[NodeView, ...]
    where: str = ""
    """The subgraph it is, empty for a graph that Dynamo traced."""
    written: tuple[NodeView, ...] = ()
    """After what the lowerings wrote out as ATen or as Triton launches."""
