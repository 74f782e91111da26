"""How modules are rebuilt, each kind of them tried once for a model."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from layers.huggingface import blocks, linear_router, outside, router_kinds, trial
from layers.huggingface.blocks import FoundBlock
from layers.huggingface.experts import settled_activation
from layers.huggingface.routers import Known


class Recogniser:
    """Remembers what it tried: the layers of a model are mostly alike."""

    def __init__(self) -> None:
        self._tried: dict[Hashable, Any] = {}

    def known(self, router: nn.Module) -> Known | None:
        """How to rebuild this router on our operators, or None when it computes what they do not."""
        return self._once(_known_router, router)

    def collection(self, experts: nn.Module) -> str | None:
        """The activation of experts outside transformers' interface that might be in it, or None."""
        return (
            self._once(outside.collection_activation, experts)
            if outside.Collection.is_kind(experts)
            else None
        )

    def activation(self, experts: nn.Module) -> str | None:
        """The spec of the experts' activation, or None when only the module itself can compute it."""
        return self._once(settled_activation, experts)

    def is_of_interface(self, experts: nn.Module) -> bool:
        """Whether experts of transformers' interface compute by themselves what the interface does."""
        return self._once(outside.is_of_interface, experts)

    def block(self, module: nn.Module) -> FoundBlock | None:
        """How to rebuild this block, or None."""
        return self._once(blocks.known_block, module)

    def _once(self, recognise: Callable[[Any], Any], module: nn.Module) -> Any:
        key = recognise, form(module)
        if key not in self._tried:
            self._tried[key] = recognise(module)
        return self._tried[key]


def _known_router(router: nn.Module) -> Known | None:
    with trial.trial_mode():
        return linear_router.known(router) or router_kinds.known(router)


def form(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same, whatever their weights: classes, options and shapes."""
    options = {
        name: _option(value)
        for name, value in trial.own_attributes(module)
        if name not in trial.OF_INSTANCE and not name.startswith("moe_ops")
    }
    tensors = [
        (name, tuple(each.shape)) for name, each in (*module.named_parameters(), *module.named_buffers())
    ]
    children = tuple((name, form(child)) for name, child in module.named_children())
    return (
        type(module),
        type(module).forward,
        tuple(sorted(options.items(), key=str)),
        tuple(tensors),
        children,
    )


def _option(value: Any) -> Hashable:
    """What an attribute says; of anything but plain values which object it is: a function, a config, a tensor."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_option, value))
    return type(value), id(value)
