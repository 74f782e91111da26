"""What `explain` returns."""

from dataclasses import dataclass
from pathlib import Path

from inductor_passes import html, text
from inductor_passes.base import Fusion, Refused
from inductor_passes.hazards import Hazard
from inductor_passes.records import Break, Entry, Exchange, GraphView, LayerGraph, Unfused
from inductor_passes.stories import Story, Told, entries_of

__all__ = ["Break", "Entry", "Exchange", "LayerGraph", "Report", "Unfused"]


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
    captured: tuple[Fusion, ...] = ()
    """Gates without a name that went into the first product's kernel; each is of the kind of its formula."""
    exchanges: tuple[Exchange, ...] = ()
    """Collectives of graphs with MoE layers: what runs between start and wait, or why nothing does."""
    subject: str = ""
    """What was explained: the class of a module, the name of a function."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Everything that the passes did and did not do."""
        lists = ("raised", "fused", "captured", "refused", "lowered", "kept")
        return tuple(entry for name in lists for entry in entries_of(name, getattr(self, name)))

    @property
    def stories(self) -> list[Story]:
        """The same by layer."""
        return self._told().stories()

    def _told(self) -> Told:
        return Told(
            self.subject,
            self.is_training,
            self.remarks,
            self.layers,
            self.unfused,
            self.entries,
            self.capture_hazards,
            self.graph_breaks,
            self.graphs,
            self.exchanges,
        )

    def __str__(self) -> str:
        return "\n".join(text.lines(self._told()))

    def to_html(self, path: str | Path) -> Path:
        """Writes a page with this report and the layers drawn, which loads nothing from elsewhere; returns where."""
        target = Path(path)
        target.write_text(html.page(self._told(), str(self)), encoding="utf-8")
        return target
