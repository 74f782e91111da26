"""The forward of one module, replaced and brought back on the instance, under accelerate's hooks where it has some.

accelerate (`device_map`, offloading) gives a module a forward of its own, which moves inputs and weights and then
calls `_old_forward`. So that is what gets replaced there: weights still arrive before our code runs.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


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


def restore(module: nn.Module) -> None:
    """Undoes `replace`."""
    if _attribute(module) == "forward":
        vars(module).pop("forward", None)
    else:
        replace(module, type(module).forward)


def _attribute(module: nn.Module) -> str:
    return "_old_forward" if {"_hf_hook", "_old_forward"} <= vars(module).keys() else "forward"
