"""What a rank holds for itself, which whoever makes replicas of a model alike has to leave as it is."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from layers._checks import expect_type
from layers.fused_moe import FusedMoE


def names_of_ranks_own(model: nn.Module) -> list[str]:
    """Names of parameters and buffers that differ between ranks: those that DistributedDataParallel must ignore.

    It broadcasts the first rank's buffers and would have all ranks run the experts that are there, without an error.

    Returns:
        Names of all DTensors, and of the buffers of shared experts that are in no state dict: which experts are here,
        adapters of tokens, recorded load.

    Raises:
        TypeError: `model` is no module.

    Example:
        >>> own = names_of_ranks_own(model)
        >>> DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        >>> replicated = DistributedDataParallel(model)
    """
    expect_type("model", model, nn.Module)
    distributed = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    return distributed + [name for prefix, module in _shared(model) for name in _unsaved(module, prefix)]


def _shared(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Experts that a style has shared over ranks: ours, and those of patched models."""
    for name, module in model.named_modules():
        parallel = (
            module.parallel if isinstance(module, FusedMoE) else getattr(module, "moe_ops_parallel", None)
        )
        if parallel is not None:
            yield name, module


def _unsaved(module: nn.Module, prefix: str) -> list[str]:
    saved = module.state_dict()
    return [f"{prefix}.{name}" if prefix else name for name, _ in module.named_buffers() if name not in saved]
