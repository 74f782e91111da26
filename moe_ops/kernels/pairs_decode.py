"""Few tokens times weights of 4 bits: rows of their experts' weights, on no tensor core and with no sort.

Words of eight numbers of e2m1 become, four at a time, float8 by shifts: a number's exponent and fraction are the last
bits of a float8's exponent and the first of its fraction, which makes it 2**6 times as small. Integers become
the ends of fractions of float32, most of them where they are. Sums of a word are scaled, so that both are exact. What a
zero point differs from 8 comes to a word's sum times the sum of x, which all features share. A program is one warp: so
no thread needs columns of x that another has.
"""

import math
from typing import Any

import triton
import triton.language as tl

from moe_ops.e2m1 import FLOAT8, SCALES
from moe_ops.kernels.activation import gate_up_columns
from moe_ops.kernels.common import INTERPRETED, apply_activation, cdiv, local_expert, next_power_of_2, offset
from moe_ops.kernels.decode_args import route_args
from moe_ops.kernels.gemm import Operand, bias_args
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.pairs_numbers import of_float8
from moe_ops.kernels.program import Buffer, Launch, Ref, TensorMeta
from moe_ops.kernels.scaled import is_boxed
from moe_ops.kernels.scaled_args import global_args, stride_args, zero_args
from moe_ops.kernels.scaled_pairs import is_in_16_bits
from moe_ops.pairs import PAIRS

_FEATURES, _WORDS, _WARPS = 4, 64, 1  # of a program
_STEPS, _STEPS_FROM_ZEROS = 6, 3  # that are written out; zero points take registers
_CONVERTS_E4M3 = 89  # compute capability, times ten
_LARGEST = tl.constexpr(248)  # exponent
_WORD = 8  # columns
_MOST_TOKENS = 8
_MOST_NUMBERS, _MOST_OF_NVFP4 = 300e6, 400e6  # of weights, in all slots of several tokens


@triton.jit
def _powers(exponents):
    """2**(exponent - 121)."""
    bits = (exponents.to(tl.int32) + 6) << 23
    return tl.where(exponents > _LARGEST, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _value(numbers, BYTE: tl.constexpr):
    """The float8 in a byte of each word."""
    return ((numbers >> (8 * BYTE)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _e2m1(words):
    """Numbers of even columns, then of odd ones, times 2**-6."""
    if INTERPRETED:
        even = ((words << 4) & -0x7F7F7F80) | ((words << 2) & 0x1C1C1C1C)
        odd = (words & -0x7F7F7F80) | ((words >> 2) & 0x1C1C1C1C)
        numbers = (
            _value(even, 0), _value(even, 1), _value(even, 2), _value(even, 3),
            _value(odd, 0), _value(odd, 1), _value(odd, 2), _value(odd, 3),
        )  # fmt: skip
    else:
        numbers = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 even, odd, sign;
            .reg .b16 low, high;
            shl.b32 sign, $8, 4;
            and.b32 sign, sign, 0x80808080;
            shl.b32 even, $8, 2;
            lop3.b32 even, even, 0x1C1C1C1C, sign, 0xEA;
            and.b32 sign, $8, 0x80808080;
            shr.b32 odd, $8, 2;
            lop3.b32 odd, odd, 0x1C1C1C1C, sign, 0xEA;
            mov.b32 {low, high}, even;
            cvt.rn.f16x2.e4m3x2 even, low;
            mov.b32 {$0, $1}, even;
            cvt.rn.f16x2.e4m3x2 even, high;
            mov.b32 {$2, $3}, even;
            mov.b32 {low, high}, odd;
            cvt.rn.f16x2.e4m3x2 odd, low;
            mov.b32 {$4, $5}, odd;
            cvt.rn.f16x2.e4m3x2 odd, high;
            mov.b32 {$6, $7}, odd;
            }
            """,
            "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    return numbers


@triton.jit
def _integer(words, PLACE: tl.constexpr):
    """Of four bits, the `PLACE`th from 0 to 4: the end of a fraction beside a power of two, less that and 8."""
    bits = (words & (15 << (4 * PLACE))) | ((150 - 4 * PLACE) << 23)
    return bits.to(tl.float32, bitcast=True) - (2 ** (23 - 4 * PLACE) + 8)


@triton.jit
def _integers(words):
    """Numbers of even columns, then of odd ones."""
    high = words >> 12
    return (
        _integer(words, 0), _integer(words, 2), _integer(words, 4), _integer(high, 3),
        _integer(words, 1), _integer(words, 3), _integer(high, 2), _integer(high, 4),
    )  # fmt: skip


@triton.jit
def _loaded(ptrs, mask, DIM: tl.constexpr, POLICY: tl.constexpr):
    """What is there in words of `mask`, a vector across that dimension; zeros elsewhere. No mask: everywhere."""
    if mask is None:
        loaded = tl.load(ptrs, eviction_policy=POLICY)
    else:
        loaded = tl.load(ptrs, mask=tl.expand_dims(mask, DIM), other=0.0, eviction_policy=POLICY)
    return loaded


@triton.jit
def _products(
    words, scale, zero, x_sum, even0, even1, even2, even3, odd0, odd1, odd2, odd3
):  # fmt: skip
    """[N, W] of words of weights and x of their columns."""
    if scale.dtype == tl.uint8 or scale.dtype == tl.float8e4nv:
        scale = _powers(scale) if scale.dtype == tl.uint8 else of_float8(scale) * 64
        number0, number2, number4, number6, number1, number3, number5, number7 = _e2m1(words)
    else:
        number0, number2, number4, number6, number1, number3, number5, number7 = _integers(words)
    sums = number0.to(tl.float32) * even0[None, :]
    sums += number1.to(tl.float32) * odd0[None, :]
    sums += number2.to(tl.float32) * even1[None, :]
    sums += number3.to(tl.float32) * odd1[None, :]
    sums += number4.to(tl.float32) * even2[None, :]
    sums += number5.to(tl.float32) * odd2[None, :]
    sums += number6.to(tl.float32) * even3[None, :]
    sums += number7.to(tl.float32) * odd3[None, :]
    if zero is not None:
        less = (zero.to(tl.int32) | 0x4B000000).to(
            tl.float32, bitcast=True
        )  # 2**23 more: faster than converting
        sums += ((2**23 + 8) - less) * x_sum[None, :]
    return sums * scale.to(tl.float32)


@triton.jit
def _added(
    gate, up, x_row_ptr, x_stride_k, gate_ptr, up_ptr, gate_scale_ptr, up_scale_ptr, scale_stride_k,
    gate_zero_ptr, up_zero_ptr, zero_stride_k, start,
    END: tl.constexpr, GATED: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Sums of gate and up rows, and what words from `start` on give, those before END if there is one."""
    words = start + tl.arange(0, BLOCK_W)
    mask = words < END if END is not None else None
    inner = words[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = _loaded(x_row_ptr + offset(inner, x_stride_k), mask, 1, "").to(tl.float32)
    evens, odds = tl.split(x.reshape(BLOCK_W, 2, 2, 2))
    evens02, evens13 = tl.split(evens)
    odds02, odds13 = tl.split(odds)
    even0, even2 = tl.split(evens02)
    even1, even3 = tl.split(evens13)
    odd0, odd2 = tl.split(odds02)
    odd1, odd3 = tl.split(odds13)
    block = (words * 8) // BLOCK_COLUMNS
    places = offset(block, scale_stride_k)[None, :]
    x_sum, gate_zero, up_zero = None, None, None
    if gate_zero_ptr is not None:
        x_sum = ((even0 + even1) + (even2 + even3)) + ((odd0 + odd1) + (odd2 + odd3))
        gate_zero = _loaded(gate_zero_ptr + offset(block, zero_stride_k)[None, :], mask, 0, "evict_first")
    gate += _products(
        _loaded(gate_ptr + words[None, :], mask, 0, "evict_first"),
        _loaded(gate_scale_ptr + places, mask, 0, "evict_first"), gate_zero, x_sum,
        even0, even1, even2, even3, odd0, odd1, odd2, odd3,
    )  # fmt: skip
    if GATED:
        if up_zero_ptr is not None:
            up_zero = _loaded(up_zero_ptr + offset(block, zero_stride_k)[None, :], mask, 0, "evict_first")
        up += _products(
            _loaded(up_ptr + words[None, :], mask, 0, "evict_first"),
            _loaded(up_scale_ptr + places, mask, 0, "evict_first"), up_zero, x_sum,
            even0, even1, even2, even3, odd0, odd1, odd2, odd3,
        )  # fmt: skip
    return gate, up


# Strides of which nothing is known make words load one by one: so a thread has the columns of x that belong to its.
@triton.jit(do_not_specialize=["weight_stride_e", "weight_stride_n"])
def pairs_gemv_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, global_ptr, bias_ptr, ids_ptr, map_ptr, out_ptr, inverse_ptr,
    top_k, slots_of_row, num_ids, num_experts, features, block_rows, global_rows,
    x_stride_m, x_stride_k, ids_stride_t, ids_stride_k, weight_stride_e, weight_stride_n,
    scale_stride_e, scale_stride_n, scale_stride_k, zero_stride_e, zero_stride_n, zero_stride_k,
    global_stride_e, global_stride_n, bias_stride_e, bias_stride_n,
    NAME: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out[slot] = gate(weight[expert of slot] @ x[slot // slots_of_row]), or without a gate.

    A dropped slot writes nothing. inverse: where each slot's row is, -1 if there is none. Features are columns of the
    layer's other weight, and so whole words: BLOCK_N divides them.
    """
    blocks = tl.cdiv(features, BLOCK_N)
    slot, first = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * BLOCK_N
    expert = local_expert(
        ids_ptr, map_ptr, slot, slot >= 0, top_k, ids_stride_t, ids_stride_k, num_ids, num_experts
    )
    if inverse_ptr is not None:
        tl.store(inverse_ptr + slot, tl.where(expert < num_experts, slot, -1), mask=first == 0)
    if expert < num_experts:
        columns = first + tl.arange(0, BLOCK_N)
        gate_rows, up_rows = gate_up_columns(columns, features, GATED, INTERLEAVED)
        x_row_ptr = x_ptr + offset(slot // slots_of_row, x_stride_m)
        words_ptr = weight_ptr.to(tl.pointer_type(tl.int32)) + offset(expert, weight_stride_e // 4)
        expert_scale_ptr = scale_ptr + offset(expert, scale_stride_e)
        gate_ptr = words_ptr + offset(gate_rows, weight_stride_n // 4)[:, None]
        up_ptr = words_ptr + offset(up_rows, weight_stride_n // 4)[:, None]
        gate_scale_ptr = expert_scale_ptr + offset(gate_rows // block_rows, scale_stride_n)[:, None]
        up_scale_ptr = expert_scale_ptr + offset(up_rows // block_rows, scale_stride_n)[:, None]
        gate_zero_ptr, up_zero_ptr = None, None
        if zero_ptr is not None:
            expert_zero_ptr = zero_ptr + offset(expert, zero_stride_e)
            gate_zero_ptr = expert_zero_ptr + offset(gate_rows // block_rows, zero_stride_n)[:, None]
            up_zero_ptr = expert_zero_ptr + offset(up_rows // block_rows, zero_stride_n)[:, None]
        gate, up = tl.zeros((BLOCK_N, BLOCK_W), tl.float32), tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
        # Steps that are written out read ahead: with too many of them registers do not suffice.
        SPAN: tl.constexpr = BLOCK_W * AT_ONCE
        WHOLE: tl.constexpr = DEPTH // 8 // SPAN * SPAN
        for span in range(0, WHOLE, SPAN):
            for step in tl.static_range(AT_ONCE):
                gate, up = _added(
                    gate, up, x_row_ptr, x_stride_k, gate_ptr, up_ptr, gate_scale_ptr, up_scale_ptr, scale_stride_k,
                    gate_zero_ptr, up_zero_ptr, zero_stride_k,
                    span + step * BLOCK_W, None, GATED, BLOCK_COLUMNS, BLOCK_W,
                )  # fmt: skip
        for start in tl.static_range(WHOLE, DEPTH // 8, BLOCK_W):
            gate, up = _added(
                gate, up, x_row_ptr, x_stride_k, gate_ptr, up_ptr, gate_scale_ptr, up_scale_ptr, scale_stride_k,
                gate_zero_ptr, up_zero_ptr, zero_stride_k,
                start, DEPTH // 8 if start + BLOCK_W > DEPTH // 8 else None, GATED, BLOCK_COLUMNS, BLOCK_W,
            )  # fmt: skip
        result, up_result = tl.sum(gate, 1), tl.sum(up, 1)
        if global_ptr is not None:
            global_row_ptr = global_ptr + offset(expert, global_stride_e)
            of_gate, of_up = gate_rows // global_rows, up_rows // global_rows
            result *= tl.load(global_row_ptr + offset(of_gate, global_stride_n)).to(tl.float32)
            up_result *= tl.load(global_row_ptr + offset(of_up, global_stride_n)).to(tl.float32)
        if bias_ptr is not None:
            bias_row_ptr = bias_ptr + offset(expert, bias_stride_e)
            result += tl.load(bias_row_ptr + offset(gate_rows, bias_stride_n)).to(tl.float32)
            up_result += tl.load(bias_row_ptr + offset(up_rows, bias_stride_n)).to(tl.float32)
        if NAME is not None:
            result = apply_activation(result, up_result, NAME, GATED, ALPHA, BETA, LINEAR_BETA, LIMIT)
        out_ptrs = out_ptr + offset(slot, features) + columns
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty))


def multiplies_pairs(args: Any, gpu: Gpu) -> bool:
    """Whether a layer is for this kernel: its weights are words of eight columns, side by side, and tokens are few.

    Tokens with an expert in common read its weights each: with as many slots as experts 1.6 times on the average.
    """
    num_tokens, num_slots = args.topk_ids.shape[0], math.prod(args.topk_ids.shape)
    are_few = num_tokens <= _MOST_TOKENS and num_slots <= args.w13.weight.shape[0]
    if not are_few or not all(_is_of_words(each.weight) and _converts(each, gpu) for each in _linears(args)):
        return False
    return num_tokens == 1 or not _are_for_tiles(args, num_slots, gpu)


def _are_for_tiles(args: Any, num_slots: int, gpu: Gpu) -> bool:
    """Whether several tokens take less time in tiles: of as many numbers as make up for a sort, unpacked to 16 bits.

    On an H200 layers of six models that do take 0.39 to 1.03 of the time in MXFP4, 0.41 to 0.96 in int4 and 0.46 to
    1.06 in NVFP4; those that do not up to 1.8.
    """
    share = args.w13.weight.shape[0] / args.placement.num_ids(args.w13.weight.shape[0])
    numbers = share * num_slots * sum(each.weight.shape[1] * each.depth for each in _linears(args))
    is_nvfp4 = FLOAT8 in (each.scale.dtype for each in _linears(args))
    dtype = args.hidden_states.dtype
    return numbers > (_MOST_OF_NVFP4 if is_nvfp4 else _MOST_NUMBERS) and all(
        is_in_16_bits(each, dtype) and is_boxed(each, gpu) for each in _linears(args)
    )


def _linears(args: Any) -> tuple[Any, Any]:
    return args.w13, args.w2


def _converts(linear: Any, gpu: Gpu) -> bool:
    """Whether a GPU makes numbers of such weights: e2m1 by way of float8."""
    return linear.scale.dtype not in SCALES or gpu.capability >= _CONVERTS_E4M3


def _is_of_words(weight: TensorMeta) -> bool:
    """Of its last two strides one is 1: that of columns, where the other is of whole words."""
    in_words = all(size % 4 == 0 for size in (weight.shape[2], *weight.strides[:2]))
    return weight.dtype == PAIRS and weight.aligned and in_words


def pairs_gemv_launch(
    args: Any, x: tuple[str, TensorMeta], name: str, out: Buffer, gate: dict[str, Any]
) -> Launch:
    """Of the weight called `name` and rows x, called so, to `out`. gate: of `activation_args`."""
    top_k, linear = args.topk_ids.shape[1], getattr(args, name)
    weight, bias, features = linear.weight, linear.bias, out.shape[1]
    is_token, block_n = name == "w13", _FEATURES // (2 if gate["GATED"] else 1)
    given = {
        **route_args(args),
        **bias_args(None if bias is None else Operand(f"{name}_bias", bias)),
        **gate,
        "x_ptr": Ref(x[0]),
        "weight_ptr": Ref(name),
        "scale_ptr": Ref(f"{name}_scale"),
        **zero_args(f"{name}_zero", linear.zero),
        **global_args(f"{name}_global_scale", linear),
        "out_ptr": Ref(out.name),
        "inverse_ptr": Ref("inverse") if is_token else None,
        "top_k": top_k,
        "slots_of_row": top_k if is_token else 1,
        "features": features,
        "block_rows": linear.block_rows,
        "BLOCK_COLUMNS": min(linear.block_columns, linear.depth),
        **stride_args("x_stride", x[1].strides, "mk"),
        **stride_args("weight_stride", weight.strides[:2], "en"),
        **stride_args("scale_stride", linear.scale.strides, "enk"),
        "DEPTH": linear.depth,
        "BLOCK_N": block_n,
        "AT_ONCE": _STEPS if linear.zero is None else _STEPS_FROM_ZEROS,
        "BLOCK_W": min(_WORDS, next_power_of_2(linear.depth // _WORD)),
    }
    return Launch(
        pairs_gemv_kernel, (args.topk_ids.shape[0] * top_k * cdiv(features, block_n),), given, _WARPS, 1
    )
