"""State dicts of patched experts: what would be other numbers in another format is an error of `load_state_dict`.

A stock model of another format has other names, which `strict=False` passes over, or the same names in another dtype.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from layers.huggingface.quantised import PARTS, names
from layers.weights import other_formats

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
    beside = [weight + each for weight in names(experts) for each in PARTS]
    error_msgs.extend(other_formats.told(experts, beside, state_dict, prefix, metadata))
