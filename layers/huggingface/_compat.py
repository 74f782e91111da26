"""Modes and replicas of torch, which are private in 2.11 to 2.14: the one file here that knows them."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class RewriteCalls(TorchDispatchMode):
    """Runs every operator with other named arguments, among which are the dtypes that it is asked for."""

    def rewritten(self, value: Any) -> Any:
        """What stands for a named argument."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: self.rewritten(value) for name, value in (kwargs or {}).items()})


REPLICATE = "_replicate_for_data_parallel"
"""Name of the method that `nn.DataParallel` calls for each module."""


def replicate(module: nn.Module) -> nn.Module:
    """What that method of the module's class returns."""
    return getattr(type(module), REPLICATE)(module)


def real_tensors() -> AbstractContextManager[Any]:
    """No fake tensors and no other modes, whatever the caller is in."""
    return _disable_current_modes()
