"""What `explain` returns."""

from dataclasses import dataclass
from pathlib import Path

import torch

from inductor_passes import html, text
from inductor_passes.base import Fusion, Refused
from inductor_passes.hazards import Hazard
from inductor_passes.records import Break, Entry, GraphView, LayerGraph, Unfused
from inductor_passes.stories import Story, Told, entries_of

__all__ = ["Break", "Entry", "LayerGraph", "Report", "Unfused"]


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
    raised: tuple[Fusion, ...] = ()
    """Plain PyTorch that became operators of ours."""
    subject: str = ""
    """What was explained: the class of a module, the name of a function."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Everything that the passes did and did not do."""
        lists = ("raised", "fused", "refused", "lowered", "kept")
        return tuple(entry for name in lists for entry in entries_of(name, getattr(self, name)))

    @property
    def stories(self) -> list[Story]:
        """The same by layer."""
        return self._told().stories()

    def _told(self) -> Told:
        return Told(
            self.layers,
            self.unfused,
            self.entries,
            self.capture_hazards,
            self.graph_breaks,
            self.graphs,
        )

    def headline(self) -> str:
        """How many graphs and layers there are, and what became of these."""
        num_graphs = sum(not view.where for view in self.graphs)
        return text.headline(num_graphs, self.is_training, self.stories)

    def __str__(self) -> str:
        told = self._told()
        stories, breaks, hazards = told.stories(), self.graph_breaks, self.capture_hazards
        lines = [
            f"{self.headline()} (torch {torch.__version__})",
            *text.saved_lines(stories),
            *(f"note: {remark}" for remark in self.remarks),
            *text.layer_lines(stories, told.outside()),
            *text.section("graph breaks", text.break_lines(breaks), len(breaks)),
            *text.section("capture hazards", text.hazard_lines(hazards), len(hazards)),
        ]
        return "\n".join(lines)

    def to_html(self, path: str | Path) -> Path:
        """Writes a page with this report and the layers drawn, which loads nothing from elsewhere; returns where."""
        target = Path(path)
        target.write_text(html.page(self), encoding="utf-8")
        return target
