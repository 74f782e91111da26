"""`patch(model)`: find the MoE modules of a loaded model, change those we know, name the others."""

import copy
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedConfig

from layers.huggingface import experts, routers
from layers.huggingface.report import PatchReport

Left = list[tuple[str, str]]

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ROUTER_NAMES = ("gate", "router")
_BLOCK_SUFFIXES = ("MoE", "Moe", "MoA", "MoeBlock", "SparseMLP", "Experts")
_WHY_UNDECORATED = {
    "Llama4TextMoe": "llama4 scales the experts' input and runs every expert outside transformers' experts interface",
    "DbrxFFN": "dbrx stores its experts flat and runs them outside transformers' experts interface",
    "JetMoeMoE": "jetmoe adds one bias to all experts' output and runs them outside transformers' experts interface",
    "JetMoeMoA": "jetmoe's mixture of attention heads is not a mixture of feed-forward experts",
}


def patch(model: nn.Module) -> PatchReport:
    """See `layers.huggingface.patch`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: expected a torch.nn.Module")
    experts.register()
    left: Left = []
    patched_experts = _patch_experts(model, left)
    patched_routers = _patch_routers(model, patched_experts, left)
    left.extend(_undispatched_blocks(model))
    return PatchReport(patched_experts, patched_routers, tuple(left))


def _patch_experts(model: nn.Module, left: Left) -> tuple[str, ...]:
    found = {name: module for name, module in model.named_modules() if _is_dispatched(module)}
    refused = {name: why for name, module in found.items() if (why := _why_not_experts(module))}
    if refused:  # they read the same config, and our implementation is not for them
        others = f"shares its config with {next(iter(refused))}"
        left.extend((name, refused.get(name, others)) for name in found)
        return ()
    if found:
        _use_our_experts(model, list(found.values()))
    for module in found.values():
        experts.prepare(module)
    return tuple(found)


def _is_dispatched(module: nn.Module) -> bool:
    """Whether transformers' `use_experts_implementation` decorates the module's class."""
    return hasattr(type(module), "_apply_gate") and isinstance(getattr(module, "has_gate", None), bool)


def _why_not_experts(module: nn.Module) -> str | None:
    dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
    if unsupported := [dtype for dtype in dtypes if dtype not in _WEIGHT_DTYPES]:
        return (
            f"quantised experts ({unsupported[0]}): expected weights in float16, bfloat16, float32 or float64"
        )
    if "forward" in vars(module):
        return "its forward has been replaced on the instance"
    return None


def _use_our_experts(model: nn.Module, found: list[nn.Module]) -> None:
    """Sets the implementation on configs that belong to this model alone: config objects may be shared."""
    if all(_implementation(module) == experts.NAME for module in found):
        return
    _own_configs(model)
    for module in [model, *found]:
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._experts_implementation = experts.NAME


def _implementation(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _own_configs(model: nn.Module) -> None:
    memo: dict[int, object] = {}  # one copy per config object, whoever refers to it
    for module in model.modules():
        configs = {name: value for name, value in vars(module).items() if isinstance(value, PreTrainedConfig)}
        for name, config in configs.items():
            setattr(module, name, copy.deepcopy(config, memo))


def _patch_routers(model: nn.Module, patched_experts: tuple[str, ...], left: Left) -> tuple[str, ...]:
    patched = []
    for experts_name in patched_experts:
        block_name = experts_name.rpartition(".")[0]
        for name, router in _routers_of(model.get_submodule(block_name), block_name):
            why = _patch_router(router)
            if why is None:
                patched.append(name)
            else:
                left.append((name, why))
    return tuple(patched)


def _routers_of(block: nn.Module, block_name: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in block.named_children():
        if name in _ROUTER_NAMES:
            yield f"{block_name}.{name}".lstrip("."), child


def _patch_router(router: nn.Module) -> str | None:
    """Patches the router and returns None, or leaves it alone and returns why."""
    if routers.is_installed(router):
        return None
    kind = routers.known_kind(router)
    if kind is None:
        return f"{type(router).__name__} is not a router we know: it keeps its own code"
    if routers.is_replaced(router):
        return "its forward has been replaced on the instance"
    routers.install(router, kind)
    return None


def _undispatched_blocks(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The outermost MoE modules that transformers runs without its experts interface."""
    named = list(model.named_modules())
    dispatched = [name for name, module in named if _is_dispatched(module)]
    reported: list[str] = []
    for name, module in named:
        is_inside = any(name.startswith(f"{outer}.") for outer in [*reported, *dispatched])
        has_dispatched = any(name in (inner, "") or inner.startswith(f"{name}.") for inner in dispatched)
        if _looks_like_experts(module) and not is_inside and not has_dispatched:
            reported.append(name)
            yield name, _why_undecorated(module)


def _looks_like_experts(module: nn.Module) -> bool:
    children = dict(module.named_children())
    has_parts = "experts" in children and any(name in children for name in _ROUTER_NAMES)
    return has_parts or type(module).__name__.endswith(_BLOCK_SUFFIXES)


def _why_undecorated(module: nn.Module) -> str:
    name = type(module).__name__
    return _WHY_UNDECORATED.get(name, f"{name} does not use transformers' experts interface")
