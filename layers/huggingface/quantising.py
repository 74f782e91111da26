"""`quantise_experts(model)`: the experts of a patched model in 8 or 4 bits, as `quantised` finds them.

Everything that can fail happens before the first change, but for memory. Weights lie as [E, B, A] afterwards, whatever
the checkpoint's order was: of numbers of 4 bits two columns are in a byte.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from layers._checks import expect_choice, expect_type
from layers.huggingface import experts, quantised
from layers.huggingface.experts import is_dispatched
from layers.huggingface.quantised import PARTS, SCALE, Format
from layers.huggingface.settled import settings_of
from layers.weights.scales import WeightScale, blocks_of_kind, expect_even, expect_format, expect_zero_points
from moe_ops.scaled_experts import RowKind, rows_for
from moe_ops.types import ScaledWeight
from moe_ops.weight_formats import IN_4_BITS, quantised_weight


def quantise_experts(
    model: nn.Module,
    kind: WeightScale,
    block: tuple[int, int],
    dtype: torch.dtype,
    rows: RowKind | None,
    zero_points: bool,
) -> tuple[str, ...]:
    """See `layers.huggingface.quantise_experts`."""
    expect_type("model", model, nn.Module)
    rows = expect_quantisation(kind, block, dtype, rows, zero_points)
    found: dict[str, Any] = {n: m for n, m in model.named_modules() if "moe_ops_options" in vars(m)}
    if not found:
        raise ValueError("model has no patched experts: expected some, by layers.huggingface.patch")
    for name, module in found.items():
        _expect_plain(name, module)
    blocks = {name: blocks_of(module, kind, block, dtype) for name, module in found.items()}
    for name, module in found.items():
        with torch.inference_mode(False):  # gradients go through to tokens
            _quantise(module, rows, blocks[name], dtype, zero_points)
    return tuple(found)


def expect_quantisation(
    kind: WeightScale, block: tuple[int, int], dtype: torch.dtype, rows: RowKind | None, zero_points: bool
) -> RowKind:
    """What tokens are, where `rows` may leave it open. Raises TypeError, ValueError for what does not go together."""
    expect_type("kind", kind, WeightScale)
    rows = rows_for(dtype) if rows is None else rows
    expect_choice("rows", rows, RowKind)
    expect_format(kind, block, dtype, rows)
    expect_zero_points(zero_points, dtype)
    return rows


def _expect_plain(name: str, module: Any) -> None:
    if not is_dispatched(module):
        raise ValueError(
            f"{name} is a {type(module).__name__}: expected experts that transformers dispatches"
        )
    for attribute, what in (("moe_ops_parallel", "sharded"), ("moe_ops_lora", "adapted")):
        if hasattr(module, attribute):
            raise ValueError(f"{name} is {what}: expected experts that are quantised first")
    if quantised.has_scales(module):
        raise ValueError(f"{name} has quantised weights: expected weights of 16 bits and more")
    for weight in quantised.names(module):
        parameter = module._parameters.get(weight)
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            raise ValueError(
                f"{name}.{weight} is sharded, offloaded or parametrised: expected a plain parameter"
            )


def blocks_of(module: Any, kind: WeightScale, block: tuple[int, int], dtype: torch.dtype) -> quantised.Blocks:
    """Rows and columns that share a scale, of both weights of an experts module."""
    w13, w2 = (each.weight for each in experts.weights(module))
    sizes = w13.shape[1], w2.shape[1], w2.shape[2]
    if dtype in IN_4_BITS:
        expect_even(*sizes[1:])
    return blocks_of_kind(kind, block, sizes, not getattr(module, "is_concatenated", True))


@torch.no_grad()
def _quantise(
    module: Any, rows: RowKind, blocks: quantised.Blocks, dtype: torch.dtype, zero_points: bool
) -> None:
    """One weight after the other, and nothing here keeps what it was."""
    for index, (name, block) in enumerate(zip(quantised.names(module), blocks, strict=True)):
        made = quantised_weight(experts.weights(module)[index].weight, block, dtype, zero_points)
        for part, tensor in parts(name, made).items():
            module.register_parameter(part, nn.Parameter(tensor, requires_grad=False))
    settle(module, rows, blocks)
    options = module.moe_ops_options
    inside = [each.path for each in options.settings.inside]
    module.moe_ops_options = replace(options, settings=settings_of(module, *inside))


def parts(name: str, made: ScaledWeight) -> dict[str, torch.Tensor]:
    """What there is of a weight, by the names of parameters."""
    beside = zip(PARTS, (made.scale, made.zero, made.global_scale), strict=True)
    return {name: made.weight} | {name + part: tensor for part, tensor in beside if tensor is not None}


def settle(module: Any, rows: RowKind, blocks: quantised.Blocks) -> None:
    """Says of an experts module how its weights lie now."""
    scale = getattr(module, f"down_proj{SCALE}").dtype
    module.is_transposed, module.moe_ops_format = False, Format(rows, blocks, scale)
