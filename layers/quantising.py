"""How the experts of a `FusedMoE` get scales, and how their weights become ones of 8 or 4 bits."""

import torch
from torch import nn

from layers._checks import expect_type
from layers.fused_moe import FusedMoE
from layers.quantised import blocks_of, down_sizes, expect_supported, scaled_linears
from layers.weights.scales import (
    GLOBAL_SCALES,
    INPUT_SCALES,
    SCALES,
    WEIGHTS,
    ZERO_POINTS,
    Quantisation,
    Rows,
    WeightScale,
    expect_block,
    expect_even,
    expect_format,
    expect_zero_points,
)
from moe_ops._checks import FLOATING_DTYPES
from moe_ops.e2m1 import FLOAT8
from moe_ops.int4 import INTEGERS, ZERO
from moe_ops.mxfp4 import ONE
from moe_ops.nvfp4 import NUMBERS
from moe_ops.pairs import PAIRS
from moe_ops.scaled import STORED
from moe_ops.scaled_experts import rows_for
from moe_ops.weight_formats import quantised_weight


def add_weight_scales(
    module: FusedMoE,
    kind: WeightScale,
    block: tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype = torch.float32,
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
        dtype: of the scales, torch.uint8 for the exponents of MXFP4, torch.float8_e4m3fn for scales of NVFP4.

    Raises:
        TypeError, ValueError: `module` is no `FusedMoE` or a shared expert is to overlap with it, `kind` is no
            `WeightScale`, `dtype` none of these nor floating point of 16 bits or more, a size of the block not
            positive, groups or blocks do not fit the sizes of the shard, or a style of `layers.parallel` has sharded
            the module.
    """
    _expect_scalable(module, kind, block)
    if dtype not in (*FLOATING_DTYPES, PAIRS, FLOAT8):
        expected = f"expected a floating point dtype of 16 bits or more, {PAIRS} or {FLOAT8}"
        raise TypeError(f"dtype={dtype!r}: {expected}")
    shapes = _shapes(module, kind, *block)
    module.quantisation = Quantisation(kind, block, rows_for(module.w13_weight.dtype))
    _register(module, dict(zip(SCALES, shapes, strict=True)), dtype, ONE if dtype == PAIRS else 1)


def _register(module: FusedMoE, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, value: int) -> None:
    """Parameters of these names, filled with a value, of the kind that `module.quantisation` says."""
    for name, shape in shapes.items():
        filled = torch.full(shape, value, dtype=dtype, device=module.w13_weight.device)
        param = nn.Parameter(filled, requires_grad=False)
        kind = module.quantisation.kind_of(name) or module.quantisation.kind  # type: ignore[union-attr]
        param.quant_method = kind.value  # type: ignore[attr-defined]
        loader = getattr(module.w13_weight, "weight_loader", None)
        if loader is not None:  # loops over a model's parameters ask each for its own
            param.weight_loader = loader  # type: ignore[attr-defined]
        module.register_parameter(name, param)


def _expect_scalable(module: FusedMoE, kind: WeightScale, block: tuple[int, int]) -> None:
    expect_type("module", module, FusedMoE)
    expect_type("kind", kind, WeightScale)
    shared = module.config.shared_experts
    if shared is not None and shared.overlap:
        raise ValueError("shared_experts.overlap=True with quantised experts: expected False")
    if module.parallel is not None:
        raise ValueError("module is sharded by layers.parallel: expected no scales of weights among ranks")
    expect_block(block)


def _shapes(
    module: FusedMoE, kind: WeightScale, rows: int, columns: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    E, gate_up, _ = module.w13_weight.shape
    H, I = down_sizes(module.w2_weight)
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


def quantise_experts(
    module: FusedMoE,
    kind: WeightScale,
    block: tuple[int, int] = (128, 128),
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rows: Rows | None = None,
    zero_points: bool = False,
) -> None:
    """Turns the weights of a `FusedMoE` into ones of 8 or 4 bits, with scales; from then on it computes with these.

    A scale maps the largest magnitude that shares it to the largest of `dtype`, and the rest is rounded to the nearest.
    In MXFP4 it is a power of two, and weights that were MXFP4 once become what they were: those of gpt-oss in bfloat16,
    say. In NVFP4 each matrix has a scale besides, with which the largest of the others is 448. Of integers of 4 bits
    the largest is 7.5, as compressed-tensors and GPTQ have it, and scales have the weights' dtype. On the meta device
    only dtypes and sizes change, for a checkpoint that is quantised already.

    Args:
        module: a `FusedMoE`.
        kind, block: see `add_weight_scales`; in 4 bits GROUP, of a multiple of 32 columns, of NVFP4 16, or of integers
            CHANNEL.
        dtype: torch.float8_e4m3fn or torch.int8, torch.uint8 for MXFP4, torch.float4_e2m1fn_x2 for NVFP4, or
            torch.uint4 for integers of 4 bits. Those of 4 bits are stored as torch.uint8, two numbers in each. In NVFP4
            `w13_weight_scale_2` [E, 2] ([E, 1] ungated) and `w2_weight_scale_2` [E], float32, are registered beside the
            scales: ModelOpt's names.
        rows: whether tokens are quantised too, see `moe_ops.scaled_fused_experts`. "static": with scales that a
            checkpoint brings, parameters `w13_input_scale` [E, 2] ([E, 1] ungated) and `w2_input_scale` [E], float32,
            ones at first. All rows of a product are divided by the largest of them; ranks have all of them.
        zero_points: of torch.uint4, whether what shares a scale has a zero point of its own: a scale is a fifteenth of
            what lies between the least and the largest, of which one is 0 at least. `w13_weight_zero_point` and
            `w2_weight_zero_point` are registered beside the scales, torch.uint8 of their shapes, codes from 0 to 15.

    Raises:
        TypeError, ValueError: as `add_weight_scales`; `dtype` is none of these or has no zero points, weights are
            quantised already, a block has gate rows and up rows, a weight is no plain parameter (`fully_shard`, a
            parametrisation), or the module has what quantised experts have not: an `emit` of its own, a norm of the
            experts' output, adapters.
    """
    rows = rows_for(dtype) if rows is None else rows
    expect_format(kind, block, dtype, rows)
    expect_zero_points(zero_points, dtype)
    _expect_quantisable(module, kind, block)
    if dtype == INTEGERS:
        expect_even(*down_sizes(module.w2_weight))
    add_weight_scales(module, kind, block, dtype=_scale_dtype(module, dtype))
    module.quantisation = Quantisation(kind, block, rows, zero_points, dtype == NUMBERS)
    of_matrices = _shapes(module, WeightScale.TENSOR, *block)
    if zero_points:
        shapes = (getattr(module, name).shape for name in SCALES)
        _register(module, dict(zip(ZERO_POINTS, shapes, strict=True)), PAIRS, ZERO)
    if dtype == NUMBERS:
        _register(module, dict(zip(GLOBAL_SCALES, of_matrices, strict=True)), torch.float32, 1)
    if rows == "static":
        shapes = ((module.config.num_experts, *shape[1:]) for shape in of_matrices)
        _register(module, dict(zip(INPUT_SCALES, shapes, strict=True)), torch.float32, 1)
    with torch.no_grad():
        for index, name in enumerate(WEIGHTS):
            _quantise(module, index, name, dtype)


def _scale_dtype(module: FusedMoE, dtype: torch.dtype) -> torch.dtype:
    if dtype == INTEGERS:
        return module.w13_weight.dtype
    return {PAIRS: PAIRS, NUMBERS: FLOAT8}.get(dtype, torch.float32)


def _quantise(module: FusedMoE, index: int, name: str, dtype: torch.dtype) -> None:
    """One weight, and nothing here keeps what it was."""
    linear = scaled_linears(module, module.expert_weights())[index]
    block = linear.block_rows, linear.block_columns
    made = quantised_weight(linear.weight, block, dtype, linear.zero is not None)
    param = nn.Parameter(made.weight, requires_grad=False)
    vars(param).update(vars(getattr(module, name)))  # what loaders ask of it
    module.register_parameter(name, param)
    scale = getattr(module, SCALES[index])
    scale.copy_(made.scale.reshape(scale.shape))
    if made.zero is not None:
        getattr(module, ZERO_POINTS[index]).copy_(made.zero)
    if made.global_scale is not None:
        outer = getattr(module, GLOBAL_SCALES[index])
        outer.view(len(outer), -1).copy_(made.global_scale)


def _expect_quantisable(module: FusedMoE, kind: WeightScale, block: tuple[int, int]) -> None:
    _expect_scalable(module, kind, block)
    expect_supported(module)
    if module.lora is not None:
        raise ValueError("module has lora: expected None, adapters are added to experts that are quantised")
    _expect_plain(module)
    if module.w13_weight.dtype in STORED:
        raise ValueError(
            f"w13_weight has dtype {module.w13_weight.dtype}: expected weights that are not quantised"
        )
    blocks_of(module, module.expert_weights(), kind, block)


def _expect_plain(module: FusedMoE) -> None:
    parameters = dict(module.named_parameters(recurse=False))
    for name in WEIGHTS:
        if name not in parameters or hasattr(parameters[name], "placements"):
            raise ValueError(
                f"{name} is sharded or parametrised: expected a plain parameter, to be quantised first"
            )


def _expect_multiple(name: str, size: int, part: int) -> None:
    if size % part:
        raise ValueError(f"{name} is {size}: expected a multiple of the block's {part}")
