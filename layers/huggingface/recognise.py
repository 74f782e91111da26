"""How routers are rebuilt, each kind of them tried once for a model."""

from collections.abc import Hashable

from torch import nn

from layers.huggingface import linear_router, router_kinds, trial
from layers.huggingface.routers import Known


class Recogniser:
    """Remembers what it tried: the layers of a model are mostly alike."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Known | None] = {}

    def known(self, router: nn.Module) -> Known | None:
        """How to rebuild this router on our operators, or None when it computes what they do not."""
        key = form(router)
        if key not in self._known:
            with trial.trial_mode():
                self._known[key] = linear_router.known(router) or router_kinds.known(router)
        return self._known[key]


def form(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same, whatever their weights: classes, options and shapes."""
    options = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | None) and name != "training"
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
