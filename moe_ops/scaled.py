"""scaled_grouped_gemm: `grouped_gemm` with weights of 8 or 4 bits, each block of which has a scale.

    out[r] = row(r) @ (scale[e] * weight[e]).T + bias[e]    for expert_offsets[e] <= r < expert_offsets[e + 1]
    out[r] = 0                                              for r >= expert_offsets[E] (rows of dropped slots)
    row(r) = x_scale[r] * x[r], or of sorted_slots[r] // K instead of r

S rows, T tokens, E experts, A input and B output features. Rows are in 8 bits too, each block of their columns with a
scale (`quantise_rows`), or in 16 and more, in which all weights of 8 bits are exact. Products are summed up within a
block of columns, in int32 or the compute dtype, and that times both scales is added. Blocks may be DeepSeek-V3's, 128 x
128 (arXiv 2412.19437, section 3.3), a row, a matrix, or any other. Weights of 4 bits take rows of 16 and more only:
in them `mxfp4` and `nvfp4` are exact with their scales; `int4` times its scales may be rounded to the dtype of rows, as
weights of that dtype are. In a copy that is multiplied with (`dequantise_weight`) all are. Static shapes, no host sync
on CUDA.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library, e2m1
from moe_ops._cpu_products import expert_linear, read_offsets
from moe_ops.arguments import GatherGemm
from moe_ops.errors import describe, type_error, value_error
from moe_ops.grouped_gemm import check_offsets, linear_gradient, product
from moe_ops.pairs import PAIRS, expect_columns, numbers_in
from moe_ops.permute import check_slots, permute, permute_gradient
from moe_ops.quantise_rows import DTYPES, blocks_of, spread
from moe_ops.records import leaf_name, partial
from moe_ops.scaled_arguments import ScaledGroupedGemm, dequantising
from moe_ops.types import ScaledWeight
from moe_ops.values import GroupedLinear, PairedLinear, ScaledLinear
from moe_ops.weight_copies import by_slabs
from moe_ops.weight_formats import dequantised, expert_of

STORED = (*DTYPES, PAIRS)
"""Dtypes of quantised weights."""


def scaled_grouped_gemm(
    x: Tensor,
    weight: ScaledWeight,
    expert_offsets: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    sorted_slots: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiplies ragged groups of rows with one quantised weight each.

    Args:
        x: [S, A] rows in expert order, such as `permute` gives, or [T, A] tokens where `sorted_slots` is given: of any
            floating dtype, or with `x_scale` of the weight's.
        weight: of [E, B, A], and its scales. With exact rows a copy in their dtype is there for a while where that is
            faster; see `scaled_fused_experts`.
        expert_offsets: [E+1] int32 exclusive prefix, from `build_dispatch`.
        bias: [E, B], any floating dtype.
        x_scale: [S, ceil(A / columns)], or for each token, with the columns of the weight's blocks, any floating dtype.
            None with weights of 4 bits.
        sorted_slots: [S] int32 from `build_dispatch`: row r is that of token sorted_slots[r] // K.
        dtype: of the result; None for that of x, or bfloat16 for one of 8 bits.

    Returns:
        [S, B] in `dtype`.

    Raises:
        ValueError: ranks, sizes, devices that do not fit, no dimension of stride 1, or weights in float8_e4m3fn on a
            GPU before compute capability 8.9.
        TypeError: dtypes that are none of these.

    Gradient: to x of 16 bits and more and to bias, through weights in x's dtype that are made for it; not to weights
    and scales.

    Example:
        >>> rows, scale = moe_ops.quantise_rows(hidden_states, columns=128)
        >>> weight = moe_ops.ScaledWeight(w13_float8, w13_scale, block=(128, 128))
        >>> gate_up = moe_ops.scaled_grouped_gemm(
        ...     rows, weight, plan.expert_offsets, x_scale=scale, sorted_slots=plan.sorted_slots
        ... )
    """
    _checks.expect_tensor("x", x)
    linear = scaled_linear("weight", weight, bias)
    if dtype is None:
        dtype = x.dtype if x_scale is None else torch.bfloat16
    _checks.expect_dtype("dtype", dtype)
    return _library.call(ScaledGroupedGemm(x, x_scale, linear, expert_offsets, sorted_slots, dtype))


def scaled_linear(name: str, weight: ScaledWeight, bias: Tensor | None) -> ScaledLinear:
    """The weight and bias that a public function got as `name`.

    Raises TypeError, ValueError for another kind of weight, and where sizes of blocks are unclear.
    """
    if not isinstance(weight, ScaledWeight):
        type_error("{}={}: expected a ScaledWeight", name, describe(weight))
    stored, scale = weight.weight, weight.scale
    _expect_block(f"{name}.block", weight.block)
    _checks.expect_shape(name, stored, ("E", "B", "A"))
    _checks.expect_shape(f"{name}.scale", scale, (stored.shape[0], "blocks of B", "blocks of A"))
    scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
    rows, columns = _block_of(name, stored, scale) if weight.block is None else weight.block
    outer = weight.global_scale
    outer = outer[:, None] if isinstance(outer, Tensor) and outer.dim() == 1 else outer
    return ScaledLinear(stored, scale, bias, rows, columns, weight.zero, outer)


def _expect_block(name: str, block: Any) -> None:
    if block is not None and (not isinstance(block, tuple | list) or len(block) != 2):
        type_error("{}={}: expected None or (rows, columns)", name, repr(block))
    for size in block or ():
        _checks.expect_int(name, size)
        if size < 1:
            value_error("{}={}: expected sizes of at least 1", name, repr(block))


def _block_of(name: str, stored: Tensor, scale: Tensor) -> tuple[int, int]:
    (height, width), (below, beside) = stored.shape[1:], scale.shape[1:]
    width *= numbers_in(stored.dtype)
    if below < 1 or beside < 1 or height % below or width % beside:
        sizes = list(scale.shape[1:]), [height, width]
        value_error("{}.block=None with {} blocks of {} weights: expected (rows, columns)", name, *sizes)
    return max(height // below, 1), max(width // beside, 1)


def _num_slots(args: ScaledGroupedGemm) -> int:
    return args.x.shape[0] if args.sorted_slots is None else args.sorted_slots.shape[0]


def _check(args: ScaledGroupedGemm) -> None:
    x, linear = args.x, args.weight
    check_scaled("weight", linear, "x", x)
    _check_rows(args)
    expect_unpacked("weight", linear.weight, ("E", "B", x.shape[1]))
    _checks.expect_same_device(x.device, "x", x_scale=args.x_scale)
    check_offsets(args.expert_offsets, GroupedLinear(linear.weight), "x", x)


def check_scaled(field: str, linear: ScaledLinear, reference: str, like: Tensor) -> None:
    """Checks the weight in a field of a record, on the device of the argument called `reference`."""
    weight, scale, bias, rows, columns, zero, global_scale = linear
    names = (leaf_name(field, "weight", leaf) for leaf in ScaledLinear._fields)
    _, of_scale, of_bias, *of_block, of_zero, of_global = names
    _checks.expect_shape(field, weight, ("E", "B", "A"))
    expect_stored(field, weight)
    _checks.expect_weight_strides(field, weight)
    for name, size in zip(of_block, (rows, columns), strict=True):
        if size < 1:
            value_error("{}={}: expected at least 1", name, size)
    blocks = weight.shape[0], blocks_of(weight.shape[1], rows), blocks_of(linear.depth, columns)
    _checks.expect_shape(of_scale, scale, blocks)
    if weight.dtype == PAIRS:
        _expect_scale_of_pairs(of_scale, scale)
        expect_columns(of_block[1], columns, linear.depth, scale.dtype)
    else:
        _checks.expect_floating(of_scale, scale)
    if zero is not None:
        _expect_zero(of_zero, zero, weight, scale)
    if global_scale is not None:
        _expect_global(of_global, global_scale, weight, scale)
    if bias is not None:
        _checks.expect_shape(of_bias, bias, weight.shape[:2])
        _checks.expect_floating(of_bias, bias)
    parts = {field: weight, of_scale: scale, of_bias: bias, of_zero: zero, of_global: global_scale}
    _checks.expect_same_device(like.device, reference, **parts)


def _expect_zero(name: str, zero: Tensor, weight: Tensor, scale: Tensor) -> None:
    if weight.dtype != PAIRS or scale.dtype in e2m1.SCALES:
        kind = _format_of(weight, scale)
        value_error("{} with weights of {}: expected None, only integers of 4 bits have it", name, kind)
    _checks.expect_index(name, zero, (PAIRS,))
    _checks.expect_shape(name, zero, scale.shape)


def _expect_global(name: str, global_scale: Tensor, weight: Tensor, scale: Tensor) -> None:
    if weight.dtype != PAIRS or scale.dtype != e2m1.FLOAT8:
        value_error(
            "{} with weights of {}: expected None, only NVFP4 has it", name, _format_of(weight, scale)
        )
    _checks.expect_floating(name, global_scale)
    _checks.expect_shape(name, global_scale, (weight.shape[0], "parts of B"))
    rows, parts = weight.shape[1], global_scale.shape[1]
    if parts < 1 or rows % parts:
        value_error("{} has {} parts of {} rows: expected a divisor of these", name, parts, rows)


def _format_of(weight: Tensor, scale: Tensor) -> Any:
    of_pairs = {e2m1.POWERS: "MXFP4", e2m1.FLOAT8: "NVFP4"}
    return of_pairs.get(scale.dtype, "integers") if weight.dtype == PAIRS else weight.dtype


def _expect_scale_of_pairs(name: str, scale: Tensor) -> None:
    if scale.dtype not in (*e2m1.SCALES, *_checks.FLOATING_DTYPES):
        expected = f"{PAIRS} of MXFP4, {e2m1.FLOAT8} of NVFP4, or of integers a floating point dtype of 16 bits or more"
        type_error("{} has dtype {} with weights of 4 bits: expected {}", name, scale.dtype, expected)


def expect_stored(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless a tensor has one of them."""
    if tensor.dtype not in STORED:
        type_error("{} has dtype {}: expected {}", name, tensor.dtype, " or ".join(map(str, STORED)))


def expect_unpacked(name: str, stored: Tensor, shape: tuple[int | str, int | str, int]) -> None:
    """Raises ValueError unless `stored` holds a weight of `shape`."""
    *outer, depth = shape
    if depth % numbers_in(stored.dtype):
        value_error("{} of 4 bits, for {} columns: expected an even number of columns", name, depth)
    _checks.expect_shape(name, stored, (*outer, depth // numbers_in(stored.dtype)))


def _check_rows(args: ScaledGroupedGemm) -> None:
    x, scale, linear = args.x, args.x_scale, args.weight
    _checks.expect_shape("x", x, ("T", "A"))
    if scale is None:
        _checks.expect_floating("x", x)
        _checks.expect_result_dtype("dtype", args.dtype, x.dtype)
    else:
        if linear.weight.dtype == PAIRS:
            value_error("x_scale with weights of 4 bits: expected None")
        _checks.expect_same_dtype(linear.weight.dtype, "weight", x=x)
        _checks.expect_shape("x_scale", scale, (x.shape[0], blocks_of(x.shape[1], linear.block_columns)))
        _checks.expect_floating("x_scale", scale)
        _checks.expect_floating_dtype("dtype", args.dtype)
    if args.sorted_slots is not None:
        check_slots(args.sorted_slots, x.shape[0])
        _checks.expect_same_device(x.device, "x", sorted_slots=args.sorted_slots)


def _reference(args: ScaledGroupedGemm) -> Tensor:
    """One expert after the other, so that no more than one is there in the compute dtype."""
    linear, computed = args.weight, _checks.compute_dtype(args.dtype)
    rows = _rows(args, computed)
    out = _fake(args).zero_()
    for expert, (start, end) in enumerate(pairwise(read_offsets(args.expert_offsets, rows.shape[0]))):
        if start < end:
            one = expert_of(linear, expert)
            bias = None if linear.bias is None else linear.bias[expert].to(computed)
            out[start:end] = expert_linear(rows[start:end], dequantised(one, computed), bias)
    return out


def _rows(args: ScaledGroupedGemm, dtype: torch.dtype) -> Tensor:
    """[S, A] in `dtype`."""
    x = args.x.to(dtype)
    if args.x_scale is not None:
        x = x * spread(args.x_scale.to(dtype), x.shape, 1, args.weight.block_columns)
    return x if args.sorted_slots is None else permute(x, args.sorted_slots)


def _cuda(args: ScaledGroupedGemm) -> Tensor:
    if _num_slots(args) == 0:
        return _fake(args)
    return _library.launch(args) if _library.has_launches(args) else _copied(args)


def _copied(args: ScaledGroupedGemm) -> Tensor:
    """With the weight in x's dtype: for many rows, and for float64, whose tensor cores convert no operand."""
    offsets, slots = args.expert_offsets, args.sorted_slots
    if args.x_scale is None and slots is not None:
        x = args.x.to(args.dtype)
        return by_slabs(
            args.weight, args.dtype, 1, lambda slab, _: _library.call(GatherGemm(x, slab, slots, offsets))
        )
    rows = _rows(args, args.dtype)

    def multiply(slab: PairedLinear, _: slice) -> Tensor:
        return product(rows, GroupedLinear(slab.weight, slab.bias), offsets)

    return by_slabs(args.weight, args.dtype, 1, multiply)


def _fake(args: ScaledGroupedGemm) -> Tensor:
    return args.x.new_empty((_num_slots(args), args.weight.weight.shape[1]), dtype=args.dtype)


_library.define(ScaledGroupedGemm, "Tensor", check=_check, cpu=_reference, cuda=_cuda, fake=_fake)
_library.define_compiled(ScaledGroupedGemm, cpu=_reference, fake=_fake)


def _save(args: ScaledGroupedGemm, output: Tensor) -> Any:
    return args


def _backward(args: ScaledGroupedGemm, needs: ScaledGroupedGemm, grad: Tensor) -> ScaledGroupedGemm:
    grad = grad.contiguous()
    to_x = _through(args, grad.to(args.x.dtype)) if needs.x and args.x_scale is None else None
    needed = partial(GroupedLinear, bias=needs.weight.bias)
    to_bias, bias = linear_gradient(grad, args.x, args.expert_offsets, needed).bias, args.weight.bias
    to_bias = to_bias if to_bias is None or bias is None else to_bias.to(bias.dtype)
    return partial(ScaledGroupedGemm, x=to_x, weight=partial(ScaledLinear, bias=to_bias))


def _through(args: ScaledGroupedGemm, grad: Tensor) -> Tensor:
    """To x; the whole weight is there in its dtype for a while."""
    transposed = GroupedLinear(_library.call(dequantising(args.weight, grad.dtype)).transpose(1, 2))
    to_rows = product(grad, transposed, args.expert_offsets)
    slots = args.sorted_slots
    return to_rows if slots is None else permute_gradient(to_rows, slots, args.x.shape[0])


def _tangent(args: ScaledGroupedGemm, tangents: ScaledGroupedGemm) -> _autograd.Tangents:
    to_x = _autograd.or_zeros(tangents.x, args.x)
    linear = args.weight._replace(bias=tangents.weight.bias)
    return (_library.call(args._replace(x=to_x, weight=linear)),)


def _flops(shapes: ScaledGroupedGemm) -> int:
    """By the columns of rows: those of a weight may be two in an element."""
    slots, columns = shapes.sorted_slots, shapes.x[1]
    num_slots = (shapes.x if slots is None else slots)[0]
    return 2 * num_slots * columns * shapes.weight.weight[1]  # type: ignore[return-value, operator, index]  # shapes


_autograd.define_gradient(ScaledGroupedGemm, _save, _backward, _tangent)
_library.define_flops(ScaledGroupedGemm, _flops)
_library.define_vmap(ScaledGroupedGemm)
