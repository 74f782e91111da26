"""The passes in order, as the one pass Inductor runs.

It sits in `post_grad_custom_pre_pass`: after AOTAutograd, before Inductor's own post-grad patterns, which on CUDA
rewrite the softmax of a router beyond recognition.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph

from inductor_passes import _compat, _compat_kernels, compile_log
from inductor_passes._compat_tracing import forget_real_tensors
from inductor_passes.base import LAYER_KEY, LOGGER, MoEPass, PassLog, Refused, layer_of
from inductor_passes.cache_key import own_key, pass_key, source_hash
from inductor_passes.collapse import CollapseMoE
from inductor_passes.fingerprint import NoFingerprint
from inductor_passes.fuse_combine import FuseGemmCombine
from inductor_passes.fuse_formula import FuseFormula
from inductor_passes.fuse_gather import FuseGatherGemmActivation
from inductor_passes.fuse_residual import FuseResidual
from inductor_passes.fuse_routing import FuseRoutingDispatch
from inductor_passes.graph_tools import drop_assertions, find, is_moe_op, is_training
from inductor_passes.lowerings import (
    ExpandFewSlots,
    ExpandOnCpu,
    ExpandPointwise,
    LaunchPrograms,
    MultiplyFewTokens,
    MultiplyHalves,
    PackageProducts,
    RouteInside,
    TimeProducts,
)
from inductor_passes.naming import LayerNames, write_callables
from inductor_passes.overlap import overlap_exchanges
from inductor_passes.raising import RaiseExperts, RaiseRouters
from inductor_passes.raising.unrouted import unrouted
from inductor_passes.returned_inputs import read_inputs_themselves
from inductor_passes.share_repeats import ShareRepeats
from inductor_passes.sharing import share_layers
from moe_ops import tuning_key

RAISES: tuple[MoEPass, ...] = (RaiseExperts(), RaiseRouters())
FUSIONS: tuple[MoEPass, ...] = (
    ShareRepeats(),
    FuseResidual(),
    FuseRoutingDispatch(),
    FuseFormula(),
    FuseGatherGemmActivation(),
    FuseGemmCombine(),
    CollapseMoE(),
)
LOWERINGS: tuple[MoEPass, ...] = (
    MultiplyHalves(),
    MultiplyFewTokens(),
    TimeProducts(),
    ExpandFewSlots(),
    ExpandOnCpu(),
    ExpandPointwise(),
    ShareRepeats("share_what_is_written_out"),
    RouteInside(),
    LaunchPrograms(),
    PackageProducts(),
)
PIPELINE: tuple[MoEPass, ...] = RAISES + FUSIONS + LOWERINGS

TRAINING_REASON = "training graph: the backward reads what a fusion would hide"

UserPass = Callable[..., None]


@dataclass(frozen=True, eq=False)
class MoEPasses(_compat.InferenceAwareGraphPass):
    """Our passes, then the user's: the one Inductor runs.

    Two that would do the same now are equal, so that layers compiled one by one share one compiled graph, and a copy
    of one is itself.
    """

    chained: tuple[UserPass, ...] | None = None
    """The user's passes; None for those that ours cover in the slot when a graph is compiled."""
    passes: tuple[MoEPass, ...] = PIPELINE

    def __post_init__(self) -> None:
        _compat.watch_slots()

    @classmethod
    def around(cls, slot: Any) -> "MoEPasses":
        """What to put in the slot so that what is in it now runs too: ours once, then the rest."""
        given = passes_in(slot)
        ours, chained = _split(given)
        return cls(chained, ours or PIPELINE)

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Rewrites a post-grad graph in place. Inductor says since torch 2.13 whether there is a backward to it."""
        passes, chained = self._settled()
        forget_real_tensors(graph)
        log = run_passes(graph, passes)
        compile_log.passes_ran(log, graph)
        is_inference = not is_training(graph) if is_inference is None else is_inference
        for user_pass in chained:
            _compat.call_with_is_inference(user_pass, graph, is_inference)
        if is_inference and log.layers:
            share_layers(graph)
        if log.layers:
            overlap_exchanges(graph)
        if log.raised or log.fused or log.lowered:
            _compat_kernels.want_together(graph)
        read_inputs_themselves(graph)
        write_callables(graph)

    def uuid(self) -> Any | None:
        """A key over the tuning table in use, and source and state of every pass; None (no caching) without one."""
        passes, chained = self._settled()
        try:
            keys = (tuple(map(pass_key, passes)), tuple(map(own_key, chained)))
        except NoFingerprint as reason:
            compile_log.key_asked(str(reason))
            return None
        compile_log.key_asked()
        return ("moe", source_hash(), tuning_key(), *keys)

    def _settled(self) -> tuple[tuple[MoEPass, ...], tuple[UserPass, ...]]:
        """Our passes and the user's, as things are now."""
        if self.chained is not None:
            return self.passes, self.chained
        passes = self.passes
        here, *covered = _compat.slot_and_covered(_compat.POST_GRAD_SLOT)
        if len(passes_in(here)) > 1 and _split(passes_in(here))[0]:
            return passes, ()  # of a sequence Inductor runs the others itself
        for slot in (here, *covered):
            ours, chained = _split(passes_in(slot))
            passes = _joined(ours, passes)
            if chained is not None:
                return passes, chained
        return passes, ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MoEPasses):
            return False
        (passes, chained), (their_passes, their_chained) = self._settled(), other._settled()
        alike = len(passes) == len(their_passes) and all(map(_are_alike, passes, their_passes))
        return alike and chained == their_chained

    def __hash__(self) -> int:
        return hash(MoEPasses)  # what makes two equal may change; there are never many

    def __deepcopy__(self, memo: object) -> "MoEPasses":
        return self  # a value; torch copies options


def passes_in(slot: Any) -> tuple[Any, ...]:
    """The passes in a slot: none, one, or (torch 2.13) several."""
    if slot is None:
        return ()
    return tuple(slot) if isinstance(slot, list | tuple) else (slot,)


def _split(given: tuple[Any, ...]) -> tuple[tuple[MoEPass, ...], tuple[UserPass, ...] | None]:
    """Our passes among those of a slot, and the user's; None for the user's where ours leave them open."""
    ours = [each for each in given if isinstance(each, MoEPasses)]
    passes: list[MoEPass] = []
    for each in (each for one in ours for each in one.passes):
        if not _is_among(each, passes):
            passes.append(each)
    theirs = ((each.chained or ()) if isinstance(each, MoEPasses) else (each,) for each in given)
    chained = [user_pass for some in theirs for user_pass in some]
    is_open = bool(ours) and len(ours) == len(given) and all(one.chained is None for one in ours)
    return tuple(passes), None if is_open else tuple(chained)


def _joined(covered: tuple[MoEPass, ...], passes: tuple[MoEPass, ...]) -> tuple[MoEPass, ...]:
    """Both, each once: in the order of `covered` where that has all, else what it has besides comes first."""
    if all(_is_among(each, covered) for each in passes):
        return covered
    return (*(each for each in covered if not _is_among(each, passes)), *passes)


def _is_among(graph_pass: MoEPass, passes: Iterable[MoEPass]) -> bool:
    return any(_are_alike(graph_pass, each) for each in passes)


def _are_alike(one: MoEPass, other: MoEPass) -> bool:
    """Whether two passes do the same: one object, or two of one class that hold the same."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one.__getstate__() == other.__getstate__())  # type: ignore[attr-defined]
    except (
        RuntimeError,
        ValueError,
        TypeError,
    ):  # they hold tensors or arrays, which have no one truth value
        return False


def run_passes(graph: Graph, passes: Iterable[MoEPass], log: PassLog | None = None) -> PassLog:
    """Runs `passes` in order over one graph; returns what they fused and refused."""
    log = log if log is not None else PassLog()
    passes = tuple(passes)
    drop_assertions(graph)
    LayerNames().write(graph)
    ours = (node for node in graph.nodes if LAYER_KEY in node.meta or is_moe_op(node))
    log.layers |= dict.fromkeys(map(layer_of, ours))
    training = is_training(graph)
    if training and any(each.inference_only for each in passes):
        _refuse_training(graph, log)
    for each in passes:
        if (not each.requires or find(graph, *each.requires)) and not (training and each.inference_only):
            each.run(graph, log)
    graph.lint()
    return log


def _refuse_training(graph: Graph, log: PassLog) -> None:
    """Tells which layers run as the halves that save least, and refuses what would be fused of the others."""
    halves = {layer_of(node): node for node in find(graph, "act_gemm_combine")}
    told = {each.layer for each in log.fused}
    for layer, node in halves.items():
        if layer not in told:
            log.fuse("act_gemm_combine", node, (node,))
    layers: dict[str, str] = {}
    for node in graph.nodes:
        if LAYER_KEY in node.meta and layer_of(node) not in halves:
            layers.setdefault(layer_of(node), node.name)
    for layer, node in layers.items():
        refused = Refused(layer, node, TRAINING_REASON)
        LOGGER.debug("refused: %s", refused)
        log.refused.append(refused)
    for refusal in unrouted(graph, [node for node in graph.nodes if LAYER_KEY in node.meta]):
        log.refuse(refusal, refusal.node)
