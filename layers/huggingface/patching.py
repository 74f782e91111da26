"""`patch(model)` and `unpatch(model)`: what they change, and how it comes back.

Everything that can fail happens before the first change. A change is an attribute: the implementation's name on a
config that belongs to this model alone, options on an experts module, a forward on a router.
"""

import copy

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from transformers import PreTrainedConfig

from layers._checks import expect_choice, expect_type
from layers.config import Emit, SaveForBackward
from layers.huggingface import blocks, experts, forwards, loading, routers, sharding, stacking, whole
from layers.huggingface.experts import is_dispatched
from layers.huggingface.finding import Found, find
from layers.huggingface.outside import Collection
from layers.huggingface.recognise import Recogniser
from layers.huggingface.report import PatchReport
from layers.huggingface.stacked import StackedExperts

_STOCK = "moe_ops_stock_implementation"


def patch(
    model: nn.Module,
    emit: Emit,
    save_for_backward: SaveForBackward,
    mesh: DeviceMesh | None,
    style: ParallelStyle | None,
    stack_experts: bool,
) -> PatchReport:
    """See `layers.huggingface.patch`."""
    _expect_module(model)
    expect_choice("emit", emit, Emit)
    if emit == "batch_invariant":  # of a model's attention and norms nothing could be promised
        raise ValueError("emit='batch_invariant': expected 'auto', 'stages' or 'fused' for a model")
    expect_choice("save_for_backward", save_for_backward, SaveForBackward)
    expect_type("stack_experts", stack_experts, bool)
    sharding.expect_mesh(model, mesh, style)
    experts.register()
    apart = stacking.stack(model) if stack_experts else {}
    stacking.resume(model)
    recogniser = Recogniser()
    found = find(model, recogniser)
    options = {
        name: experts.settle(module, emit, save_for_backward, recogniser.activation(module))
        for name, module in found.experts.items()
    }
    wholes = whole.find(model, found, options)
    _use_our_experts(model, found)
    for name, module in found.experts.items():
        module.moe_ops_options = options[name]  # type: ignore[assignment]  # a plain value
        if is_dispatched(module):
            forwards.replace(module, experts.forward)
            loading.watch(module)
        elif not isinstance(module, StackedExperts):
            forwards.replace(module, Collection.forward)
    for router in found.routers.values():
        routers.install(router.module, router.known, router.experts)
    for name, block in found.blocks.items():
        blocks.install(model.get_submodule(name), block, emit, save_for_backward)
    for name, parts in wholes.items():
        whole.install(model.get_submodule(name), parts)
    if mesh is not None:
        sharding.shard(model, found, mesh, style)
    computed = {name: each.activation for name, each in options.items() if each.activation}
    computed |= {name: router.known.routing.spec for name, router in found.routers.items()}
    computed |= (gates := stacking.gates(model))
    computed |= {name: block.activation for name, block in found.blocks.items()}
    computed |= {_router(name): block.routing.spec for name, block in found.blocks.items()}
    patched = *found.experts, *found.blocks
    routed = *found.routers, *gates, *map(_router, found.blocks)
    left = {name: apart.get(name, why) for name, why in found.left} | stacking.own_gates(model)
    return PatchReport(patched, routed, tuple(left.items()), tuple(computed.items()))


def _router(block: str) -> str:
    return f"{block}.router".lstrip(".")


def unpatch(model: nn.Module) -> None:
    """See `layers.huggingface.unpatch`."""
    _expect_module(model)
    if sharded := [name for name, module in model.named_modules() if hasattr(module, "moe_ops_parallel")]:
        raise ValueError(f"{sharded[0]} is sharded over a mesh: expected experts that are all here")
    if rounded := [name for name, module in model.named_modules() if hasattr(module, "moe_ops_format")]:
        raise ValueError(f"{rounded[0]} is quantised: expected weights as they were")
    stacking.expect_bare(model)
    for module in list(model.modules()):
        if _STOCK in vars(module):
            _config(module)._experts_implementation_internal = getattr(module, _STOCK)
            delattr(module, _STOCK)
        if vars(module).pop("moe_ops_options", None) is not None:
            forwards.restore(module)
            loading.forget(module)
        blocks.uninstall(module)
        whole.uninstall(module)
        stacking.unstack(module)
        module._modules.pop("moe_ops_lora", None)
        routers.uninstall(module)


def _expect_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: expected a torch.nn.Module")


def _config(module: nn.Module) -> PreTrainedConfig:
    return module.config  # type: ignore[return-value]


def _use_our_experts(model: nn.Module, found: Found) -> None:
    """Names our implementation on configs that belong to this model alone: config objects may be shared."""
    dispatched = [module for module in found.experts.values() if is_dispatched(module)]
    if any(_config(module)._experts_implementation != experts.NAME for module in dispatched):
        _own_configs(model)
    if dispatched:
        _remember_implementations(model)
    for module in dispatched:
        # As transformers does when an implementation is set: the property would set all sub-configs too.
        _config(module)._experts_implementation_internal = experts.NAME


def _remember_implementations(model: nn.Module) -> None:
    """What each config named before the first patch, on whatever module has one: modules are copied and pickled."""
    for module in model.modules():
        if isinstance(vars(module).get("config"), PreTrainedConfig) and _STOCK not in vars(module):
            setattr(module, _STOCK, _config(module)._experts_implementation)


def _own_configs(model: nn.Module) -> None:
    memo: dict[int, object] = {}  # one copy per config object, whoever refers to it
    copies = [
        (module, name, copy.deepcopy(config, memo))
        for module in model.modules()
        for name, config in vars(module).items()
        if isinstance(config, PreTrainedConfig)
    ]
    for module, name, config in copies:
        setattr(module, name, config)
