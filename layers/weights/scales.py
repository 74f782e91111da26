"""Quantised expert weights: their scales as parameters, how weights become such, and what products take of them."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

import torch
from torch import Tensor, nn

from layers._checks import expect_positive, expect_type
from moe_ops._checks import FLOATING_DTYPES
from moe_ops.arguments import ExpertWeights, FusedExperts
from moe_ops.errors import value_error
from moe_ops.int4 import INTEGERS
from moe_ops.mxfp4 import ONE
from moe_ops.pairs import GROUP, PAIRS, numbers_in
from moe_ops.quantise_rows import expect_dtype
from moe_ops.scaled import STORED, quantised_weight
from moe_ops.scaled_experts import Rows, expert_rows, rows_for, run as run_scaled
from moe_ops.types import DispatchPlan
from moe_ops.values import ScaledLinear


class WeightScale(Enum):
    """How many weights share a scale; a parameter says it in its attribute `quant_method`.

    TENSOR: one per matrix. CHANNEL: one per output row. GROUP: one per row and `group` columns. BLOCK: one per
    block of rows and columns.
    """

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"

    @staticmethod
    def of(param: Tensor, module: nn.Module) -> "WeightScale":
        """The kind of a scale parameter of `module`. Raises ValueError when its `quant_method` names none.

        A copy, what `to_empty` makes and what is assigned have no such attribute: of those the module knows it.
        """
        names = (name for name, each in module.named_parameters(recurse=False) if each is param)
        quantisation: Quantisation | None = getattr(module, "quantisation", None)
        known = quantisation.kind if quantisation is not None and next(names, "") in SCALES else None
        value = getattr(param, "quant_method", known)
        value = value.value if isinstance(value, Enum) else value
        try:
            return WeightScale(value)
        except ValueError:
            kinds = ", ".join(repr(kind.value) for kind in WeightScale)
            raise ValueError(f"quant_method={value!r} of the scale: expected one of {kinds}") from None


WEIGHTS = ("w13_weight", "w2_weight")
SCALES = ("w13_weight_scale", "w2_weight_scale")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the experts of a layer are quantised: what shares a scale, and whether tokens are quantised too."""

    kind: WeightScale
    block: tuple[int, int]
    rows: Rows = "quantised"


def add_weight_scales(
    module: Any, kind: WeightScale, block: tuple[int, int] = (128, 128), *, dtype: torch.dtype = torch.float32
) -> None:
    """Registers `w13_weight_scale` and `w2_weight_scale` on a `FusedMoE`, filled with ones.

    With I the intermediate size on this rank, G = 2I (I for ungated activations) and a `block` of b rows and c
    columns, the shapes are

        TENSOR   [E, 2] ([E, 1] ungated)         and [E]
        CHANNEL  [E, G, 1]                       and [E, H, 1]
        GROUP    [E, G, H / c]                   and [E, H, I / c]
        BLOCK    [E, (G / I) ceil(I / b), ceil(H / c)] and [E, ceil(H / b), ceil(I / c)]

    Args:
        module: a `FusedMoE`; `module.weight_loader` fills the scales from a checkpoint.
        kind: what shares a scale.
        block: rows and columns of a block; GROUP reads the columns only.
        dtype: of the scales, torch.uint8 for the exponents of MXFP4.

    Raises:
        TypeError, ValueError: `module` is no `FusedMoE` or a shared expert is to overlap with it, `kind` is no
            `WeightScale`, `dtype` neither that nor floating point of 16 bits or more, a size of the block not positive,
            groups or blocks do not fit the sizes of the shard, or a style of `layers.parallel` has sharded the module.
    """
    _expect_scalable(module, kind, block)
    if dtype not in (*FLOATING_DTYPES, PAIRS):
        raise TypeError(
            f"dtype={dtype!r}: expected a floating point dtype of 16 bits or more, or torch.uint8"
        )
    shapes = _shapes(module, kind, *block)
    module.quantisation = Quantisation(kind, block, rows_for(module.w13_weight.dtype))
    for name, shape in zip(SCALES, shapes, strict=True):
        scale = torch.full(shape, ONE if dtype == PAIRS else 1, dtype=dtype, device=module.w13_weight.device)
        param = nn.Parameter(scale, requires_grad=False)
        param.quant_method = kind.value  # type: ignore[attr-defined]
        loader = getattr(module.w13_weight, "weight_loader", None)
        if loader is not None:  # loops over a model's parameters ask each for its own
            param.weight_loader = loader  # type: ignore[attr-defined]
        module.register_parameter(name, param)


def _expect_scalable(module: Any, kind: WeightScale, block: tuple[int, int]) -> None:
    from layers.fused_moe import FusedMoE  # its loader knows the kinds of scales

    expect_type("module", module, FusedMoE)
    expect_type("kind", kind, WeightScale)
    shared = module.config.shared_experts
    if shared is not None and shared.overlap:
        raise ValueError("shared_experts.overlap=True with quantised experts: expected False")
    if module.parallel is not None:
        raise ValueError("module is sharded by layers.parallel: expected no scales of weights among ranks")
    expect_block(block)


def expect_block(block: tuple[int, int]) -> None:
    """Raises ValueError for anything but two positive numbers."""
    if not isinstance(block, tuple) or len(block) != 2:
        raise ValueError(f"block={block!r}: expected (rows, columns)")
    for name, size in zip(("block rows", "block columns"), block):
        expect_positive(name, size)


def _shapes(
    module: Any, kind: WeightScale, rows: int, columns: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    E, gate_up, _ = module.w13_weight.shape
    _, H, I = _down_sizes(module)
    halves = gate_up // I
    if kind is WeightScale.TENSOR:
        return (E, halves), (E,)
    if kind is WeightScale.CHANNEL:
        return (E, gate_up, 1), (E, H, 1)
    if kind is WeightScale.GROUP:
        _expect_multiple("hidden_size", H, columns)
        _expect_multiple("intermediate_size of the shard", I, columns)
        return (E, gate_up, H // columns), (E, H, I // columns)
    if module.shard.size > 1:  # a block that two ranks share has no place in either
        _expect_multiple("intermediate_size of the shard", I, rows)
        _expect_multiple("intermediate_size of the shard", I, columns)
    return (E, halves * -(-I // rows), -(-H // columns)), (E, -(-H // rows), -(-I // columns))


def _down_sizes(module: Any) -> tuple[int, int, int]:
    """[E, H, I]."""
    E, H, columns = module.w2_weight.shape
    return E, H, columns * numbers_in(module.w2_weight.dtype)


def quantise_experts(
    module: Any,
    kind: WeightScale,
    block: tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rows: Rows | None = None,
) -> None:
    """Turns the weights of a `FusedMoE` into ones of 8 or 4 bits, with scales; from then on it computes with these.

    A scale maps the largest magnitude that shares it to the largest of `dtype`, and the rest is rounded to the nearest.
    In MXFP4 it is a power of two, and weights that were MXFP4 once become what they were: those of gpt-oss in bfloat16,
    say. Of integers of 4 bits the largest is 7.5, as compressed-tensors and GPTQ have it, and scales have the weights'
    dtype. On the meta device only dtypes and sizes change, for a checkpoint that is quantised already.

    Args:
        module: a `FusedMoE`.
        kind, block: see `add_weight_scales`; in 4 bits GROUP, of a multiple of 32 columns, or of integers CHANNEL.
        dtype: torch.float8_e4m3fn or torch.int8, torch.uint8 for MXFP4, or torch.uint4 for integers of 4 bits: both are
            stored as torch.uint8, two numbers in each.
        rows: whether tokens are quantised too, see `moe_ops.scaled_fused_experts`.

    Raises:
        TypeError, ValueError: as `add_weight_scales`; `dtype` is none of these, weights are quantised already, a block
            has gate rows and up rows, a weight is no plain parameter (`fully_shard`, a parametrisation), or the module
            has what quantised experts have not: an `emit` of its own, a norm of the experts' output, adapters.
    """
    rows = rows_for(dtype) if rows is None else rows
    expect_format(kind, block, dtype, rows)
    _expect_quantisable(module, kind, block)
    if dtype == INTEGERS:
        expect_even(*_down_sizes(module)[1:])
    add_weight_scales(module, kind, block, dtype=_scale_dtype(module, dtype))
    module.quantisation = Quantisation(kind, block, rows)
    with torch.no_grad():
        for index, name in enumerate(WEIGHTS):
            _quantise(module, index, name, dtype)


def expect_format(kind: WeightScale, block: tuple[int, int], dtype: torch.dtype, rows: Rows) -> None:
    """Raises TypeError, ValueError for rows, block and dtype that are none, and what is not for weights of 4 bits."""
    expect_block(block)
    if rows not in get_args(Rows):
        raise ValueError(f"rows={rows!r}: expected 'quantised' or 'exact'")
    if dtype not in (PAIRS, INTEGERS):
        expect_dtype("dtype", dtype)
    elif not _is_of_pairs(kind, block[1], dtype):
        expected = f"GROUP of a multiple of {GROUP} columns, or CHANNEL of {INTEGERS}"
        raise ValueError(f"{kind}, block={block} with weights of 4 bits: expected {expected}")
    elif rows != "exact":
        raise ValueError(f"rows={rows!r} with weights of 4 bits: expected 'exact'")


def _scale_dtype(module: Any, dtype: torch.dtype) -> torch.dtype:
    if dtype == INTEGERS:
        return module.w13_weight.dtype
    return PAIRS if dtype == PAIRS else torch.float32


def _is_of_pairs(kind: WeightScale, columns: int, dtype: torch.dtype) -> bool:
    if kind is WeightScale.CHANNEL:
        return dtype == INTEGERS
    return kind is WeightScale.GROUP and columns % GROUP == 0


def expect_even(hidden_size: int, features: int) -> None:
    """Raises ValueError for rows that are no whole bytes of numbers of 4 bits."""
    for name, size in (("hidden_size", hidden_size), ("intermediate_size of the shard", features)):
        if size % 2:
            raise ValueError(f"{name} is {size}: expected an even number with weights of 4 bits")


def _quantise(module: Any, index: int, name: str, dtype: torch.dtype) -> None:
    """One weight, and nothing here keeps what it was."""
    linear = scaled_linears(module, module.expert_weights())[index]
    made = quantised_weight(linear.weight, (linear.block_rows, linear.block_columns), dtype)
    param = nn.Parameter(made.weight, requires_grad=False)
    vars(param).update(vars(getattr(module, name)))  # what loaders ask of it
    module.register_parameter(name, param)
    scale = getattr(module, SCALES[index])
    scale.copy_(made.scale.reshape(scale.shape))


def _expect_quantisable(module: Any, kind: WeightScale, block: tuple[int, int]) -> None:
    _expect_scalable(module, kind, block)
    _expect_supported(module)
    _expect_plain(module)
    if module.w13_weight.dtype in STORED:
        raise ValueError(
            f"w13_weight has dtype {module.w13_weight.dtype}: expected weights that are not quantised"
        )
    _blocks(module, kind, block)


def _expect_plain(module: nn.Module) -> None:
    parameters = dict(module.named_parameters(recurse=False))
    for name in WEIGHTS:
        if name not in parameters or hasattr(parameters[name], "placements"):
            raise ValueError(
                f"{name} is sharded or parametrised: expected a plain parameter, to be quantised first"
            )


def run_quantised(module: Any, args: FusedExperts) -> Tensor:
    """The experts of a `FusedMoE` that has scales, for tokens and routing in `args`. Raises as `quantise_experts`."""
    _expect_supported(module)
    return run_scaled(args, *scaled_linears(module, args.experts), module.quantisation.rows)


def quantised_rows(module: Any, args: FusedExperts) -> tuple[Tensor, DispatchPlan]:
    """Before they are weighed and summed: what its experts return [S, H], and where it belongs."""
    _expect_supported(module)
    return expert_rows(args, *scaled_linears(module, args.experts), module.quantisation.rows)


def _expect_supported(module: Any) -> None:
    config = module.config
    if config.emit not in ("auto", "stages"):
        value_error("emit={!r} with quantised experts: expected 'auto' or 'stages'", config.emit)
    if config.experts.post_norm_eps is not None:
        value_error(
            "experts.post_norm_eps={} with quantised experts: expected None", config.experts.post_norm_eps
        )
    if module.lora is not None:
        value_error("lora with quantised experts: expected None")


def scaled_linears(module: Any, experts: ExpertWeights) -> tuple[ScaledLinear, ScaledLinear]:
    """Both products of a `FusedMoE` that has scales, with its weights or the experts of them that are on this rank.

    Raises ValueError where a block has gate rows and up rows.
    """
    kind = module.quantisation.kind
    of_up, of_down = _blocks(module, kind, module.quantisation.block)
    up, down = (_on_this_rank(module, getattr(module, name)) for name in SCALES)
    if kind is WeightScale.TENSOR:
        up, down = up.unsqueeze(2), down[:, None, None]
    w13, w2 = experts
    return ScaledLinear(w13.weight, up, w13.bias, *of_up), ScaledLinear(w2.weight, down, w2.bias, *of_down)


def _on_this_rank(module: Any, scale: Tensor) -> Tensor:
    return scale if module.parallel is None else module.parallel.local_part(scale, scale.dim())


def _blocks(
    module: Any, kind: WeightScale, block: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of a block of w13, and of w2."""
    _, hidden_size, features = _down_sizes(module)
    sizes = module.w13_weight.shape[1], hidden_size, features
    return blocks_of_kind(kind, block, sizes, module.config.activation.interleaved)


def blocks_of_kind(
    kind: WeightScale, block: tuple[int, int], sizes: tuple[int, int, int], interleaved: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of a block of w13, and of w2. sizes: rows of w13, H and I.

    Raises ValueError where a block has gate rows and up rows.
    """
    rows, columns = block
    gate_up, hidden_size, features = sizes
    if kind is WeightScale.TENSOR:
        blocks = (features, hidden_size), (hidden_size, features)
    elif kind is WeightScale.CHANNEL:
        blocks = (1, hidden_size), (1, features)
    else:
        size = rows if kind is WeightScale.BLOCK else 1, columns
        blocks = size, size
    if gate_up != features:
        _expect_apart(blocks[0][0], features, interleaved)
    return blocks


def _expect_apart(rows: int, features: int, interleaved: bool) -> None:
    if rows == 1:
        return
    if interleaved:
        value_error("scales of blocks with gate and up rows in turns: expected one of CHANNEL and GROUP")
    if features % rows:
        value_error(
            "intermediate_size of the shard is {}: expected a multiple of the block's {}", features, rows
        )


def _expect_multiple(name: str, size: int, part: int) -> None:
    if size % part:
        raise ValueError(f"{name} is {size}: expected a multiple of the block's {part}")
