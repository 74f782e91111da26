"""Experts whose weights transformers keeps in float8, each block of them with a scale (`FineGrainedFP8Config`).

Stock transformers multiplies with them by kernels that it downloads, on a GPU. Our operators read the same parameters
as they are stored. What such experts are is read from their parameters and options; their class is of no interest.
"""

from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import gates
from moe_ops.arguments import FusedExperts
from moe_ops.errors import type_error
from moe_ops.quantise_rows import blocks_of
from moe_ops.scaled_experts import is_differentiated, run as run_scaled, run_around
from moe_ops.values import ScaledLinear

_SCALE = "_scale_inv"  # a factor, whatever its name says
_STORED = torch.float8_e4m3fn


def has_scales(experts: nn.Module) -> bool:
    """Whether there are scales beside the weights of an experts module."""
    return f"down_proj{_SCALE}" in experts._parameters


def why_not(experts: Any) -> str | None:
    """Why experts with scales cannot run on our operators, if they cannot."""
    for name in _names(experts):
        weight, scale = getattr(experts, name), getattr(experts, name + _SCALE)
        if weight.dtype != _STORED:
            return f"quantised experts ({weight.dtype}): expected weights in {_STORED} beside scales"
        rows, columns = _block(experts, weight, scale)
        blocks = weight.shape[0], blocks_of(weight.shape[1], rows), blocks_of(weight.shape[2], columns)
        if scale.shape != blocks:
            sizes = list(scale.shape), list(blocks)
            return "{}{} has shape {}: expected {}, a scale for each block".format(name, _SCALE, *sizes)
    if getattr(experts, "is_transposed", False):
        return "quantised experts whose weights are transposed: expected rows of output features"
    scheme = getattr(experts, "activation_scheme", "dynamic")
    return None if scheme == "dynamic" else f"activation_scheme={scheme!r} of its tokens: expected 'dynamic'"


def run(experts: Any, args: FusedExperts) -> Tensor:
    """The experts, for tokens, weights and routing in `args`.

    Tokens are quantised as stock's are, by blocks of as many columns, except where they have a gradient.
    """
    w13, w2 = (
        _linear(experts, name, each.weight, each.bias) for name, each in zip(_names(experts), args.experts)
    )
    rows = "exact" if is_differentiated(args.hidden_states) else "quantised"
    if args.activation:
        return run_scaled(args, w13, w2, rows)
    return run_around(gates.gate_of(experts), args, w13, w2, rows)


def _names(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", "down_proj"


def _linear(experts: Any, name: str, weight: Tensor, bias: Tensor | None) -> ScaledLinear:
    if weight.dtype != _STORED:  # stock multiplies with what is left, as if every scale were 1
        wanted = "expected {} beside its scales: was the model cast, by `to(dtype)` or `half()`?"
        type_error("{} has dtype {}: " + wanted, name, weight.dtype, _STORED)
    scale, parallel = getattr(experts, name + _SCALE), getattr(experts, "moe_ops_parallel", None)
    if parallel is not None:
        scale = parallel.local_part(scale, 3)
    rows, columns = _block(experts, weight, scale)
    scale = scale.float() if scale.dtype.itemsize == 1 else scale  # powers of two in 8 bits
    return ScaledLinear(weight, scale, bias, rows, columns)


def _block(experts: Any, weight: Tensor, scale: Tensor) -> tuple[int, int]:
    """Rows and columns that share a scale: those of the module where they fit, else what makes as many blocks.

    transformers has a scale for each matrix where no size is given, and two at least for gate and up.
    """
    (height, width), (below, beside) = weight.shape[1:], scale.shape[1:]
    rows, columns = getattr(experts, "block_size", None) or (height, width)
    if (blocks_of(height, rows), blocks_of(width, columns)) == (below, beside):
        return rows, columns
    return height // below, width // beside
