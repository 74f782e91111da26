"""quantise_rows: rows in 8 bits, each block of whose columns has a scale.

    largest[t, b] = max over c in block b of |x[t, c]|
    scale[t, b]   = largest[t, b] / most                            (1 where largest < 2**-118: rows are 0)
    rows[t, c]    = round(x[t, c] * (most / largest[t, c // columns]))

or, where the scale is given: that of each block is max |input_scale| (1 where it is < 2**-118), and

    rows[t, c]    = round(clamp(x[t, c] * (1 / scale), -most, most))

T rows, A columns; `most` is 448 for float8_e4m3fn and 127 for int8, all in float32, and rounding is to the nearest, to
even between two. That is the dynamic quantisation of DeepSeek-V3's activations with blocks of 128 columns (arXiv
2412.19437, section 3.3), and with one block that of vLLM per token; a scale that is given is its static one. Consumed
by `scaled_grouped_gemm`. Static shapes, no host sync on CUDA.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ops import _autograd, _checks, _library
from moe_ops.errors import type_error, value_error
from moe_ops.scaled_arguments import QuantiseRows
from moe_ops.types import LEAST_LARGEST, largest_of

DTYPES = (torch.float8_e4m3fn, torch.int8)


def quantise_rows(
    x: Tensor, columns: int, dtype: torch.dtype = torch.float8_e4m3fn, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits and the scales of their blocks.

    Args:
        x: [T, A], any floating dtype.
        columns: of a block, at least 1; the last block of a row has those that are left.
        dtype: torch.float8_e4m3fn or torch.int8.
        input_scale: [N], N at least 1, any floating dtype: the largest of them is the scale of every block, and what is
            too large for it becomes the largest number of `dtype`. None: each block has its own.

    Returns:
        rows [T, A] in `dtype`, scale [T, ceil(A / columns)] float32. A NaN stays in its block.

    Raises:
        ValueError, TypeError: the message names argument, value and expectation.

    Gradient: none; both are constants.

    Example:
        >>> rows, scale = moe_ops.quantise_rows(hidden_states, columns=128)
    """
    _checks.expect_int("columns", columns)
    expect_dtype("dtype", dtype)
    return _library.call(QuantiseRows(x, columns, dtype, input_scale))


def blocks_of(size: int, block: int) -> int:
    """How many blocks there are, the last of which may be short."""
    return -(-size // block)


def quantised(matrix: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[B, A] in 8 bits, and the scales [ceil(B / rows), ceil(A / columns)] of its blocks of rows and columns."""
    values, most = matrix.float(), largest_of(dtype)
    largest = maxima(values.abs(), rows, columns)
    is_zero = largest < LEAST_LARGEST
    quotient = torch.full_like(largest, most) / largest  # of a number torch would take the reciprocal
    factor = torch.where(is_zero, 1, quotient)
    multiplied = values * spread(factor, matrix.shape, rows, columns)
    return _rounded(multiplied, dtype), torch.where(is_zero, 1, largest / most)


def _rounded(multiplied: Tensor, dtype: torch.dtype) -> Tensor:
    rounded, most = multiplied if dtype.is_floating_point else multiplied.round(), largest_of(dtype)
    return rounded.clamp(-most, most).to(dtype)


def _with_scale(x: Tensor, columns: int, dtype: torch.dtype, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = x.float(), input_scale.float().abs().amax()
    scale = torch.where(scale < LEAST_LARGEST, 1, scale)
    has_nan = maxima(values.abs(), 1, columns).isnan()  # which integers cannot hold
    return _rounded(values * scale.reciprocal(), dtype), torch.where(has_nan, torch.nan, scale)


def maxima(magnitudes: Tensor, rows: int, columns: int) -> Tensor:
    """[ceil(B / rows), ceil(A / columns)] of a matrix [B, A], the largest of each block."""
    height, width = magnitudes.shape
    rows, columns = min(rows, max(height, 1)), min(columns, max(width, 1))  # a block may be larger
    padded = F.pad(magnitudes, (0, -width % columns, 0, -height % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))


def spread(scale: Tensor, shape: torch.Size, rows: int, columns: int) -> Tensor:
    """[..., B, A], the scale of each of a matrix' elements."""
    height, width = shape[-2:]
    per_row = scale.repeat_interleave(min(rows, height), -2)[..., :height, :]
    return per_row.repeat_interleave(min(columns, width), -1)[..., :width]


def _check(args: QuantiseRows) -> None:
    _checks.expect_floating("x", args.x)
    _checks.expect_shape("x", args.x, ("T", "A"))
    if args.columns < 1:
        value_error("columns={}: expected at least 1", args.columns)
    expect_dtype("dtype", args.dtype)
    check_input_scale("input_scale", args.input_scale, "x", args.x)


def check_input_scale(name: str, scale: Tensor | None, reference: str, like: Tensor) -> None:
    """Raises TypeError, ValueError unless it is None or [N] on the device of the argument called `reference`."""
    if scale is None:
        return
    _checks.expect_floating(name, scale)
    _checks.expect_shape(name, scale, ("N",))
    if scale.shape[0] < 1:
        value_error("{} has shape {}: expected at least one scale", name, list(scale.shape))
    _checks.expect_same_device(like.device, reference, **{name: scale})


def expect_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises TypeError unless it is a dtype of 8 bits that we multiply in."""
    if dtype not in DTYPES:
        type_error("{}={}: expected {}", name, dtype, " or ".join(map(str, DTYPES)))


def _reference(args: QuantiseRows) -> tuple[Tensor, Tensor]:
    x, columns, dtype, input_scale = args
    return (
        quantised(x, 1, columns, dtype)
        if input_scale is None
        else _with_scale(x, columns, dtype, input_scale)
    )


def _cuda(args: QuantiseRows) -> tuple[Tensor, Tensor]:
    return _fake(args) if args.x.numel() == 0 else _library.launch(args)


def _fake(args: QuantiseRows) -> tuple[Tensor, Tensor]:
    num_tokens, depth = args.x.shape
    scale = args.x.new_empty((num_tokens, blocks_of(depth, args.columns)), dtype=torch.float32)
    return args.x.new_empty(args.x.shape, dtype=args.dtype), scale


_library.define(QuantiseRows, "(Tensor, Tensor)", check=_check, cpu=_reference, cuda=_cuda, fake=_fake)
_library.define_compiled(QuantiseRows, cpu=_reference, fake=_fake)
_autograd.define_constant(QuantiseRows)
_library.define_vmap_over_tokens(QuantiseRows)
