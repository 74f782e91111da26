"""explain(): compile once for show, and report what the passes did."""

import itertools
import linecache
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from inductor_passes import _compat
from inductor_passes.naming import path_of
from inductor_passes.recorder import Recorder
from inductor_passes.records import Break, Unfused
from inductor_passes.report import Report
from inductor_passes.survey import Named, is_on_meta, modules_of, modules_running, moe_modules
from inductor_passes.text import unfused_lines


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Traces `fn(*args, **kwargs)` as `torch.compile` would, runs our passes and reports.

    The function runs once, on its ATen graph; no code is generated and no cache is read or written. What is compiled
    already stays valid, and Dynamo's counters are put back. A model on the meta device is not traced, and the report
    says so.

    Args:
        fn: a module or function, compiled or not.
        args, kwargs: its inputs. Mark a dimension dynamic to see the graph for dynamic shapes; call under
            `torch.no_grad()` to see the inference graph.

    Returns:
        A frozen `Report`; print it, or write it out with `.to_html(path)`.

    Raises:
        TypeError: `fn` cannot be called. And whatever `fn` raises.

    Example:
        >>> with torch.no_grad():
        ...     print(inductor_passes.explain(model, input_ids))
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r}: expected a function or a module")
    target = _compat.uncompiled(fn)
    modules = modules_of(target, args, kwargs)
    recorder = Recorder(modules)
    if is_on_meta(modules, args, kwargs):
        return _report(target, recorder, (), (_meta_remark(modules),), ())
    with _compat.preserved_dynamo_state():
        torch.compile(_fresh_code(_call), backend=recorder.backend)(target, args, kwargs)
        kept = _compat.graph_breaks()
    unfused = recorder.unfused()
    layers = {path_of(layer.name) for layer in recorder.layers} | {each.name for each in unfused}
    breaks = _breaks(kept, [(name, module) for name, module in modules if name in layers])
    return _report(target, recorder, breaks, _remarks(recorder, unfused), unfused)


def _call(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return target(*args, **kwargs)


def _remarks(recorder: Recorder, unfused: tuple[Unfused, ...]) -> tuple[str, ...]:
    """What the records mean, and what to do about it."""
    remarks = []
    stock = [each for each in unfused if each.size or not recorder.layers]
    unseen = [each for each in unfused if each not in stock]
    if stock:
        remarks.append(
            f"MoE modules that run none of our operators, so that nothing of them is fused: "
            f"{'; '.join(unfused_lines(stock))}. For a model of transformers call "
            f"layers.huggingface.patch(model), whose report says what it leaves and why"
        )
    if unseen:
        remarks.append(
            f"MoE modules that are in no graph: {'; '.join(unfused_lines(unseen))}. Behind a graph break Dynamo "
            f"runs what it compiled for another layer, or leaves code to Python"
        )
    if not unfused and not recorder.layers and not any(log.refused for log in recorder.logs):
        remarks.append(
            "no MoE operator was traced and no module looks like an MoE layer: nothing to do for us"
        )
    if recorder.training:
        remarks.append(
            "gradients are on, so this is the training graph, in which a layer is at most two operators, its halves. "
            "For the inference graph call explain under torch.no_grad()"
        )
    return tuple(remarks)


def _report(
    target: Any,
    recorder: Recorder,
    breaks: tuple[Break, ...],
    remarks: tuple[str, ...],
    unfused: tuple[Unfused, ...],
) -> Report:
    """Everything recorded."""
    lists = {
        name: tuple(each for log in recorder.logs for each in getattr(log, name))
        for name in ("raised", "fused", "captured", "refused", "lowered", "kept")
    }
    return Report(
        graph_breaks=breaks,
        capture_hazards=tuple(recorder.hazards),
        exchanges=tuple(recorder.exchanges),
        layers=recorder.layers,
        graphs=tuple(recorder.views),
        is_training=recorder.training,
        unfused=unfused,
        remarks=remarks,
        subject=_subject(target),
        **lists,
    )


def _subject(target: Any) -> str:
    """What to call what was explained."""
    return type(target).__name__ if isinstance(target, nn.Module) else getattr(target, "__qualname__", "")


def _meta_remark(modules: Named) -> str:
    seen = unfused_lines([Unfused(name, type(module).__name__) for name, module in moe_modules(modules)])
    found = f" MoE modules in it: {'; '.join(seen)}." if seen else ""
    return (
        "nothing was traced: the model or its input is on the meta device, where there is nothing to compute with."
        f"{found} Give it memory and weights first, as from_pretrained or model.to_empty(device=...) do"
    )


def _breaks(kept: Sequence[tuple[str, Sequence[Any]]], modules: Named) -> tuple[Break, ...]:
    """Each break once: Dynamo tells it for every frame that it ended, and some without a stack."""
    found: dict[tuple[str, str], Break] = {}
    for reason, stack in kept:
        headline, location = reason.strip().partition("\n")[0], _location(stack)
        if location or headline not in {told for told, _ in found}:
            found.setdefault(
                (headline, location), Break(reason, location, _source(stack), modules_running(stack, modules))
            )
    return tuple(found.values())


def _source(stack: Sequence[Any]) -> str:
    return linecache.getline(stack[-1].filename, stack[-1].lineno).strip() if stack else ""


def _location(stack: Sequence[Any]) -> str:
    if not stack:
        return ""
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _fresh_code(function: types.FunctionType) -> types.FunctionType:
    """A copy of `function` that Dynamo has never seen.

    Its caches hang on the code object, and what it remembers of shapes seen before on the code's name.
    """
    name = f"{function.__name__}_{next(_SERIAL)}"
    return types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)


_SERIAL = itertools.count()
