"""Device helpers shared by the kernels, and small host arithmetic."""

import torch
import triton
import triton.language as tl

# The interpreter multiplies bfloat16 by its bit patterns, so there operands are widened first.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
def local_expert(ids_ptr, map_ptr, slots, mask, top_k, stride_t, stride_k, num_ids, num_experts):
    """Local expert of each slot, `num_experts` where the slot is dropped or masked.

    The range is checked in the ids' own width, before narrowing; the map is read for valid ids only.
    """
    slot_ptr = ids_ptr + offset(slots // top_k, stride_t) + offset(slots % top_k, stride_k)
    ids = tl.load(slot_ptr, mask=mask, other=-1)
    valid = (ids >= 0) & (ids < num_ids)
    local = tl.where(valid, ids, 0).to(tl.int32)
    if map_ptr is not None:
        local = tl.load(map_ptr + local, mask=valid, other=-1).to(tl.int32)
        valid = valid & (local >= 0) & (local < num_experts)
    return tl.where(valid, local, num_experts)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, in IEEE arithmetic for float32 (no TF32)."""
    if _INTERPRETED:
        a = a.to(acc.dtype)
        b = b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def apply_activation(gate, up, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The expert activation in compute dtype. Ungated ones ignore `up`."""
    if NAME == "swiglu_oai":
        gate = _at_most(gate, LIMIT)
        up = _clamp(up, LIMIT)
        result = (up + 1.0) * gate * tl.sigmoid(ALPHA * gate)
    elif NAME == "silu":
        if LIMIT is not None:
            gate = _at_most(gate, LIMIT)
            up = _clamp(up, LIMIT)
        result = gate * tl.sigmoid(gate) * up
    elif NAME == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif NAME == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) = sigmoid(2z)
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        tl.static_assert(NAME == "relu2")
        positive = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = positive * positive
    return result


@triton.jit
def activation_gradient(grad, gate, up, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """(d gate, d up) of `apply_activation`. A clamped value passes the gradient where it equals its bound."""
    if NAME == "swiglu_oai":
        clamped_gate = _at_most(gate, LIMIT)
        clamped_up = _clamp(up, LIMIT)
        sigmoid = tl.sigmoid(ALPHA * clamped_gate)
        slope = sigmoid + clamped_gate * ALPHA * sigmoid * (1.0 - sigmoid)
        grad_gate = tl.where(gate > LIMIT, 0.0, grad * (clamped_up + 1.0) * slope)
        grad_up = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, grad * clamped_gate * sigmoid)
    elif NAME == "silu":
        clamped_gate = gate
        clamped_up = up
        if LIMIT is not None:
            clamped_gate = _at_most(gate, LIMIT)
            clamped_up = _clamp(up, LIMIT)
        sigmoid = tl.sigmoid(clamped_gate)
        grad_gate = grad * clamped_up * (sigmoid + clamped_gate * sigmoid * (1.0 - sigmoid))
        grad_up = grad * clamped_gate * sigmoid
        if LIMIT is not None:
            grad_gate = tl.where(gate > LIMIT, 0.0, grad_gate)
            grad_up = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, grad_up)
    elif NAME == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        grad_gate = grad * up * (cdf + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate))
        grad_up = grad * gate * cdf
    elif NAME == "gelu_tanh":
        cdf = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        grad_gate = grad * up * (cdf + gate * cdf * (1.0 - cdf) * slope)
        grad_up = grad * gate * cdf
    else:
        tl.static_assert(NAME == "relu2")
        grad_gate = grad * 2.0 * tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        grad_up = grad_gate
    return grad_gate, grad_up


@triton.jit
def _at_most(value, LIMIT: tl.constexpr):
    # As a block of value's dtype: a bare number would be rounded to float32, also beside float64.
    return tl.minimum(value, tl.full(value.shape, LIMIT, value.dtype), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _clamp(value, LIMIT: tl.constexpr):
    lowest = tl.full(value.shape, -LIMIT, value.dtype)
    return tl.maximum(_at_most(value, LIMIT), lowest, propagate_nan=tl.PropagateNan.ALL)
