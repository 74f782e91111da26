"""What a call will run, seen from outside: its modules by name, those that are MoE layers, and what has no memory."""

import functools
import inspect
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from inductor_passes import _compat

_MOE_CLASS = re.compile(r"(MoE|Moe)(Block)?$|Experts$")


Named = Sequence[tuple[str, nn.Module]]


def modules_of(*values: Any) -> Named:
    """Every module in `values` by its dotted name: in modules, methods, closures, defaults, globals and arguments."""
    return [
        (re.sub(r"\b_orig_mod(\.|$)", "", name).strip("."), module)
        for root in _roots(values, set())
        for name, module in root.named_modules()
    ]


def _roots(values: Iterable[Any], seen: set[int]) -> Iterator[nn.Module]:
    for value in map(_compat.uncompiled, values):
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        else:
            yield from _roots(_held(value), seen)


def _held(value: Any) -> Iterable[Any]:
    """What a function, container or object leads to. Of globals and attributes only modules count, or it would be
    anything.
    """
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        return *cells, *(value.__defaults__ or ()), *(each for each in named if isinstance(each, nn.Module))
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, nn.Module)]


def moe_modules(modules: Named) -> Named:
    """Those that look like an MoE layer: they have `experts`, or are called so. Of nested ones the outermost counts."""
    found = [(name, module) for name, module in modules if _looks_like_moe(module)]
    inner = {id(below) for _, module in found for below in module.modules() if below is not module}
    return [(name, module) for name, module in found if id(module) not in inner]


def _looks_like_moe(module: nn.Module) -> bool:
    return "experts" in dict(module.named_children()) or bool(_MOE_CLASS.search(type(module).__name__))


def modules_running(stack: Sequence[Any], modules: Named) -> tuple[str, ...]:
    """Names of the `modules` in the code of which, or of a module inside, a frame of `stack` is.

    A stack names no module: those of one class are told together.
    """
    return tuple(
        name
        for name, module in modules
        if any(_holds(kind, frame) for kind in _own_classes(module) for frame in stack)
    )


def _own_classes(module: nn.Module) -> set[type[nn.Module]]:
    """The classes in it that are not torch's."""
    return {kind for kind in map(type, module.modules()) if not kind.__module__.startswith("torch.")}


def _holds(kind: type[nn.Module], frame: Any) -> bool:
    file, lines = _place(kind)
    return frame.filename == file and frame.lineno in lines


@functools.lru_cache(maxsize=256)
def _place(kind: type[nn.Module]) -> tuple[str, range]:
    try:
        lines, first = inspect.getsourcelines(kind)
        return inspect.getsourcefile(kind) or "", range(first, first + len(lines))
    except (OSError, TypeError):
        return "", range(0)


def is_on_meta(modules: Named, *values: Any) -> bool:
    """Whether nothing can be computed: every parameter, or something in `values`, is on the meta device."""
    parameters = [each for _, module in modules for each in module.parameters(recurse=False)]
    return (bool(parameters) and all(each.is_meta for each in parameters)) or any(
        tensor.is_meta for tensor in _tensors(values)
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)
