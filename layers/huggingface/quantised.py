"""Experts whose weights transformers keeps in float8, each block of them with a scale (`FineGrainedFP8Config`).

Or in MXFP4, as DeepSeek-V4 is published: two numbers in a torch.int8, beside exponents (`expert_dtype="fp4"`). Stock
transformers multiplies with them by kernels that it downloads, on a GPU. Our operators read the same parameters
as they are stored. What such experts are is read from their parameters and options; their class is of no interest.
Experts that we quantised are like them, and say how.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layers.huggingface import gates
from layers.lora import ExpertLora, Product
from layers.weights.expert_loader import part_here
from layers.weights.scales import Blocks
from moe_ops.arguments import FusedExperts
from moe_ops.errors import type_error
from moe_ops.pairs import GROUP, PAIRS, numbers_in
from moe_ops.quantise_rows import blocks_of
from moe_ops.scaled_experts import (
    RowKind,
    Rows,
    is_differentiated,
    products as scaled_products,
    run as run_scaled,
    run_around,
)
from moe_ops.types import InputScales
from moe_ops.values import ScaledLinear

SCALE = "_scale_inv"  # a factor, whatever its name says
ZERO_POINT = "_zero_point"
GLOBAL_SCALE = "_global_scale"
INPUT_SCALE = "_activation_scale"
PARTS = (SCALE, ZERO_POINT, GLOBAL_SCALE)
"""What weights may have beside them, by the ends of its names."""
_STORED, _FP4 = torch.float8_e4m3fn, torch.int8
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_OF_FP4 = (1, GROUP)


@dataclass(frozen=True, slots=True)
class Format:
    """How an experts module was quantised, as its attribute `moe_ops_format`."""

    rows: RowKind
    blocks: Blocks
    scale: torch.dtype


def has_scales(experts: nn.Module) -> bool:
    """Whether there are scales beside the weights of an experts module."""
    return f"down_proj{SCALE}" in experts._parameters


def why_not(experts: Any) -> str | None:
    """Why experts with scales cannot run on our operators, if they cannot."""
    if hasattr(experts, "moe_ops_format"):
        return None
    if why := next(filter(None, (_why_not_stored(experts, name) for name in names(experts))), None):
        return why
    if getattr(experts, "is_transposed", False):
        return "quantised experts whose weights are transposed: expected rows of output features"
    scheme = _scheme(experts)
    if scheme not in ("dynamic", "static"):
        return f"activation_scheme={scheme!r} of its tokens: expected 'dynamic' or 'static'"
    return None


def _why_not_stored(experts: Any, name: str) -> str | None:
    weight, scale = getattr(experts, name), getattr(experts, name + SCALE)
    if weight.dtype != (_FP4 if _are_fp4(experts) else _STORED):
        wanted = f"weights in {_STORED} beside scales, or in 4 bits both, in {_FP4}"
        return f"quantised experts ({weight.dtype}): expected {wanted}"
    if _are_fp4(experts) and scale.dtype not in _EXPONENTS:
        return f"weights of 4 bits with scales in {scale.dtype}: expected exponents, in {_EXPONENTS[1]}"
    rows, columns = _block(experts, weight, scale)
    width = weight.shape[2] * numbers_in_each(experts)
    blocks = weight.shape[0], blocks_of(weight.shape[1], rows), blocks_of(width, columns)
    if scale.shape != blocks:
        sizes = list(scale.shape), list(blocks)
        return "{}{} has shape {}: expected {}, a scale for each block".format(name, SCALE, *sizes)
    return None


def run(experts: Any, args: FusedExperts) -> Tensor:
    """The experts, for tokens, weights and routing in `args`.

    Tokens are quantised as stock's are, by blocks of as many columns or with the scales of a checkpoint, the largest of
    all experts'; but not where they or the first bias have a gradient, nor beside weights of 4 bits.
    """
    linears, rows = _linears(experts, args), _rows(experts, args)
    if args.activation:
        return run_scaled(args, *linears, rows)
    return run_around(gates.gate_of(experts), args, *linears, rows)


def products(experts: Any, args: FusedExperts, lora: ExpertLora) -> tuple[Product, Product] | None:
    """Those that adapters change; None where weights are not quantised."""
    if not has_scales(experts):
        return None
    return scaled_products(*_linears(experts, args), _rows(experts, args, *lora.parameters()))


def _linears(experts: Any, args: FusedExperts) -> tuple[ScaledLinear, ScaledLinear]:
    linear = _made if hasattr(experts, "moe_ops_format") else _linear
    w13, w2 = (
        linear(experts, name, each.weight, each.bias) for name, each in zip(names(experts), args.experts)
    )
    return w13, w2


def _rows(experts: Any, args: FusedExperts, *adapters: Tensor) -> Rows:
    """What is multiplied: exact rows where what comes into them has a gradient."""
    made: Format | None = getattr(experts, "moe_ops_format", None)
    before = args.hidden_states, args.experts.w13.bias, *adapters
    if _are_fp4(experts) or any(is_differentiated(each) for each in before if each is not None):
        return "exact"
    if made is not None:
        return made.rows
    if _scheme(experts) == "static":
        return InputScales(*(getattr(experts, name + INPUT_SCALE) for name in names(experts)))
    return "quantised"


def _scheme(experts: Any) -> str:
    """Where scales of tokens come from."""
    return getattr(experts, "activation_scheme", "dynamic")


def blocks(experts: Any) -> Blocks:
    """Of experts with scales."""
    made: Format | None = getattr(experts, "moe_ops_format", None)
    if made is not None:
        return made.blocks
    w13, w2 = (
        _block(experts, _on_this_rank(experts, name), _scale(experts, name)) for name in names(experts)
    )
    return w13, w2


def numbers_in_each(experts: Any) -> int:
    """How many numbers an element of a weight holds."""
    return 2 if _are_fp4(experts) else numbers_in(experts.down_proj.dtype)


def _are_fp4(experts: Any) -> bool:
    return experts.down_proj.dtype == _FP4 and not hasattr(experts, "moe_ops_format")


def names(experts: Any) -> tuple[str, str]:
    """Of its weights."""
    return "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj", "down_proj"


def _linear(experts: Any, name: str, weight: Tensor, bias: Tensor | None) -> ScaledLinear:
    scale = _scale(experts, name)
    if _are_fp4(experts):
        if scale.dtype not in _EXPONENTS:
            _expect_uncast(name + SCALE, scale, _EXPONENTS[1])
        return ScaledLinear(weight.view(PAIRS), scale.view(PAIRS), bias, *_OF_FP4)
    _expect_uncast(name, weight, _STORED)  # stock multiplies with what is left, as if every scale were 1
    rows, columns = _block(experts, weight, scale)
    scale = scale.float() if scale.dtype.itemsize == 1 else scale  # powers of two in 8 bits
    return ScaledLinear(weight, scale, bias, rows, columns)


def _made(experts: Any, name: str, weight: Tensor, bias: Tensor | None) -> ScaledLinear:
    made, scale = experts.moe_ops_format, _scale(experts, name)
    _expect_uncast(name + SCALE, scale, made.scale)  # casts leave integers, but not their scales
    of_w13, of_w2 = made.blocks
    zero, global_scale = (
        _on_this_rank(experts, name + part) if name + part in experts._parameters else None
        for part in (ZERO_POINT, GLOBAL_SCALE)
    )
    block = _fitting(of_w2 if name == "down_proj" else of_w13, weight, scale)
    return ScaledLinear(weight, scale, bias, *block, zero, global_scale)


def _scale(experts: Any, name: str) -> Tensor:
    return _on_this_rank(experts, name + SCALE)


def _on_this_rank(experts: Any, name: str) -> Tensor:
    found, parallel = getattr(experts, name), getattr(experts, "moe_ops_parallel", None)
    return found if parallel is None else part_here(found, 3)


def _expect_uncast(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        wanted = "expected {} of quantised experts: was the model cast, by `to(dtype)` or `half()`?"
        type_error("{} has dtype {}: " + wanted, name, tensor.dtype, dtype)


def _block(experts: Any, weight: Tensor, scale: Tensor) -> tuple[int, int]:
    """Rows and columns that share a scale.

    transformers has a scale for each matrix where no size is given, and two at least for gate and up.
    """
    if _are_fp4(experts):
        return _OF_FP4
    height, width = weight.shape[1:]
    return _fitting(getattr(experts, "block_size", None) or (height, width), weight, scale)


def _fitting(block: tuple[int, int], weight: Tensor, scale: Tensor) -> tuple[int, int]:
    """A block if it fits, else what makes as many: a part of gate rows whose scale is that of all is smaller."""
    height, width = weight.shape[1], weight.shape[2] * numbers_in(weight.dtype)
    (rows, columns), (below, beside) = block, scale.shape[1:]
    if (blocks_of(height, rows), blocks_of(width, columns)) == (below, beside):
        return rows, columns
    return height // below, width // beside
