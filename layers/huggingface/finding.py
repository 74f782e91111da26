"""The MoE modules of a model: what `patch` can change, and what it must leave with the reason. Changes nothing.

Modules are known by what they are, not by where they sit: PEFT, `torch.compile`, FSDP and others put wrappers
between a block and its experts or its router, and these are looked through.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from layers.huggingface import forwards, quantised, routers
from layers.huggingface.blocks import FoundBlock
from layers.huggingface.experts import dispatches, implementation, is_dispatched
from layers.huggingface.recognise import Recogniser
from layers.huggingface.stacked import StackedExperts

Left = list[tuple[str, str]]

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ROUTER_NAMES = ("gate", "router")
_BLOCK_SUFFIXES = ("MoE", "Moe", "MoA", "MoeBlock", "SparseMLP", "Experts")
_WHY_NO_ROUTER = "no router called gate or router beside it: what routes to it keeps its own code"
_WHY_LOGITS = "it gives logits alone: its block makes weights of them, by its own code"
_WHY_OFFLOADED = "modules inside it are offloaded, and get their weights when they are called"
_WHY_UNDECORATED = {
    "JetMoeMoA": "jetmoe's mixture of attention heads is not a mixture of feed-forward experts",
    "Mxfp4GptOssMLP": "its experts lie as kernels of the hub want them: "
    "layers.huggingface.quantisation reads them as published",
    "DogeCDMoE": "doge's experts are single rows of two embeddings, retrieved by product keys",
}


@dataclass(frozen=True, slots=True)
class FoundRouter:
    """A router, how it is rebuilt, and the experts that it routes to."""

    module: nn.Module
    known: routers.Known
    experts: nn.Module


@dataclass(frozen=True, slots=True)
class Found:
    """By name: experts, routers and whole blocks to change; (name, reason) of every MoE module to leave."""

    experts: dict[str, nn.Module]
    routers: dict[str, FoundRouter]
    blocks: dict[str, FoundBlock]
    left: tuple[tuple[str, str], ...]


def find(model: nn.Module, recogniser: Recogniser) -> Found:
    """Looks at every module of the model."""
    modules = dict(model.named_modules())
    candidates = {name: each for name, each in modules.items() if _are_experts(each, recogniser)}
    left: Left = _refused_experts(candidates, recogniser)
    refused = {name for name, _ in left}
    experts = {name: module for name, module in candidates.items() if name not in refused}
    found = _find_routers(experts | _names_again(modules, experts), modules, left, recogniser)
    blocks: dict[str, FoundBlock] = {}
    for name in undispatched_blocks(modules, candidates):
        block = _known_block(modules[name], recogniser)
        if isinstance(block, FoundBlock):
            blocks[name] = block
        else:
            left.append((name, block))
    return Found(experts, found, blocks, tuple(dict.fromkeys(left)))


def _names_again(modules: dict[str, nn.Module], experts: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Experts that several blocks share, by the names that they have in all but the first."""
    own = {id(module) for module in experts.values()}
    names = {
        f"{path}.{name}".lstrip("."): module
        for path, parent in modules.items()
        for name, module in parent._modules.items()
        if module is not None and id(module) in own
    }
    return {name: module for name, module in names.items() if name not in modules}


def _are_experts(module: nn.Module, recogniser: Recogniser) -> bool:
    return (
        is_dispatched(module)
        or isinstance(module, StackedExperts)
        or recogniser.collection(module) is not None
    )


def _refused_experts(dispatched: dict[str, nn.Module], recogniser: Recogniser) -> Left:
    reasons = {
        name: why for name, module in dispatched.items() if (why := _why_not_experts(module, recogniser))
    }
    configs = {name: getattr(module, "config", None) for name, module in dispatched.items()}
    refused_by_config = {id(configs[name]): name for name in reversed(reasons) if configs[name] is not None}
    left: Left = []
    for name in dispatched:
        sharer = refused_by_config.get(id(configs[name]))
        if name in reasons:
            left.append((name, reasons[name]))
        elif sharer is not None:  # they read the same config, and our implementation is not for them
            left.append((name, f"shares its config with {sharer}"))
    return left


def _why_not_experts(module: nn.Module, recogniser: Recogniser) -> str | None:
    has_scales = is_dispatched(module) and quantised.has_scales(module)
    if why := quantised.why_not(module) if has_scales else _why_not_weights(module):
        return why
    if forwards.is_replaced(module) and not routers.is_installed(module):
        return "its forward has been replaced on the instance"
    if is_dispatched(module) and not dispatches(module):
        return f"{type(module).__name__} has a forward of its own around transformers' experts interface"
    if is_dispatched(module) and not isinstance(getattr(module, "config", None), PreTrainedConfig):
        return "it has no transformers config to name an experts implementation"
    if _runs_its_own_code(module) and not has_scales and not recogniser.is_of_interface(module):
        return f"{type(module).__name__}'s own code, which runs as 'eager', is not what transformers' interface runs"
    return None


def _runs_its_own_code(module: Any) -> bool:
    """Whether an experts module of transformers' interface does, and is not patched yet."""
    is_new = is_dispatched(module) and not hasattr(module, "moe_ops_options")
    return is_new and implementation(module.config) in (None, "eager")


def _why_not_weights(module: nn.Module) -> str | None:
    for parameter in module.parameters(recurse=False):
        if _is_foreign(parameter):
            return f"experts of type {type(parameter).__name__}: expected plain tensors, or DTensor shards of them"
        if parameter.dtype not in _WEIGHT_DTYPES:
            return f"quantised experts ({parameter.dtype}): expected weights in float16, bfloat16, float32 or float64"
    return None


def _is_foreign(parameter: Tensor) -> bool:
    """Whether the tensor has arithmetic of its own, as quantised ones do. FSDP2 unshards its DTensors in time."""
    if hasattr(parameter, "placements") or hasattr(parameter, "fake_mode"):
        return False
    own_classes = [base for base in type(parameter).__mro__ if base not in (*Tensor.__mro__, nn.Parameter)]
    return any(vars(base).keys() & {"__torch_dispatch__", "__torch_function__"} for base in own_classes)


def _find_routers(
    experts: dict[str, nn.Module], modules: dict[str, nn.Module], left: Left, recogniser: Recogniser
) -> dict[str, FoundRouter]:
    found: dict[str, FoundRouter] = {}
    for experts_name, module in experts.items():
        if hasattr(modules.get(experts_name.rpartition(".")[0]), "moe_ops_stacked"):
            continue  # a block that routes itself
        candidates = list(_routers_beside(experts_name, modules))
        if not candidates:
            left.append((experts_name, _WHY_NO_ROUTER))
        for name, router in candidates:
            known = _known_router(router, module, recogniser)
            if isinstance(known, FoundRouter):
                found[name] = known
            else:
                left.append((name, known))
    return found


def _known_router(router: nn.Module, experts: nn.Module, recogniser: Recogniser) -> FoundRouter | str:
    """How to rebuild the router, or why it is left alone."""
    if forwards.is_replaced(router) and not routers.is_installed(router):
        return "its forward has been replaced on the instance"
    if _is_offloaded_inside(router):
        return _WHY_OFFLOADED
    known = recogniser.known(router)
    if known is None and type(router) is nn.Linear:
        return _WHY_LOGITS
    if known is None:
        return f"{type(router).__name__} computes nothing that topk_routing does: it keeps its own code"
    return FoundRouter(router, known, experts)


def _routers_beside(experts_name: str, modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The routers of the nearest module around the experts that has any; a list of layers is too far."""
    block_name = experts_name
    while block_name:
        block_name = block_name.rpartition(".")[0]
        block = modules[block_name]
        if isinstance(block, nn.ModuleList):
            return
        if names := [name for name, _ in block.named_children() if name in _ROUTER_NAMES]:
            for name in names:
                full_name, router = f"{block_name}.{name}".lstrip("."), block.get_submodule(name)
                yield from list(_unwrapped(full_name, router)) or [(full_name, router)]
            return


def _unwrapped(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The routers inside a wrapper, or the module itself; PEFT may hold a trained copy beside the original."""
    if _is_of_a_model(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _unwrapped(f"{name}.{child_name}", child)


def _is_of_a_model(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("transformers.models.", "transformers_modules."))


def undispatched_blocks(modules: dict[str, nn.Module], dispatched: dict[str, nn.Module]) -> Iterator[str]:
    """The outermost MoE modules that transformers runs without its experts interface."""
    reported: list[str] = []
    dispatched = dispatched | _names_again(modules, dispatched)
    for name, module in modules.items():
        is_inside = any(_is_inside(name, outer) for outer in [*reported, *dispatched])
        has_dispatched = any(name in (inner, "") or inner.startswith(f"{name}.") for inner in dispatched)
        if _looks_like_experts(module) and not is_inside and not has_dispatched:
            reported.append(name)
            yield name


def _is_inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(f"{outer}."))


def _known_block(block: nn.Module, recogniser: Recogniser) -> FoundBlock | str:
    """How to rebuild the block, or why it is left alone."""
    if why := next(filter(None, map(_why_not_weights, block.modules())), None):
        return why
    if forwards.is_replaced(block) and not routers.is_installed(block):
        return "its forward has been replaced on the instance"
    if _is_offloaded_inside(block):
        return _WHY_OFFLOADED
    return recogniser.block(block) or _why_undecorated(block)


def _is_offloaded_inside(module: nn.Module) -> bool:
    """Whether a module inside gets its weights only while it is called, by a hook of accelerate."""
    inside = [each for each in module.modules() if each is not module and "_hf_hook" in vars(each)]
    return any(parameter.is_meta for each in inside for parameter in each.parameters(recurse=False))


def _looks_like_experts(module: nn.Module) -> bool:
    children = dict(module.named_children())
    has_parts = "experts" in children and any(name in children for name in _ROUTER_NAMES)
    name = type(module).__name__
    return has_parts or (name.endswith(_BLOCK_SUFFIXES) and not name.endswith("SharedExperts"))


def _why_undecorated(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(getattr(module, "experts", None), nn.ModuleList | nn.ModuleDict):
        return f"{name} calls experts one by one, each a module: stack_experts=True stacks those that it can"
    return _WHY_UNDECORATED.get(
        name, f"{name} runs outside transformers' experts interface, in a way of its own"
    )
