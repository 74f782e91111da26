"""What a rank holds for itself, which whoever makes replicas of a model alike has to leave as it is."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from layers._checks import expect_type
from layers.balancing import ExpertBalancing
from layers.expert_parameters import WHOLE_ON_RANKS
from layers.fused_moe import FusedMoE
from layers.lora import ExpertLora
from layers.routed_experts import KnownExperts, RoutedExpertsCapture

_OF_TOKENS = ExpertLora, KnownExperts, RoutedExpertsCapture, ExpertBalancing


def names_of_ranks_own(model: nn.Module) -> list[str]:
    """Names of parameters and buffers that differ between ranks: those that DistributedDataParallel must ignore.

    It broadcasts the first rank's buffers before each forward and would have all ranks run the experts that are there,
    and give their tokens the adapters and experts of its tokens, without an error.

    Returns:
        Names of all DTensors, and of parameters of layers with an `expert_map` or a `shard`; and of buffers that are in
        no state dict: of shared experts which of them are here, of any layer adapters of tokens, experts that are
        replayed, looked up or captured, load, numbers of real tokens.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> own = names_of_ranks_own(model)
        >>> DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        >>> replicated = DistributedDataParallel(model)
    """
    expect_type("model", model, nn.Module)
    distributed = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    parts = [name for prefix, module in model.named_modules() for name in _of_a_part(module, prefix)]
    unsaved = (name for prefix, module in _of_ranks(model) for name in _unsaved(module, prefix))
    return distributed + parts + list(dict.fromkeys(unsaved))


def _holds_a_part(module: nn.Module) -> bool:
    """Of its experts, or of each, as it was built; what a style has shared are DTensors."""
    if not isinstance(module, FusedMoE) or module.parallel is not None:
        return False
    return module.expert_map is not None or module.shard.size > 1


def _of_a_part(module: nn.Module, prefix: str) -> list[str]:
    if not _holds_a_part(module):
        return []
    own = [name for name, _ in module.named_parameters() if name not in WHOLE_ON_RANKS]
    return [f"{prefix}.{name}" if prefix else name for name in own]


def _of_ranks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What knows tokens of this rank, and experts that a style has shared over ranks: ours, and of patched models."""
    for name, module in model.named_modules():
        parallel = (
            module.parallel if isinstance(module, FusedMoE) else getattr(module, "moe_ops_parallel", None)
        )
        if parallel is not None or _holds_a_part(module) or isinstance(module, _OF_TOKENS):
            yield name, module


def _unsaved(module: nn.Module, prefix: str) -> list[str]:
    saved = module.state_dict()
    return [f"{prefix}.{name}" if prefix else name for name, _ in module.named_buffers() if name not in saved]
