"""Device helpers shared by the kernels, and small host arithmetic."""

import torch
import triton
import triton.language as tl

from moe_ops._compat import CLAMP_PASSES_ITS_LIMIT

# The interpreter multiplies bfloat16 by its bit patterns, so there operands are widened first.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_PASSES_ITS_LIMIT = tl.constexpr(CLAMP_PASSES_ITS_LIMIT)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value` (1 for 0)."""
    return 1 << max(value - 1, 0).bit_length()


def cdiv(value: int, divisor: int) -> int:
    """Integer division, rounded up."""
    return -(-value // divisor)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: the type of routing, accumulation and combination."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@triton.jit
def offset(index, stride):
    """index * stride in 64 bits: columns of a column-major tensor lie 2**31 elements apart before it has 2**31 rows.

    Every stride that a tensor of the caller has is multiplied here. A stride of 1 is a constant and costs nothing.
    """
    return tl.cast(index, tl.int64) * stride


@triton.jit
def source_row(slots_ptr, rows, mask, top_k, num_tokens):
    """(token, whether there is one) of the slots in `rows`. Slots are the caller's and may be anything."""
    slots = tl.load(slots_ptr + rows, mask=mask, other=-1)
    token = slots // top_k
    return token, (slots >= 0) & (token < num_tokens)


@triton.jit
def sources_of_tile(rows, end, slots_ptr, top_k, num_tokens):
    """(where each of a tile's rows comes from, whether it does); its expert has those before `end`."""
    source, present = rows, rows < end
    if slots_ptr is not None:
        source, present = source_row(slots_ptr, rows, present, top_k, num_tokens)
    return source, present


@triton.jit
def slot_pointers(ids_ptr, slots, top_k, stride_t, stride_k):
    """Where the expert id of each slot is."""
    return ids_ptr + offset(slots // top_k, stride_t) + offset(slots % top_k, stride_k)


@triton.jit
def in_range(ids, count, otherwise):
    """int32 ids, `otherwise` for those outside [0, count): checked in their own width, before narrowing."""
    return tl.where((ids >= 0) & (ids < count), ids, otherwise).to(tl.int32)


@triton.jit
def local_expert(ids_ptr, map_ptr, slots, mask, top_k, stride_t, stride_k, num_ids, num_experts):
    """Local expert of each slot, `num_experts` where the slot is dropped or masked."""
    ids = tl.load(slot_pointers(ids_ptr, slots, top_k, stride_t, stride_k), mask=mask, other=-1)
    return mapped(ids, map_ptr, num_ids, num_experts)


@triton.jit
def mapped(ids, map_ptr, num_ids, num_experts):
    """Local experts of ids, `num_experts` for those that have none. The map is read for valid ids only."""
    if map_ptr is not None:
        ids = tl.load(map_ptr + in_range(ids, num_ids, 0), mask=(ids >= 0) & (ids < num_ids), other=-1)
    return in_range(ids, num_experts, num_experts)


@triton.jit
def joined(
    shared_ptr, shared_gate_ptr, residual_ptr, token, columns, inside,
    shared_stride_t, shared_stride_h, gate_stride_t, residual_stride_t, residual_stride_h, ACC: tl.constexpr,
):  # fmt: skip
    """What joins a token's sum over experts, at these columns: what there is of shared, gated or not, and residual."""
    total = tl.zeros(columns.shape, ACC)
    if shared_ptr is not None:
        shared_ptrs = shared_ptr + offset(token, shared_stride_t) + offset(columns, shared_stride_h)
        total = tl.load(shared_ptrs, mask=inside, other=0.0).to(ACC)
        if shared_gate_ptr is not None:
            total *= tl.sigmoid(tl.load(shared_gate_ptr + offset(token, gate_stride_t)).to(ACC))
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + offset(token, residual_stride_t) + offset(columns, residual_stride_h)
        total += tl.load(residual_ptrs, mask=inside, other=0.0).to(ACC)
    return total


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, in IEEE arithmetic for float32 (no TF32)."""
    if INTERPRETED:
        a = a.to(acc.dtype)
        b = b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def finished(product):
    """A float32 product, awaited where its left operand is made in registers: that of the next step may take them.

    Hopper's tensor cores read them as they get there, and Triton awaits no more than the registers' last but one use.
    """
    if not INTERPRETED:
        product = tl.inline_asm_elementwise(
            "// awaited", "=f,0", [product], dtype=tl.float32, is_pure=True, pack=1
        )
    return product


@triton.jit
def captured(gate, up, expert, columns, inside, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr):
    """Stands for a gate without a name, see `kernels/formula.py`, in kernels that are built again around one."""
    tl.static_assert(False, "a kernel of a formula was not built around it")
    return gate


@triton.jit
def activate(
    gate, up, expert, columns, inside, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr,
    NAME: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The gate of an expert, in compute dtype. A formula reads operands at `columns`, where they are `inside`."""
    if NAME == "formula":
        value = captured(
            gate, up, expert, columns, inside, operand0_ptr, operand1_ptr, operand2_ptr, operand3_ptr
        )
    else:
        value = apply_activation(gate, up, NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT)
    return value


@triton.jit
def apply_activation(
    gate, up, NAME: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The expert activation in compute dtype. Ungated ones ignore `up`."""
    value, _ = _gate(gate, NAME, ALPHA, BETA, LIMIT)
    if GATED:
        factor, _ = _up(up, NAME, BETA, LINEAR_BETA, LIMIT)
        value = value * factor
    return value


@triton.jit
def activation_gradient(
    grad, gate, up, NAME: tl.constexpr, GATED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """(d gate, d up) of `apply_activation`. At a limit a clamp passes what torch's does."""
    value, slope = _gate(gate, NAME, ALPHA, BETA, LIMIT)
    grad_gate = grad * slope
    grad_up = grad_gate
    if GATED:
        factor, up_slope = _up(up, NAME, BETA, LINEAR_BETA, LIMIT)
        grad_gate = grad_gate * factor
        grad_up = grad * value * up_slope
    return grad_gate, grad_up


@triton.jit
def _gate(gate, NAME: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """(value, slope) of the nonlinearity; the compiler drops a slope that nobody uses."""
    if NAME == "silu" or NAME == "swiglu_oai":
        clamped = gate if LIMIT is None else _at_most(gate, LIMIT)
        scaled = clamped if ALPHA is None else ALPHA * clamped
        sigmoid = tl.sigmoid(scaled)
        value = clamped * sigmoid
        slope = sigmoid + scaled * sigmoid * (1.0 - sigmoid)
        if LIMIT is not None:
            slope = tl.where(_is_held(gate, LIMIT), 0.0, slope)
    elif NAME == "swiglustep":
        sigmoid = tl.sigmoid(gate)
        value = _at_most(gate * sigmoid, LIMIT)
        slope = sigmoid + gate * sigmoid * (1.0 - sigmoid)
        slope = tl.where(_is_held(gate * sigmoid, LIMIT), 0.0, slope)
    elif NAME == "situ":
        sigmoid = tl.sigmoid(gate)
        tanh = tanh_of(gate / BETA)
        value = BETA * tanh * sigmoid
        slope = sigmoid * (1.0 - tanh * tanh + BETA * tanh * (1.0 - sigmoid))
    elif NAME == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        value = gate * cdf
        slope = cdf + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    elif NAME == "gelu_tanh":
        # 0.5 * (1 + tanh_of(z)) = sigmoid(2z)
        cdf = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        value = gate * cdf
        slope = cdf + gate * cdf * (1.0 - cdf) * 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    else:
        tl.static_assert(NAME == "relu2")
        positive = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def _up(up, NAME: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr):
    """(value, slope) of what the gate is multiplied by."""
    value = up
    slope = tl.full(up.shape, 1.0, up.dtype)
    if LIMIT is not None:
        value = _clamp(up, LIMIT)
        slope = tl.where(_is_held(tl.abs(up), LIMIT), 0.0, slope)
    if LINEAR_BETA is not None:
        tanh = tanh_of(up / LINEAR_BETA)
        value = LINEAR_BETA * tanh
        slope = 1.0 - tanh * tanh
    if NAME == "swiglu_oai":
        value = value + BETA
    return value, slope


@triton.jit
def tanh_of(value):
    """tanh, to the last digits also near 0."""
    result = 2.0 * tl.sigmoid(2.0 * value) - 1.0
    if value.dtype == tl.float32:
        # Near 0 the difference keeps few of float32's digits, and the series all.
        square = value * value
        series = 0.13333333333333333 - square * (0.05396825396825397 - square * 0.021869488536155203)
        series = value - value * square * (0.3333333333333333 - square * series)
        result = tl.where(square < 0.0625, series, result)
    return result


@triton.jit
def _is_held(value, LIMIT: tl.constexpr):
    """Where a clamp to at most LIMIT has a slope of 0."""
    limit = tl.full(value.shape, LIMIT, value.dtype)
    return value > limit if _PASSES_ITS_LIMIT else value >= limit


@triton.jit
def _at_most(value, LIMIT: tl.constexpr):
    # As a block of value's dtype: a bare number would be rounded to float32, also beside float64.
    return tl.minimum(value, tl.full(value.shape, LIMIT, value.dtype), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clamp(value, LIMIT: tl.constexpr):
    lowest = tl.full(value.shape, -LIMIT, value.dtype)
    return tl.maximum(_at_most(value, LIMIT), lowest, propagate_nan=tl.PropagateNan.ALL)
