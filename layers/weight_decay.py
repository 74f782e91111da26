"""Which parameters decay."""

from typing import Any

from torch import nn

from layers._checks import expect_finite, expect_type


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: matrices decay, biases, norms and other vectors do not.

    The usual rule, `p.ndim >= 2`, takes the biases of experts for matrices: they are [E, 2I] and [E, H], one row
    per expert. What is called a bias is one, so names decide here: of our layers, of transformers' experts, and of
    whatever else the model is made of. Frozen parameters are in neither group.

    Args:
        model: any module.
        weight_decay: of the first group; the second has 0.

    Raises:
        TypeError, ValueError: `model` is no module, or `weight_decay` no finite number of at least 0.

    Example:
        >>> optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.1), lr=1e-4)
    """
    expect_type("model", model, nn.Module)
    expect_finite("weight_decay", weight_decay)
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay={weight_decay}: expected at least 0")
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decays = {name for name, parameter in trainable if parameter.ndim >= 2 and not _is_bias(name)}
    return [
        {"params": [p for name, p in trainable if name in decays], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in decays], "weight_decay": 0.0},
    ]


def _is_bias(name: str) -> bool:
    # Any part of the name: a parametrised bias is called `parametrizations.w2_bias.original`.
    return any(part.endswith("bias") for part in name.split("."))
