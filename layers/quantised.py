"""What products take of the experts of a `FusedMoE` that has scales, and how they run."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from layers.lora import Product
from layers.weights.expert_loader import part_here
from layers.weights.scales import (
    GLOBAL_SCALES,
    INPUT_SCALES,
    SCALES,
    ZERO_POINTS,
    Blocks,
    WeightScale,
    blocks_of_kind,
)
from moe_ops.arguments import ExpertWeights, FusedExperts
from moe_ops.errors import value_error
from moe_ops.pairs import numbers_in
from moe_ops.scaled_experts import Rows, expert_rows, products as scaled_products, run as run_scaled
from moe_ops.types import DispatchPlan, InputScales
from moe_ops.values import ScaledLinear


def run_quantised(module: Any, args: FusedExperts) -> Tensor:
    """The experts of a `FusedMoE` that has scales, for tokens and routing in `args`. Raises as `quantise_experts`."""
    expect_supported(module)
    return run_scaled(args, *scaled_linears(module, args.experts), _rows_of(module))


def quantised_rows(module: Any, args: FusedExperts) -> tuple[Tensor, DispatchPlan]:
    """Before they are weighed and summed: what its experts return [S, H], and where it belongs."""
    expect_supported(module)
    return expert_rows(args, *scaled_linears(module, args.experts), _rows_of(module))


def products(module: Any, experts: ExpertWeights) -> tuple[Product, Product] | None:
    """Those that adapters change; None where weights are not quantised."""
    if module.quantisation is None:
        return None
    expect_supported(module)
    return scaled_products(*scaled_linears(module, experts), _rows_of(module))


def _rows_of(module: Any) -> Rows:
    if module.quantisation.rows == "static":
        return InputScales(*(getattr(module, name).flatten() for name in INPUT_SCALES))
    return module.quantisation.rows


def expect_supported(module: Any) -> None:
    """Raises ValueError where a `FusedMoE` has what quantised experts have not."""
    config = module.config
    if config.emit not in ("auto", "stages"):
        value_error("emit={!r} with quantised experts: expected 'auto' or 'stages'", config.emit)
    if config.experts.post_norm_eps is not None:
        value_error(
            "experts.post_norm_eps={} with quantised experts: expected None", config.experts.post_norm_eps
        )


def scaled_linears(module: Any, experts: ExpertWeights) -> tuple[ScaledLinear, ScaledLinear]:
    """Both products of a `FusedMoE` that has scales, with its weights or the experts of them that are on this rank.

    Raises ValueError where a block has gate rows and up rows.
    """
    kind = module.quantisation.kind
    of_up, of_down = blocks_of(module, experts, kind, module.quantisation.block)
    parts = {name: _on_this_rank(module, getattr(module, name)) for name in module.quantisation.parameters}
    up, down = (parts[name] for name in SCALES)
    up_zero, down_zero = (parts.get(name) for name in ZERO_POINTS)
    w13, w2 = experts
    up_global, down_global = _global_scales(module, parts, down_sizes(w2.weight)[1])
    if kind is WeightScale.TENSOR:
        up, down = up.unsqueeze(2), down[:, None, None]
    return (
        ScaledLinear(w13.weight, up, w13.bias, *of_up, up_zero, up_global),
        ScaledLinear(w2.weight, down, w2.bias, *of_down, down_zero, down_global),
    )


def _global_scales(
    module: Any, parts: Mapping[str, Tensor], features: int
) -> tuple[Tensor | None, Tensor | None]:
    """[E, P] of each product, if there are any: of gate and up rows in turns for each row."""
    up, down = (parts.get(name) for name in GLOBAL_SCALES)
    if up is None or down is None:
        return None, None
    if module.config.activation.interleaved:
        up = up.repeat(1, features)
    return up, down.unsqueeze(1)


def _on_this_rank(module: Any, scale: Tensor) -> Tensor:
    return scale if module.parallel is None else part_here(scale, 3)


def blocks_of(module: Any, experts: ExpertWeights, kind: WeightScale, block: tuple[int, int]) -> Blocks:
    """Of a `FusedMoE` with these weights. Raises ValueError where a block has gate rows and up rows."""
    w13, w2 = experts
    sizes = w13.weight.shape[1], *down_sizes(w2.weight)
    return blocks_of_kind(kind, block, sizes, module.config.activation.interleaved)


def down_sizes(w2: Tensor) -> tuple[int, int]:
    """H and I, of what is stored [E, H, I], or half as many columns in 4 bits."""
    return w2.shape[1], w2.shape[2] * numbers_in(w2.dtype)
