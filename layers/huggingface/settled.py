"""Whether a module is still as `patch` found it.

What a module computes is found out once, by trying it. An option that somebody sets later (`router.top_k = 2`), and a
hook, a forward or a wrapper that a module inside gets which our code does not call (accelerate, FSDP2, PEFT), would
then be of no effect, in silence. So whoever runs in place of a module's own code asks here first, and leaves it to that
code where something has changed.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from moe_ops.errors import describe, value_error

_NO_OPTIONS = ("training", "layer_idx", "num_experts")
"""Plain attributes that say how or where a module runs, or what its weights say."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What was there when a module was tried.

    Attributes:
        names, values: plain attributes.
        inside: class of each module inside that our code does not call, by path; a function stands for itself.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    inside: tuple[tuple[str, Any], ...]


def settings_of(module: nn.Module, *inside: str) -> Settings:
    """Those of a module, and of what it has at these paths."""
    options = {name: value for name, value in vars(module).items() if _is_option(name, value)}
    kinds = tuple([(path, _kind(get(module, path))) for path in inside])
    return Settings(tuple(options), tuple(options.values()), kinds)


def has_changed(module: nn.Module, settings: Settings) -> bool:
    """Whether the module's own code may compute something else than it did then."""
    if tuple(map(module.__dict__.get, settings.names)) != settings.values:
        return True
    for path, kind in settings.inside:
        found = module._modules.get(path)  # `nn.Module` itself takes a microsecond to find one
        found = get(module, path) if found is None else found
        if (type(found) is not kind and found is not kind) or is_watched(found):
            return True
    return False


def expect_options(module: nn.Module, settings: Settings) -> None:
    """Raises ValueError where an option has changed, and the module's own code cannot run: its experts are stacked."""
    for name, value in zip(settings.names, settings.values, strict=True):
        found = module.__dict__.get(name)
        if found != value:
            texts = name, describe(found), describe(value)
            value_error("{}={} was {} when experts were stacked: expected unpatch, then patch again", *texts)


def is_watched(module: Any) -> bool:
    """Whether a call of the module would do more than its class says: it has hooks, or a forward of its own."""
    if not isinstance(module, nn.Module):
        return False
    return "forward" in module.__dict__ or has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module would run hooks."""
    if module._forward_pre_hooks or module._forward_hooks:
        return True
    return bool(module._backward_pre_hooks or module._backward_hooks)


def get(module: Any, path: str) -> Any:
    """What a dotted name stands for."""
    if "." not in path:
        return getattr(module, path)
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _is_option(name: str, value: Any) -> bool:
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return is_plain and not name.startswith(("_", "moe_ops")) and name not in _NO_OPTIONS


def _kind(found: Any) -> Any:
    return type(found) if isinstance(found, nn.Module) else found
