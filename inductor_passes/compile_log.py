"""One line for every compile with our passes, at INFO: `TORCH_LOGS="inductor_passes"` shows it.

When a cache answers, no pass runs, and silence would look as if fusion had stopped. What does run is `uuid()`, when
Inductor asks for the key. So a compile is noted there and where the passes run, and told when Dynamo says it is over.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from inductor_passes import _compat
from inductor_passes.base import LOGGER, PassLog
from inductor_passes.text import name_ranges


@dataclass(slots=True)
class _Compile:
    hits_before: int = field(default_factory=_compat.cache_hits)
    graphs: list[PassLog] = field(default_factory=list)
    not_cached: str = ""


_RUNNING: dict[str, _Compile] = {}


def key_asked(not_cached: str = "") -> None:
    """Notes that Inductor asked for the key of a compile, and why there was none."""
    compiling = _running()
    if compiling is not None:
        compiling.not_cached = not_cached


def passes_ran(log: PassLog) -> None:
    """Notes what the passes did to a graph; outside a compile of Dynamo's it is told at once."""
    compiling = _running()
    if compiling is not None:
        compiling.graphs.append(log)
    else:
        LOGGER.info("%s", _told([log]))


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
            told = _told(compiling.graphs)
        elif _compat.cache_hits() > compiling.hits_before:
            told = "from cache, compiled before with the same passes"
        else:  # it failed
            continue
        reason = f"; not cached: {compiling.not_cached}" if compiling.not_cached else ""
        LOGGER.info("compile %s: %s%s", name, told, reason)


def _told(graphs: Sequence[PassLog]) -> str:
    names = [name for log in graphs for name in log.layers if name != "?"]
    if not names:
        outside = any(log.layers for log in graphs)
        return "MoE operators of no layer, as in a backward graph" if outside else "no MoE operator"
    last = Counter(kind for log in graphs for kind in {each.layer: each.kind for each in log.fused}.values())
    reasons = Counter(each.reason for log in graphs for each in log.refused)
    fused = ", ".join(f"{number} {kind}" for kind, number in last.items()) or "none fused"
    refused = "".join(f"; refused {number} times: {reason}" for reason, number in reasons.items())
    return f"{len(names)} MoE layer{'s'[: len(names) > 1]} ({name_ranges(names)}): {fused}{refused}"
