"""A module of transformers, tried out: the same code on small random weights, with every number in float64.

What a router or a gate computes is settled by running it, not by reading it. It runs on a CPU on tensors made for
that, so the model's own may be of any dtype, on any device, sharded, or not there yet. Casts to float32 that its code
asks for become casts to float64: two formulas that agree here are one formula, not two of similar rounding.
"""

import contextlib
import copy
import math
from collections import OrderedDict
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from layers.huggingface._compat import REPLICATE, RewriteCalls, real_tensors

_SAME: Mapping[int, int] = {}
_CONTAINERS = (MutableSequence, MutableMapping, MutableSet)

CLOSE = 1e-9
"""Relative, in float64: what a sum in another order may differ by, and no other formula."""


class _Doubled(RewriteCalls):
    """float64 wherever float32 is asked for."""

    def rewritten(self, value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def trial_mode() -> Iterator[None]:
    """Real tensors on a CPU, with gradients, whatever modes the caller is in."""
    with (
        real_tensors(),
        torch.inference_mode(False),
        torch.enable_grad(),
        _on_cpu(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        yield


def _on_cpu() -> AbstractContextManager[Any]:
    """Nothing where tensors are made there anyway, for every call would go through a mode."""
    device = torch.device("cpu")
    return contextlib.nullcontext() if torch.get_default_device() == device else device


def in_float64(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns where float32 is float64. Raises ValueError for whatever it raises."""
    try:
        with _Doubled():
            return function(*args)
    except Exception as error:
        raise ValueError(f"{function} cannot be tried: {error!r}") from error


def run(forward: Callable[..., Any], twin: nn.Module, *args: Any) -> Any:
    """What a forward returns in float64.

    Raises ValueError if it fails, or if it changes tensors or attributes of its module, as one does that counts.
    """
    before = _state(twin)
    returned = in_float64(forward, twin, *args)
    if _state(twin) != before:
        raise ValueError(f"{type(twin).__name__} changes its own tensors or attributes")
    return returned


def holds_whatever(others: Sequence[Tensor], holds: Callable[[], bool]) -> bool:
    """Whether something holds whatever is in tensors that it is not said to read: a mask, a count of steps."""
    before = [each.clone() for each in others]
    try:
        for value in (0.0, 1e6, -1e6) if others else ():
            for each in others:
                each.fill_(value)
            if not holds():
                return False
        return True
    finally:
        for each, values in zip(others, before, strict=True):
            each.copy_(values)


@contextlib.contextmanager
def scaled(weights: Sequence[Tensor], factor: float) -> Iterator[None]:
    """Weights times a power of two, so that they come back."""
    for each in weights:
        each.mul_(factor)
    yield
    for each in weights:
        each.div_(factor)


def _state(module: nn.Module) -> list[Any]:
    """Which tensors and attributes there are, and how often each tensor was changed."""
    return [_own_state(each) for each in module.modules()]


def _own_state(module: nn.Module) -> tuple[Any, ...]:
    own = own_attributes(module)
    loose = [value for _, value in own if isinstance(value, Tensor)]
    held = (*module._parameters.values(), *module._buffers.values(), *loose)
    versions = [(id(each), each._version) for each in held if each is not None]
    return versions, [(name, id(value), _inside(value)) for name, value in own]


def _inside(value: Any) -> list[int]:
    """What a container holds, in which some keep a loss or what they saw last."""
    if not isinstance(value, _CONTAINERS):
        return []
    return list(map(id, value.values() if isinstance(value, MutableMapping) else value))


def loose_tensors(module: nn.Module) -> list[Tensor]:
    """Tensors that are plain attributes, no parameters and no buffers."""
    values = (value for each in module.modules() for _, value in own_attributes(each))
    return [value for value in values if isinstance(value, Tensor)]


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Attributes that its class gave a module, and torch did not."""
    return [(name, value) for name, value in vars(module).items() if name not in _OF_MODULES]


_OF_MODULES = frozenset(vars(nn.Module()))


def skeleton(
    module: nn.Module, make: Callable[[str, Tensor], Tensor], sizes: Mapping[int, int] = _SAME, name: str = ""
) -> Any:
    """The module around other tensors: `make` gives one for each, by its name in the module and what it stands for.

    Attributes are shared, but for tensors and containers; hooks and forwards of the instance are left out: it runs the
    code of its class. Sizes of tensors, and numbers among the attributes and in configs, are replaced as `sizes` says.
    """
    twin = module.__class__.__new__(module.__class__)
    own = {key: value for key, value in vars(module).items() if key not in OF_INSTANCE}
    vars(twin).update(
        {
            key: make(name + key, _resized(value, sizes))
            if isinstance(value, Tensor)
            else _small(value, sizes)
            for key, value in own.items()
        }
    )
    for kind in _HOOKS & vars(module).keys():
        vars(twin)[kind] = OrderedDict()
    for kind in ("_parameters", "_buffers"):
        tensors = vars(module)[kind].items()
        vars(twin)[kind] = {
            key: each if each is None else make(name + key, _resized(each, sizes)) for key, each in tensors
        }
    vars(twin)["_modules"] = {
        key: child if child is None else skeleton(child, make, sizes, f"{name}{key}.")
        for key, child in module._modules.items()
    }
    return twin


def _small(value: Any, sizes: Mapping[int, int]) -> Any:
    if _is_size(value, sizes):
        return sizes[value]
    if isinstance(value, _CONTAINERS):  # a trial may put something into it
        return copy.copy(value)
    if not sizes or not isinstance(value, PreTrainedConfig):
        return value
    small = copy.copy(value)
    vars(small).update({key: sizes[each] for key, each in vars(value).items() if _is_size(each, sizes)})
    return small


def _is_size(value: object, sizes: Mapping[int, int]) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in sizes


def _resized(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    if not sizes:
        return tensor
    shape = [sizes.get(size, size) for size in tensor.shape]
    made = torch.empty(shape, dtype=tensor.dtype, device="meta")
    is_trained = tensor.is_floating_point()  # packed integers may be parameters
    return nn.Parameter(made, is_trained) if isinstance(tensor, nn.Parameter) else made


def smaller(module: nn.Module, num_experts: int, *kept: int) -> dict[int, int]:
    """Small sizes for those of a module, all divided by one number; that of its experts and others `kept` stay.

    So do sizes twice or half as large: experts may have as many features as there are experts (Qwen3-Next).
    """
    found = {size for each in module.parameters() for size in each.shape}
    numbers = {value for each in module.modules() for value in vars(each).values() if isinstance(value, int)}
    found |= {value for value in numbers if value * num_experts in found}
    found -= {1, *kept, *(size for size in found if size in (2 * num_experts, num_experts, num_experts / 2))}
    common, least = math.gcd(*found), min(found, default=1)
    divisors = (each for each in range(common, 1, -1) if common % each == 0 and least // each >= 4)
    divisor = next(divisors, 1)
    return {size: size // divisor for size in found}


OF_INSTANCE = ("forward", "_old_forward", "_hf_hook", REPLICATE)
"""Attributes that make an instance run other code than its class's."""
_HOOKS = {
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
}


def random_like(generator: torch.Generator, level: float = 0.0) -> Callable[[str, Tensor], Tensor]:
    """Makes float64 tensors for `skeleton`: biases around `level`, other vectors around one, so that scales scale."""

    def make(name: str, like: Tensor) -> Tensor:
        made = torch.randn(tuple(like.shape), generator=generator, dtype=torch.float64) / 4
        if like.dim() < 2 or "bias" in name:
            made = made + (level if "bias" in name else 1.0)
        return nn.Parameter(made) if isinstance(like, nn.Parameter) else made

    return make


def cast(module: nn.Module, dtype: torch.dtype) -> Any:
    """A skeleton around the same numbers in another dtype."""

    def make(name: str, like: Tensor) -> Tensor:
        return like.detach().to(dtype) if like.is_floating_point() else like

    return skeleton(module, make)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are equal but for the order of their sums."""
    if ours.shape != theirs.shape:
        return False
    ours, theirs = ours.double(), theirs.double()
    top = theirs.abs().amax(-1, keepdim=True) if theirs.dim() and theirs.numel() else theirs.abs()
    return bool(((ours - theirs).abs() <= CLOSE * top).all())
