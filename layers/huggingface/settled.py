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

_NO_OPTIONS = frozenset(vars(nn.Module())) | {"layer_idx", "num_experts", "_is_hf_initialized"}
"""Plain attributes that say how or where a module runs, or what its weights say."""


@dataclass(frozen=True, slots=True)
class Inside:
    """What a module that our code does not call was.

    Attributes:
        path: where it is.
        kind: its class; a function stands for itself.
        names, values: plain attributes.
    """

    path: str
    kind: Any
    names: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """What was there when a module was tried.

    Attributes:
        names, values: plain attributes.
        inside: each module inside that our code does not call.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    inside: tuple[Inside, ...]


def settings_of(module: nn.Module, *inside: str) -> Settings:
    """Those of a module, and of what it has at these paths."""
    found = [(path, get(module, path)) for path in inside]
    return Settings(
        *_options(module), tuple([Inside(path, _kind(each), *_options(each)) for path, each in found])
    )


def has_changed(module: nn.Module, settings: Settings) -> bool:
    """Whether the module's own code may compute something else than it did then."""
    if tuple(map(module.__dict__.get, settings.names)) != settings.values:
        return True
    others = [each for each in settings.inside if _is_other(module, each)]
    return bool(others)


def _is_other(module: nn.Module, inside: Inside) -> bool:
    """Whether what is inside a module is something else by now, or is watched."""
    found = module._modules.get(inside.path)  # `nn.Module` itself takes a microsecond to find one
    found = _behind(module, inside.path) if found is None else found
    if (type(found) is not inside.kind and found is not inside.kind) or is_watched(found):
        return True
    return bool(inside.names) and tuple(map(found.__dict__.get, inside.names)) != inside.values


def expect_options(module: nn.Module, settings: Settings) -> None:
    """Raises ValueError where an option or a module inside has changed, and the module's own code cannot run.

    That is so where its experts are stacked.
    """
    for name, value in zip(settings.names, settings.values, strict=True):
        found = module.__dict__.get(name)
        if found != value:
            texts = name, describe(found), describe(value)
            value_error("{}={} was {} when experts were stacked: expected unpatch, then patch again", *texts)
    for each in settings.inside:
        if _is_other(module, each):
            value_error(
                "{} changed, or got hooks, after experts were stacked: expected unpatch, then patch",
                each.path,
            )


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


def _behind(module: Any, path: str) -> Any:
    """What a dotted name stands for, or None: a wrapper that has come since has no such attribute (PEFT's)."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def get(module: Any, path: str) -> Any:
    """What a dotted name stands for."""
    if "." not in path:
        return getattr(module, path)
    for name in path.split("."):
        module = getattr(module, name)
    return module


def below(module: nn.Module, *called: str) -> tuple[str, ...]:
    """Paths of all modules inside, but for those of these names and what is inside them."""
    names = [name for name, _ in module.named_modules() if name]
    return tuple([name for name in names if not any(f"{name}.".startswith(f"{each}.") for each in called)])


def _options(found: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    if not isinstance(found, nn.Module):
        return (), ()
    options = {name: value for name, value in vars(found).items() if _is_option(name, value)}
    return tuple(options), tuple(options.values())


def _is_option(name: str, value: Any) -> bool:
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return is_plain and not name.startswith("moe_ops") and name not in _NO_OPTIONS


def _kind(found: Any) -> Any:
    return type(found) if isinstance(found, nn.Module) else found
