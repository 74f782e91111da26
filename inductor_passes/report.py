"""What `explain` returns."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from inductor_passes.base import Fusion, Refused
from inductor_passes.hazards import Hazard


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


@dataclass(frozen=True, slots=True)
class Report:
    """What `torch.compile` with our passes makes of a model, in words."""

    graph_breaks: tuple[Break, ...]
    fused: tuple[Fusion, ...]
    refused: tuple[Refused, ...]
    capture_hazards: tuple[Hazard, ...]
    layers: tuple[LayerGraph, ...]
    lowered: tuple[Fusion, ...]
    """Operators that were written out, as ATen or as Triton launches."""
    kept: tuple[Refused, ...]
    """Operators that stay calls, and why."""
    graphs: tuple[GraphView, ...]
    is_training: bool

    def __str__(self) -> str:
        mode = "training" if self.is_training else "inference"
        head = f"{len(self.graphs)} {mode} graph(s), {len(self.layers)} MoE layer(s)"
        sections = [
            _section("graph breaks", map(_break_line, self.graph_breaks)),
            _section("layers, operator calls before -> after", map(_layer_line, self.layers)),
            _section(
                "fused", [f"{each.layer}: {each.kind} <- {', '.join(each.nodes)}" for each in self.fused]
            ),
            _section("refused", [f"{each.layer}: {each.node}: {each.reason}" for each in self.refused]),
            _section(
                "written out", [f"{each.layer}: {each.nodes[0]} as {each.kind}" for each in self.lowered]
            ),
            _section("kept as calls", [f"{each.layer}: {each.node}: {each.reason}" for each in self.kept]),
            _section(
                "capture hazards",
                [f"{each.node} ({each.target}): {each.reason}" for each in self.capture_hazards],
            ),
        ]
        return "\n".join([head, *sections])

    def to_html(self, path: str | Path) -> Path:
        """Writes a self-contained page with this report and the graphs drawn; returns where."""
        from inductor_passes.html import page

        target = Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target


def _break_line(each: Break) -> str:
    headline = each.reason.strip().partition("\n")[0]
    return f"{headline} ({each.location})" if each.location else headline


def _layer_line(layer: LayerGraph) -> str:
    launches = f", {layer.launches} Triton launches" if layer.launches else ""
    return f"{layer.name}: {layer.before} -> {layer.after}{launches}"


def _section(title: str, lines: Iterable[str]) -> str:
    listed = list(lines)
    return "\n".join([f"{title}: {len(listed) or 'none'}", *(f"  {line}" for line in listed)])
