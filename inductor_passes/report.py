"""What `explain` returns."""

from dataclasses import dataclass
from pathlib import Path

import torch

from inductor_passes import html, text
from inductor_passes.base import Fusion, Refused
from inductor_passes.hazards import Hazard
from inductor_passes.records import Break, GraphView, LayerGraph, Unfused

__all__ = ["Break", "LayerGraph", "Report", "Unfused"]


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
    """Every graph Dynamo traced, each followed by its subgraphs."""
    is_training: bool
    unfused: tuple[Unfused, ...] = ()
    """MoE modules of the model that run none of our operators."""
    remarks: tuple[str, ...] = ()
    """What to know, and to do, in sentences."""

    def __str__(self) -> str:
        events = text.Events(self.fused, self.refused, self.lowered, self.kept)
        num_graphs = sum(not view.where for view in self.graphs)
        lines = [
            f"{text.headline(num_graphs, self.is_training, self.layers, events)} (torch {torch.__version__})",
            *(f"note: {remark}" for remark in self.remarks),
            *text.layer_lines(self.layers, events),
            *text.section("graph breaks", text.break_lines(self.graph_breaks)),
            *text.section(
                "capture hazards", text.hazard_lines(self.capture_hazards), len(self.capture_hazards)
            ),
        ]
        return "\n".join(lines)

    def to_html(self, path: str | Path) -> Path:
        """Writes a self-contained page with this report and the graphs drawn; returns where."""
        target = Path(path)
        target.write_text(html.page(str(self), self.graphs), encoding="utf-8")
        return target
