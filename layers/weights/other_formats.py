"""State dicts of experts that are stored in another format than a module's: numbers that its scales are not for.

`load_state_dict` casts what it copies, and with `strict=False` passes over what a module does not have.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def told(
    experts: nn.Module,
    beside: Iterable[str],
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
) -> Iterator[str]:
    """What of a state dict would be other numbers in `experts`, as errors of `load_state_dict`.

    Args:
        beside: names of scales and zero points, without which the weights of another format are other numbers.
        local_metadata: as modules get it; what is assigned brings its dtype.
    """
    for name in beside:
        if prefix + name in state_dict and name not in experts._parameters:
            yield f"{prefix}{name} is of weights that are stored otherwise: expected none, as in the module"
    if not local_metadata.get("assign_to_params_buffers", False):
        yield from _cast(experts, state_dict, prefix)


def _cast(experts: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Quantised weights, exponents or zero points that would be copied into ones of another dtype, or from such."""
    for name, parameter in experts.named_parameters(recurse=False):
        given, ours = state_dict.get(prefix + name), parameter.dtype
        if isinstance(given, Tensor) and given.dtype != ours and 1 in (given.dtype.itemsize, ours.itemsize):
            yield f"{prefix}{name} has dtype {given.dtype}: expected {ours}, that of the module"
