"""The forward of one module, replaced and brought back on the instance, under accelerate's hooks where it has some.

accelerate (`device_map`, offloading) gives a module a forward of its own, which moves inputs and weights and then
calls `_old_forward`. So that is what gets replaced there: weights still arrive before our code runs.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from layers.huggingface._compat import REPLICATE, replicate


def current(module: nn.Module) -> Any:
    """The function that the instance runs instead of its class's forward, or None."""
    forward = vars(module).get(_attribute(module))
    return getattr(forward, "__func__", forward)


def is_replaced(module: nn.Module) -> bool:
    """Whether somebody gave this instance a forward that its class does not have."""
    return current(module) not in (None, type(module).forward)


def replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Gives this one module another forward; its weights, hooks and class stay.

    A bound method, because Dynamo then gives identical layers one graph. Unpickled, it resolves to the class's own
    forward.
    """
    setattr(module, _attribute(module), MethodType(forward, module))
    setattr(module, REPLICATE, MethodType(_replicate, module))


def restore(module: nn.Module) -> None:
    """Undoes `replace`."""
    if _attribute(module) == "forward":
        vars(module).pop("forward", None)
    else:
        vars(module)["_old_forward"] = MethodType(type(module).forward, module)
    vars(module).pop(REPLICATE, None)


def _replicate(self: nn.Module) -> nn.Module:
    """The module as `nn.DataParallel` copies it: its attributes are the original's, so they are bound to that one."""
    replica = replicate(self)
    for name, value in vars(replica).items():
        if isinstance(value, MethodType) and value.__self__ is self:
            vars(replica)[name] = MethodType(value.__func__, replica)
    return replica


_replicate.__name__ = REPLICATE  # by which a copy in another process finds the class's own


def _attribute(module: nn.Module) -> str:
    return "_old_forward" if {"_hf_hook", "_old_forward"} <= vars(module).keys() else "forward"
