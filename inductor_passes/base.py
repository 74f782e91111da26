"""What a pass is and what it reports: the leaf of this package."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

LOGGER = logging.getLogger("inductor_passes")

LAYER_KEY = "moe_layer"
"""`node.meta[LAYER_KEY]` is the name of the MoE layer a node belongs to; rewrites carry it over."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """One rewrite that happened."""

    layer: str
    """Path of the module the layer came from, e.g. "model.layers.0.mlp", or "moe_0"."""
    kind: str
    """The operator that took over, e.g. "gather_gemm_act" or "fused_moe"."""
    nodes: tuple[str, ...]
    """Names of the graph nodes it replaced."""


@dataclass(frozen=True, slots=True)
class Refused:
    """One rewrite that could have happened and did not."""

    layer: str
    node: str
    reason: str


class Refusal(Exception):
    """Raised by a guard clause of a pass: the node it looked at, and why the rewrite is not right there."""

    def __init__(self, node: torch.fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclass(slots=True)
class PassLog:
    """Collects what the passes did to one graph."""

    layers: dict[str, None] = field(default_factory=dict)
    """Names of the layers in the graph."""
    raised: list[Fusion] = field(default_factory=list)
    """What of a model that knows nothing of us became our operators."""
    fused: list[Fusion] = field(default_factory=list)
    captured: list[Fusion] = field(default_factory=list)
    """Gates that went into the first product's kernel; each is of the kind of its formula."""
    refused: list[Refused] = field(default_factory=list)
    lowered: list[Fusion] = field(default_factory=list)
    """What a lowering wrote out, and as what."""
    kept: list[Refused] = field(default_factory=list)
    """What a lowering left as an operator call, and why."""
    untimed: list[Refused] = field(default_factory=list)
    """What was to be chosen by time and was not, and why: it is computed as without max-autotune."""

    def lift(self, kind: str, anchor: torch.fx.Node, nodes: Iterable[torch.fx.Node]) -> None:
        """Records that `nodes` of a model became our operators."""
        self.raised.append(
            _logged("raised", Fusion(layer_of(anchor), kind, tuple(node.name for node in nodes)))
        )

    def fuse(self, kind: str, anchor: torch.fx.Node, nodes: Iterable[torch.fx.Node]) -> None:
        """Records a fusion of `nodes`, whose last one is `anchor`."""
        self.fused.append(
            _logged("fused", Fusion(layer_of(anchor), kind, tuple(node.name for node in nodes)))
        )

    def capture(self, formula: str, anchor: torch.fx.Node, nodes: Iterable[torch.fx.Node]) -> None:
        """Records the gate that `nodes` computed."""
        kind = formula.replace("|", "; ")
        self.captured.append(
            _logged("captured", Fusion(layer_of(anchor), kind, tuple(node.name for node in nodes)))
        )

    def lower(self, kind: str, node: torch.fx.Node) -> None:
        """Records that a lowering wrote out `node`."""
        self.lowered.append(_logged("lowered", Fusion(layer_of(node), kind, (node.name,))))

    def undo(self, kind: str, anchor: torch.fx.Node) -> None:
        """Forgets the fusions of this kind in the anchor's layer: a later pass took them apart again."""
        self.fused[:] = [
            fusion for fusion in self.fused if (fusion.layer, fusion.kind) != (layer_of(anchor), kind)
        ]

    def refuse(self, refusal: Refusal, anchor: torch.fx.Node) -> None:
        """Records why nothing was fused at `anchor`."""
        self.refused.append(_logged("refused", Refused(layer_of(anchor), refusal.node.name, refusal.reason)))

    def keep(self, refusal: Refusal, anchor: torch.fx.Node) -> None:
        """Records why `anchor` stays an operator call."""
        self.kept.append(_logged("kept", Refused(layer_of(anchor), refusal.node.name, refusal.reason)))

    def leave_untimed(self, refusal: Refusal, anchor: torch.fx.Node) -> None:
        """Records why products of `anchor` were not timed."""
        self.untimed.append(
            _logged("not timed", Refused(layer_of(anchor), refusal.node.name, refusal.reason))
        )

    def counts(self) -> Counter[str]:
        """How often each kind of fusion happened."""
        return Counter(fusion.kind for fusion in self.fused)


_Record = TypeVar("_Record", Fusion, Refused)


def _logged(verb: str, record: _Record) -> _Record:
    LOGGER.debug("%s: %s", verb, record)
    return record


def layer_of(node: torch.fx.Node) -> str:
    """Name of the MoE layer `node` belongs to, "?" outside any."""
    return node.meta.get(LAYER_KEY, "?")


class MoEPass(Protocol):
    """One rewrite of a post-grad graph. Passes are stateless: the same instance serves every compile.

    `run` leaves a graph that passes `lint()`, gives every node it makes `meta["val"]`, and finds nothing to do
    when run again.
    """

    name: str
    """Short name, for logs."""
    requires: tuple[str, ...]
    """Operators of `torch.ops.moe` without any of which the pass has nothing to do."""
    inference_only: bool
    """Whether the rewrite hides an intermediate that a training graph saves for its backward."""

    def run(self, graph: torch.fx.Graph, log: PassLog) -> None:
        """Rewrites `graph` in place and records what it did and what it refused."""
        ...
