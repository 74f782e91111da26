"""Few tokens times weights of 4 bits: those of each slot's expert, on tensor cores, with no sort.

A program multiplies sixteen features, of gate and up where there are both, and its warps share the depth: each takes
128 columns of a step. A thread loads 16 bytes of a row, which are 32 columns, unpacks them as `pairs_numbers` says, and
then has just what the tensor cores want of it, so that nothing goes through shared memory; columns of x come in the
order that this gives. Of a product's eight columns of x one would do: each has all of x, or the first three are what a
number of more bits than bfloat16 has consists of, where weights are of e2m1, which float16 lacks the range for.
"""

import triton
import triton.language as tl

from moe_ops.kernels.activation import gate_up_columns
from moe_ops.kernels.common import INTERPRETED, apply_activation, dot, local_expert, offset
from moe_ops.kernels.pairs_numbers import MISSING, factors, numbers_of_words, shifts

FEATURES = tl.constexpr(16)
"""Of a program, rows of gate and up each."""

PART = tl.constexpr(128)
"""Of the depth, that a warp multiplies in a step."""

_ROWS = tl.constexpr(8)  # of the features, those of a load
_COLUMNS = tl.constexpr(8)  # of a product


@triton.jit
def _first_bits(x):
    """What bfloat16 holds of a float32, towards zero."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _split(x, column):
    """What the first three of eight columns have of a float32: parts that bfloat16 holds."""
    first = _first_bits(x)
    rest = tl.where(x == first, 0.0, x - first)
    second = _first_bits(rest)
    last = tl.where(column == 2, rest - second, 0.0)
    return tl.where(column == 0, first, tl.where(column == 1, second, last))


@triton.jit
def _x_beside(
    x_row_ptr, part, stride_k, WORD: tl.constexpr, PARTS: tl.constexpr,
    DTYPE: tl.constexpr, IS_E2M1: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[32 * PARTS, 8] columns that each thread multiplies with those of its WORD-th of weights."""
    lane = tl.arange(0, 32 * PARTS)
    first = (part + lane // 32) * PART + lane % 4 * 32 + WORD * 8
    inner = first[:, None] + tl.arange(0, 8)[None, :]
    x = _loaded(x_row_ptr + offset(inner, stride_k), inner < DEPTH, EVEN, "")
    if IS_E2M1 and tl.bfloat16 != x.dtype:
        x = _split(x.to(tl.float32), (lane // 4 % _COLUMNS)[:, None]).to(DTYPE)
    return x


@triton.jit
def _x_of_step(
    x_row_ptr, part, stride_k, PARTS: tl.constexpr,
    DTYPE: tl.constexpr, IS_E2M1: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[PARTS, 128, 8]: a row in the order of `_added`, in each column or split into the first three."""
    first = _x_beside(x_row_ptr, part, stride_k, 0, PARTS, DTYPE, IS_E2M1, DEPTH, EVEN)
    second = _x_beside(x_row_ptr, part, stride_k, 1, PARTS, DTYPE, IS_E2M1, DEPTH, EVEN)
    third = _x_beside(x_row_ptr, part, stride_k, 2, PARTS, DTYPE, IS_E2M1, DEPTH, EVEN)
    last = _x_beside(x_row_ptr, part, stride_k, 3, PARTS, DTYPE, IS_E2M1, DEPTH, EVEN)
    words = tl.join(tl.join(first, third), tl.join(second, last))
    split = words.reshape(PARTS, _COLUMNS, 4, 2, 4, 4)  # part, column, thread, half, number, word
    return split.trans(0, 5, 2, 4, 3, 1).reshape(PARTS, PART, _COLUMNS)


@triton.jit
def _loaded(ptrs, inside, EVEN: tl.constexpr, POLICY: tl.constexpr):
    if EVEN:
        found = tl.load(ptrs, eviction_policy=POLICY)
    else:
        found = tl.load(ptrs, mask=inside, other=0.0, eviction_policy=POLICY)
    return found


@triton.jit
def _scales(
    ptr, rows, part, stride_n, stride_k,
    DEPTH: tl.constexpr, EVEN: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """[R, GROUPS] scales, or zero points, of rows' parts."""
    group = tl.arange(0, GROUPS)[None, :]
    if GROUPS * BLOCK_COLUMNS == PART:
        place = part[:, None] * GROUPS + group
    else:
        place = (part[:, None] * PART + group * (PART // GROUPS)) // BLOCK_COLUMNS
    begin = offset(rows, stride_n // 2) * 2 if PAIRED else offset(rows, stride_n)
    ptrs = ptr + begin[:, None] + offset(place, stride_k)
    return _loaded(ptrs, place * BLOCK_COLUMNS < DEPTH, EVEN, "evict_first")


@triton.jit
def _read(
    weight_ptr, scale_ptr, zero_ptr, rows, part, block_rows,
    weight_stride_n, scale_stride_n, scale_stride_k, zero_stride_n, zero_stride_k,
    DEPTH: tl.constexpr, EVEN: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """(bytes [R, 64], scales, zero points) of rows' parts: scales again where there are no zero points."""
    byte = part[:, None] * (PART // 2) + tl.arange(0, PART // 2)[None, :]
    pairs = _loaded(
        weight_ptr + offset(rows, weight_stride_n)[:, None] + byte, byte < DEPTH // 2, EVEN, "evict_first"
    )
    blocks = rows // block_rows
    scale = _scales(
        scale_ptr, blocks, part, scale_stride_n, scale_stride_k, DEPTH, EVEN, BLOCK_COLUMNS, GROUPS, PAIRED
    )
    zero = scale
    if zero_ptr is not None:
        zero = _scales(
            zero_ptr, blocks, part, zero_stride_n, zero_stride_k, DEPTH, EVEN, BLOCK_COLUMNS, GROUPS, PAIRED
        )
    return pairs, scale, zero


@triton.jit
def _read_both(
    weight_ptr, scale_ptr, zero_ptr, low, high, part, block_rows,
    weight_stride_n, scale_stride_n, scale_stride_k, zero_stride_n, zero_stride_k,
    DEPTH: tl.constexpr, EVEN: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """`_read` of a program's first eight rows, and of its last."""
    first = _read(
        weight_ptr, scale_ptr, zero_ptr, low, part, block_rows, weight_stride_n,
        scale_stride_n, scale_stride_k, zero_stride_n, zero_stride_k, DEPTH, EVEN, BLOCK_COLUMNS, GROUPS, PAIRED,
    )  # fmt: skip
    last = _read(
        weight_ptr, scale_ptr, zero_ptr, high, part, block_rows, weight_stride_n,
        scale_stride_n, scale_stride_k, zero_stride_n, zero_stride_k, DEPTH, EVEN, BLOCK_COLUMNS, GROUPS, PAIRED,
    )  # fmt: skip
    return first, last


@triton.jit
def _numbers(read, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr, IS_E2M1: tl.constexpr):
    """[R, 128] weights, of what was read."""
    shift = shifts(read[2], DTYPE) if HAS_ZEROS else None
    return numbers_of_words(read[0], factors(read[1], DTYPE), shift, DTYPE, IS_E2M1)


@triton.jit
def _added(acc, x, read, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr, IS_E2M1: tl.constexpr):
    """acc [PARTS, 16, 8] and products of x with parts of eight rows, then of eight others: a thread has one of each."""
    PARTS: tl.constexpr = acc.shape[0]
    both = tl.join(_numbers(read[0], HAS_ZEROS, DTYPE, IS_E2M1), _numbers(read[1], HAS_ZEROS, DTYPE, IS_E2M1))
    split = both.reshape(PARTS, _ROWS, 4, 4, 2, 4, 2)  # part, row, thread, word, half, number, first or last
    weight = split.trans(0, 6, 1, 3, 2, 5, 4).reshape(PARTS, FEATURES, PART)
    return dot(weight, x, acc)


@triton.jit
def _steps(
    gate, up, part, x_row_ptr, weight_ptr, scale_ptr, zero_ptr, gate_low, gate_high, up_low, up_high, block_rows,
    x_stride_k, weight_stride_n, scale_stride_n, scale_stride_k, zero_stride_n, zero_stride_k,
    GATED: tl.constexpr, DTYPE: tl.constexpr, IS_E2M1: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAIRED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """gate and up with the products of STEPS times as many parts of the depth as they have, from `part` on.

    All is read before the first product. As a loop of steps ptxas has read ahead or not, and it took a tenth more.
    """
    PARTS: tl.constexpr = gate.shape[0]
    HAS_ZEROS: tl.constexpr = zero_ptr is not None
    parts = part + tl.arange(0, _ROWS * PARTS) // _ROWS
    x = _x_of_step(x_row_ptr, part, x_stride_k, PARTS, DTYPE, IS_E2M1, DEPTH, EVEN)
    of_gate = _read_both(
        weight_ptr, scale_ptr, zero_ptr, gate_low, gate_high, parts, block_rows, weight_stride_n,
        scale_stride_n, scale_stride_k, zero_stride_n, zero_stride_k, DEPTH, EVEN, BLOCK_COLUMNS, GROUPS, PAIRED,
    )  # fmt: skip
    of_up = of_gate
    if GATED:
        of_up = _read_both(
            weight_ptr, scale_ptr, zero_ptr, up_low, up_high, parts, block_rows, weight_stride_n,
            scale_stride_n, scale_stride_k, zero_stride_n, zero_stride_k, DEPTH, EVEN, BLOCK_COLUMNS, GROUPS, PAIRED,
        )  # fmt: skip
    if STEPS > 1:
        gate, up = _steps(
            gate, up, part + PARTS, x_row_ptr, weight_ptr, scale_ptr, zero_ptr,
            gate_low, gate_high, up_low, up_high, block_rows,
            x_stride_k, weight_stride_n, scale_stride_n, scale_stride_k, zero_stride_n, zero_stride_k,
            GATED, DTYPE, IS_E2M1, DEPTH, EVEN, BLOCK_COLUMNS, GROUPS, PAIRED, STEPS - 1,
        )  # fmt: skip
    gate = _added(gate, x, of_gate, HAS_ZEROS, DTYPE, IS_E2M1)
    if GATED:
        up = _added(up, x, of_up, HAS_ZEROS, DTYPE, IS_E2M1)
    return gate, up


@triton.jit
def _of_rows(ptr, rows, stride_n):
    return tl.load(ptr + offset(rows, stride_n)).to(tl.float32)


@triton.jit
def pairs_gemv_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, global_ptr, bias_ptr, ids_ptr, map_ptr, out_ptr, inverse_ptr,
    top_k, slots_of_row, num_ids, num_experts, features, block_rows, global_rows,
    x_stride_m, x_stride_k, ids_stride_t, ids_stride_k, weight_stride_e, weight_stride_n,
    scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
    global_stride_e, global_stride_n, bias_stride_e, bias_stride_n,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PAIRED: tl.constexpr,
    PARTS: tl.constexpr, AT_ONCE: tl.constexpr, WHOLE: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """out[slot] = gate(weight[expert of slot] @ x[slot // slots_of_row]), or without a gate.

    A dropped slot writes nothing. inverse: where each slot's row is, -1 if there is none. Features are columns of the
    layer's other weight, and so whole words of 16 bytes, of which a program's are half. WHOLE parts of the depth are
    multiplied in AT_ONCE steps at once, those behind in REST steps.
    """
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    IS_E2M1: tl.constexpr = tl.uint8 == SCALE or tl.float8e4nv == SCALE
    OF_X: tl.constexpr = x_ptr.dtype.element_ty
    DTYPE: tl.constexpr = tl.float32 if INTERPRETED else (tl.bfloat16 if IS_E2M1 else OF_X)
    blocks = features // FEATURES
    slot, begin = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * FEATURES
    expert = local_expert(
        ids_ptr, map_ptr, slot, slot >= 0, top_k, ids_stride_t, ids_stride_k, num_ids, num_experts
    )
    if inverse_ptr is not None:
        tl.store(inverse_ptr + slot, tl.where(expert < num_experts, slot, -1), mask=begin == 0)
    if expert < num_experts:
        x_row_ptr = x_ptr + offset(slot // slots_of_row, x_stride_m)
        expert_ptr = weight_ptr + offset(expert, weight_stride_e)
        expert_scale_ptr = scale_ptr
        expert_scale_ptr += (
            offset(expert, scale_stride_e // 2) * 2 if PAIRED else offset(expert, scale_stride_e)
        )
        expert_zero_ptr = None
        if zero_ptr is not None:
            expert_zero_ptr = zero_ptr + offset(expert, zero_stride_e)
        row = tl.arange(0, _ROWS * PARTS) % _ROWS
        gate_low, up_low = gate_up_columns(begin + row, features, GATED, INTERLEAVED)
        gate_high, up_high = gate_up_columns(begin + _ROWS + row, features, GATED, INTERLEAVED)
        gate = tl.zeros((PARTS, FEATURES, _COLUMNS), tl.float32)
        up = tl.zeros((PARTS, FEATURES, _COLUMNS), tl.float32)
        for span in range(0, WHOLE, PARTS * AT_ONCE):
            gate, up = _steps(
                gate, up, span, x_row_ptr, expert_ptr, expert_scale_ptr, expert_zero_ptr,
                gate_low, gate_high, up_low, up_high, block_rows,
                x_stride_k, weight_stride_n, scale_stride_n, scale_stride_k, zero_stride_n, zero_stride_k,
                GATED, DTYPE, IS_E2M1, DEPTH, True, BLOCK_COLUMNS, GROUPS, PAIRED, AT_ONCE,
            )  # fmt: skip
        if REST > 0:
            gate, up = _steps(
                gate, up, WHOLE, x_row_ptr, expert_ptr, expert_scale_ptr, expert_zero_ptr,
                gate_low, gate_high, up_low, up_high, block_rows,
                x_stride_k, weight_stride_n, scale_stride_n, scale_stride_k, zero_stride_n, zero_stride_k,
                GATED, DTYPE, IS_E2M1, DEPTH, (WHOLE + REST * PARTS) * PART <= DEPTH,
                BLOCK_COLUMNS, GROUPS, PAIRED, REST,
            )  # fmt: skip
        columns = begin + tl.arange(0, FEATURES)
        gate_rows, up_rows = gate_up_columns(columns, features, GATED, INTERLEAVED)
        # Each column has all of a sum, if x is in each.
        SHARE: tl.constexpr = 1.0 if IS_E2M1 and tl.bfloat16 != OF_X else 0.125
        result, up_result = tl.sum(tl.sum(gate * SHARE, 0), 1), tl.sum(tl.sum(up * SHARE, 0), 1)
        if IS_E2M1:
            result *= MISSING
            up_result *= MISSING
        if global_ptr is not None:
            global_row_ptr = global_ptr + offset(expert, global_stride_e)
            of_gate, of_up = gate_rows // global_rows, up_rows // global_rows
            result *= _of_rows(global_row_ptr, of_gate, global_stride_n)
            up_result *= _of_rows(global_row_ptr, of_up, global_stride_n)
        if bias_ptr is not None:
            bias_row_ptr = bias_ptr + offset(expert, bias_stride_e)
            result += _of_rows(bias_row_ptr, gate_rows, bias_stride_n)
            up_result += _of_rows(bias_row_ptr, up_rows, bias_stride_n)
        if NAME is not None:
            result = apply_activation(result, up_result, NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT)
        out_ptrs = out_ptr + offset(slot, features) + columns
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty))
