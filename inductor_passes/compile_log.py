"""One line for every compile with our passes, at INFO: `TORCH_LOGS="inductor_passes"` shows it.

When a cache answers, no pass runs, and silence would look as if fusion had stopped. What does run is `uuid()`, when
Inductor asks for the key. So a compile is noted there and where the passes run, and told when Dynamo says it is over.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph

from inductor_passes import _compat
from inductor_passes.base import LOGGER, PassLog, Refused
from inductor_passes.hazards import Hazard, capture_hazards
from inductor_passes.ranges import count, name_ranges


@dataclass(slots=True)
class _Compile:
    hits_before: int = field(default_factory=_compat.cache_hits)
    graphs: list[PassLog] = field(default_factory=list)
    hazards: list[Hazard] = field(default_factory=list)
    not_cached: str = ""


_RUNNING: dict[str, _Compile] = {}


def key_asked(not_cached: str = "") -> None:
    """Notes that Inductor asked for the key of a compile, and why there was none."""
    compiling = _running()
    if compiling is not None:
        compiling.not_cached = not_cached


def passes_ran(log: PassLog, graph: Graph) -> None:
    """Notes what the passes did to a graph and left in it; outside a compile of Dynamo's it is told at once."""
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    compiling = _running() or _Compile()
    compiling.graphs.append(log)
    compiling.hazards += capture_hazards(graph)
    if _compat.compile_id() is None:
        LOGGER.info("%s", _told(compiling))


def layers_raised(log: PassLog) -> None:
    """Notes what was raised before autograd, of which the graphs behind it tell the rest."""
    compiling = _running()
    if compiling is not None:
        compiling.graphs.append(replace(log, layers={}))


def _running() -> _Compile | None:
    """The compile we are in, None outside one or when nobody listens."""
    name = _compat.compile_id()
    if name is None or not LOGGER.isEnabledFor(logging.INFO):
        return None
    _compat.call_when_compiled(_tell)
    return _RUNNING.setdefault(name, _Compile())


def _tell(_: object) -> None:
    while _RUNNING:
        name, compiling = _RUNNING.popitem()
        if compiling.graphs:
            told = _told(compiling)
        elif _compat.cache_hits() > compiling.hits_before:
            told = "from cache, compiled before with the same passes"
        else:  # it failed
            continue
        reason = f"; not cached: {compiling.not_cached}" if compiling.not_cached else ""
        LOGGER.info("compile %s: %s%s", name, told, reason)


def _told(compiling: _Compile) -> str:
    graphs = compiling.graphs
    raised = {each.layer for log in graphs for each in log.raised}
    told = [
        _layers_told(graphs),
        *([f"{len(raised)} raised from plain PyTorch"] if raised else []),
        *_reasons("refused", [each for log in graphs for each in log.refused]),
        *_reasons("kept as a call", [each for log in graphs for each in log.kept]),
        *_reasons("not timed", [each for log in graphs for each in log.untimed]),
        *_hazards(compiling.hazards),
    ]
    return "; ".join(told)


def _layers_told(graphs: Sequence[PassLog]) -> str:
    names = [name for log in graphs for name in log.layers if name != "?"]
    if not names:
        outside = any(log.layers for log in graphs)
        return "MoE operators of no layer, as in a backward graph" if outside else "no MoE operator"
    last = Counter(kind for log in graphs for kind in {each.layer: each.kind for each in log.fused}.values())
    fused = ", ".join(f"{number} {kind}" for kind, number in last.items()) or "none fused"
    return f"{count(len(names), 'MoE layer')} ({name_ranges(names)}): {fused}"


def _reasons(what: str, records: Sequence[Refused]) -> list[str]:
    times = Counter(each.reason for each in records if each.layer != "?")
    return [f"{what} {count(number, 'time')}: {reason}" for reason, number in times.items()]


def _hazards(hazards: Sequence[Hazard]) -> list[str]:
    times = Counter((each.target, each.reason) for each in hazards)
    return [
        f"{count(number, 'capture hazard')}: {target}: {reason}" for (target, reason), number in times.items()
    ]
