"""State dicts of patched experts: `load_state_dict` casts what it copies, and scales are for what was not cast.

A stock model of another format has other names, which `strict=False` passes over, or the same names in another dtype.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from layers.huggingface.quantised import SCALE, ZERO_POINT, names

_HOOK = "moe_ops_loading"


def watch(experts: nn.Module) -> None:
    """Lets `load_state_dict` refuse what would be other numbers."""
    if _HOOK not in vars(experts):
        setattr(experts, _HOOK, experts.register_load_state_dict_pre_hook(_expect_alike))


def forget(module: nn.Module) -> None:
    """Undoes `watch`."""
    if (handle := vars(module).pop(_HOOK, None)) is not None:
        handle.remove()


def _expect_alike(
    experts: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    *_, error_msgs = rest
    error_msgs.extend(_unread(experts, state_dict, prefix))
    if not metadata.get("assign_to_params_buffers", False):
        error_msgs.extend(_cast(experts, state_dict, prefix))


def _cast(experts: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, parameter in experts.named_parameters(recurse=False):
        given, ours = state_dict.get(prefix + name), parameter.dtype
        if isinstance(given, Tensor) and given.dtype != ours and 1 in (given.dtype.itemsize, ours.itemsize):
            yield f"{prefix}{name} has dtype {given.dtype}: expected {ours}, that of the module"


def _unread(experts: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name in [weight + beside for weight in names(experts) for beside in (SCALE, ZERO_POINT)]:
        if prefix + name in state_dict and name not in experts._parameters:
            yield f"{prefix}{name} is of weights that are stored otherwise: expected none, as in the module"
