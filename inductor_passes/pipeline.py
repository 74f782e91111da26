"""The passes in order, as the one pass Inductor runs.

It sits in `post_grad_custom_pre_pass`: after AOTAutograd, before Inductor's own post-grad patterns, which on CUDA
rewrite the softmax of a router beyond recognition.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph

from inductor_passes import _compat
from inductor_passes.base import LOGGER, MoEPass, PassLog, Refused, layer_of
from inductor_passes.cache_key import source_hash
from inductor_passes.collapse import CollapseMoE
from inductor_passes.fuse_combine import FuseGemmCombine
from inductor_passes.fuse_gather import FuseGatherGemmActivation
from inductor_passes.fuse_routing import FuseRoutingDispatch
from inductor_passes.graph_tools import find, is_moe_op
from inductor_passes.lowerings import ExpandPointwise, LaunchPrograms
from inductor_passes.naming import name_layers

FUSIONS: tuple[MoEPass, ...] = (
    FuseRoutingDispatch(),
    FuseGatherGemmActivation(),
    FuseGemmCombine(),
    CollapseMoE(),
)
LOWERINGS: tuple[MoEPass, ...] = (ExpandPointwise(), LaunchPrograms())
PIPELINE: tuple[MoEPass, ...] = FUSIONS + LOWERINGS

TRAINING_REASON = "training graph: the backward reads what a fusion would hide"

UserPass = Callable[..., None]


@dataclass(frozen=True)
class MoEPasses(_compat.CustomGraphPass):
    """Our passes, then the passes the user had in the slot.

    Two of them with the same content are equal, so that layers compiled one by one share one compiled graph.
    """

    chained: tuple[UserPass, ...] = ()
    passes: tuple[MoEPass, ...] = PIPELINE

    def __call__(self, graph: Graph) -> None:
        """Rewrites a post-grad graph in place."""
        run_passes(graph, self.passes)
        for user_pass in self.chained:
            _compat.call_with_is_inference(user_pass, graph, not is_training(graph))

    def uuid(self) -> Any | None:
        """Hash of all our sources with the ids of chained passes; None (no caching) when one of those has none."""
        chained = [getattr(user_pass, "uuid", lambda: None)() for user_pass in self.chained]
        if any(key is None for key in chained):
            return None
        return ("moe", source_hash(), tuple(each.name for each in self.passes), tuple(map(repr, chained)))


def run_passes(graph: Graph, passes: Iterable[MoEPass], log: PassLog | None = None) -> PassLog:
    """Runs `passes` in order over one graph; returns what they fused and refused."""
    log = log if log is not None else PassLog()
    passes = tuple(passes)
    name_layers(graph)
    training = is_training(graph)
    if training and any(each.inference_only for each in passes):
        _refuse_training(graph, log)
    for each in passes:
        if find(graph, *each.requires) and not (training and each.inference_only):
            each.run(graph, log)
    graph.lint()
    return log


def is_training(graph: Graph) -> bool:
    """Whether AOTAutograd split this graph into forward and backward: it names their inputs so, and no others."""
    names = (node.name for node in graph.nodes if node.op == "placeholder")
    return any(name.startswith(("primals_", "tangents_")) for name in names)


def _refuse_training(graph: Graph, log: PassLog) -> None:
    layers: dict[str, str] = {}
    for node in graph.nodes:
        if is_moe_op(node):
            layers.setdefault(layer_of(node), node.name)
    for layer, node in layers.items():
        refused = Refused(layer, node, TRAINING_REASON)
        LOGGER.info("refused in %s: %s", layer, TRAINING_REASON)
        log.refused.append(refused)
