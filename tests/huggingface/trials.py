"""What trials found, kept for all tests of a process: hundreds of tests patch models of the same few families.

`patch` keeps it for one model alone. A trial draws its numbers from generators of its own, so that of a module which is
alike in all that it may look at finds the same. Where anything else is there than what is told apart here, or modes are
on, a module is tried each time, as without this.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedConfig

from layers.huggingface import stacking, whole
from layers.huggingface.recognise import Recogniser

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_FEW = 64  # numbers of a tensor that are told: trials keep those of an activation
_FOUND: dict[Hashable, Any] = {}
_HELD: dict[tuple[int, ...], list[Any]] = {}
"""What keys name by its id, which nothing else may get."""


def share() -> None:
    """From now on no trial is run again."""
    stacking._found, whole._known = once(stacking._found), once(whole._known)  # type: ignore[assignment]
    of_model, shared = Recogniser._once, functools.cache(once)

    def of_process(self: Recogniser, recognise: Callable[[Any], Any], module: nn.Module) -> Any:
        return of_model(self, shared(recognise), module)

    Recogniser._once = of_process  # type: ignore[method-assign]


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is not run again for arguments that are alike."""

    def shared(*args: Any) -> Any:
        key = _key(function, args)
        if key is None:
            return function(*args)
        if key not in _FOUND:
            _FOUND[key] = function(*args)
        return _FOUND[key]

    return shared


def _key(function: Callable[..., Any], args: tuple[Any, ...]) -> Hashable | None:
    if torch._C._len_torch_dispatch_stack() or _get_current_function_mode_stack():
        return None
    try:
        return function, _thread(), _Teller().told(args)
    except TypeError:
        return None


def _thread() -> Hashable:
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return *modes, torch.get_default_dtype()


class _Teller:
    """What values are. Raises TypeError for those of which it does not know."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def told(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, _FUNCTIONS):
            return value
        if isinstance(value, slice):
            return slice, str(value)
        if id(value) in self.seen:
            return self.seen[id(value)]
        self.seen[id(value)] = len(self.seen)
        return type(value), self._inside(value)

    def _inside(self, value: Any) -> Hashable:
        if type(value) in (Tensor, nn.Parameter):
            return _tensor(value)
        if isinstance(value, dict):
            return tuple([(self.told(name), self.told(each)) for name, each in value.items()])
        if isinstance(value, (list, tuple)):
            return tuple(map(self.told, value))
        if isinstance(value, (set, frozenset)):
            return frozenset(map(self.told, value))
        if isinstance(value, MethodType):
            return value.__func__, self.told(value.__self__)
        if isinstance(value, (nn.Module, PreTrainedConfig)):
            return _code(type(value)), self.told(vars(value))
        if dataclasses.is_dataclass(value):
            return tuple([self.told(getattr(value, each.name)) for each in dataclasses.fields(value)])
        raise TypeError(type(value))


def _tensor(tensor: Tensor) -> Hashable:
    few = tuple(tensor.flatten().tolist()) if tensor.numel() <= _FEW and not tensor.is_meta else ()
    kind = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return *kind, tensor.is_inference(), few


def _code(kind: type) -> Hashable:
    """What a class and its bases are made of at the moment."""
    bases = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    # The one that is added is what copies look up.
    parts = [part for base in bases for name, part in vars(base).items() if name != "__slotnames__"]
    ids = tuple(map(id, parts))
    _HELD.setdefault(ids, parts)
    return ids
