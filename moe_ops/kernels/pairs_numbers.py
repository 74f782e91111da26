"""Weights of 4 bits, two in a byte, as numbers in registers, times their scales.

Of e2m1 a number's exponent and fraction are put where those of a bfloat16 end and begin, which makes it 2**126 times
as small, also where it has no leading one; its scale makes up for all but 2**63 of that, so that any weight of MXFP4
from 2**-63 to 2**64 is exact, and any of NVFP4, and a sum is to be multiplied with the rest, `MISSING`. Larger ones are
NaN. The code of an integer
becomes the end of the fraction of 128 or, in float16, of 1024, which then is taken off with the zero point; times its
scale it is rounded once, to the dtype of rows of 16 bits: they are multiplied with what weights of it would be.

Bytes are read one by one, or four at a time, which takes fewer instructions: then columns come in the order in which
they lie in words, and those of tokens have to be brought into it, `beside_words`.
"""

import triton
import triton.language as tl

from moe_ops.kernels.common import INTERPRETED

MISSING = tl.constexpr(2.0**63)

_LARGEST = tl.constexpr(191)  # exponent


def _ptx(lines: list[str], registers: str, outputs: int) -> str:
    """A block, with a word, `word`, of what is behind its outputs. In a line, as torch writes it into code."""
    return " ".join(["{", f".reg .b32 word, {registers};", f"mov.b32 word, ${outputs};", *lines, "}"])


def _of_e2m1(outputs: list[tuple[str, str]]) -> list[str]:
    """Each output by the mask of its numbers in `word`, and what brings them to the last bits of both halves."""
    lines = []
    for number, (mask, times) in enumerate(outputs):
        if number == 2:
            lines.append("shr.u32 word, word, 8;")
        lines += [
            f"and.b32 part, word, {mask};",
            f"mul.lo.u32 part, part, {times};",
            f"and.b32 ${number}, part, 0x81C081C0;",
        ]
    return lines


def _of_integers(kind: str, first: str, one: str, less: str, outputs: int) -> str:
    """Codes at the end of `first`, and `less` of that and 8, or the input behind the word, which has a zero point.

    As a fused product, for GPUs before Hopper add no bfloat16.
    """
    lines = [f"mov.b32 one, {one};", f"mov.b32 less, {less};"]
    if outputs == 1:
        lines.append("mul.lo.u32 word, word, 0x1001;")
    for number in range(outputs):
        if number:
            lines.append("shr.u32 word, word, 4;")
        lines += [
            f"lop3.b32 ${number}, word, 0x000F000F, {first}, 0xEA;",
            f"fma.rn.{kind} ${number}, ${number}, one, less;",
        ]
    return _ptx(lines, "one, less", outputs)


_LOW, _NEXT = ("0x000F000F", "0x1040"), ("0x00F000F0", "0x0104")
# A byte's numbers to the last bits of both halves of a word; of a word those that lie 16 bits apart, four times.
E2M1_OF_BYTES = tl.constexpr(_ptx(["mul.lo.u32 word, word, 0x1001;", *_of_e2m1([_LOW])], "part", 1))
E2M1_OF_WORDS = tl.constexpr(_ptx(_of_e2m1([_LOW, _NEXT, _LOW, _NEXT]), "part", 4))
_BFLOAT16 = {"kind": "bf16x2", "first": "0x43004300", "one": "0x3F803F80"}
_FLOAT16 = {"kind": "f16x2", "first": "0x64006400", "one": "0x3C003C00"}
BFLOAT16_OF_BYTES = tl.constexpr(_of_integers(**_BFLOAT16, less="0xC308C308", outputs=1))
BFLOAT16_OF_WORDS = tl.constexpr(_of_integers(**_BFLOAT16, less="0xC308C308", outputs=4))
FLOAT16_OF_BYTES = tl.constexpr(_of_integers(**_FLOAT16, less="0xE408E408", outputs=1))
FLOAT16_OF_WORDS = tl.constexpr(_of_integers(**_FLOAT16, less="0xE408E408", outputs=4))
# The same, less of that and a zero point.
BFLOAT16_OF_BYTES_AND_ZEROS = tl.constexpr(_of_integers(**_BFLOAT16, less="$2", outputs=1))
BFLOAT16_OF_WORDS_AND_ZEROS = tl.constexpr(_of_integers(**_BFLOAT16, less="$5", outputs=4))
FLOAT16_OF_BYTES_AND_ZEROS = tl.constexpr(_of_integers(**_FLOAT16, less="$2", outputs=1))
FLOAT16_OF_WORDS_AND_ZEROS = tl.constexpr(_of_integers(**_FLOAT16, less="$5", outputs=4))
_PRODUCT = "{{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.{kind} $0, $1, $2, none; }}"
PRODUCT_OF_BFLOAT16 = tl.constexpr(_PRODUCT.format(kind="bf16x2"))
PRODUCT_OF_FLOAT16 = tl.constexpr(_PRODUCT.format(kind="f16x2"))


@triton.jit
def of_float8(scale):
    """What float8_e4m3fn stands for, in float32; the interpreter's has no NaN."""
    found = scale.to(tl.float32)
    if INTERPRETED:
        bits = scale.to(tl.uint8, bitcast=True).to(tl.int32)
        found = tl.where((bits & 0x7F) == 0x7F, float("nan"), found)
    return found


@triton.jit
def factors(scale, DTYPE: tl.constexpr):
    """What numbers are multiplied with: a float32, or one of 16 bits in both halves of a word. Of e2m1 times 2**63."""
    if scale.dtype == tl.uint8:
        exponents = scale.to(tl.int32)
        found = tl.where(exponents > _LARGEST, 0x7FC07FC0, exponents * 0x00800080 + 0x1F801F80)
        if tl.float32 == DTYPE:
            found = (found & -0x10000).to(tl.float32, bitcast=True)
    elif scale.dtype == tl.float8e4nv:
        found = of_float8(scale) * MISSING
        if tl.float32 != DTYPE:
            found = ((found.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) * 0x10001
    elif tl.float32 != DTYPE and scale.dtype == DTYPE:
        found = (scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001
    else:
        found = scale.to(tl.float32)
    return found


@triton.jit
def shifts(zero, DTYPE: tl.constexpr):
    """Zero points as integers; in 16 bits of 128, or 1024, and one the negative, in both halves of a word."""
    found = zero.to(tl.int32)
    if tl.float32 != DTYPE:
        found = (found | (0xC300 if tl.bfloat16 == DTYPE else 0xE400)) * 0x10001
    return found


@triton.jit
def spread_scale(scale, COLUMNS: tl.constexpr):
    """[N, K / 32], or of NVFP4 [N, K / 16], as [N, COLUMNS]."""
    times: tl.constexpr = COLUMNS // scale.shape[1]
    spread = scale[:, :, None].broadcast_to(scale.shape[0], scale.shape[1], times)
    return spread.reshape(scale.shape[0], COLUMNS)


@triton.jit
def _in_32_bits(pairs, factor, shift, IS_E2M1: tl.constexpr):
    """[N, K] weights."""
    codes = pairs.to(tl.int32)
    if IS_E2M1:
        even = (((codes & 0x08) << 28) | ((codes & 0x07) << 22)).to(tl.float32, bitcast=True)
        odd = (((codes & 0x80) << 24) | ((codes & 0x70) << 18)).to(tl.float32, bitcast=True)
    else:
        less = 8 if shift is None else spread_scale(shift, pairs.shape[1])
        even, odd = ((codes & 15) - less).to(tl.float32), ((codes >> 4) - less).to(tl.float32)
    spread = spread_scale(factor, pairs.shape[1])
    return tl.join(even * spread, odd * spread).reshape(pairs.shape[0], 2 * pairs.shape[1])


@triton.jit
def _products(words, factor, DTYPE: tl.constexpr):
    """Both numbers in words times spread factors, rounded once: a last dimension of two."""
    if factor.dtype == tl.int32:
        PRODUCT: tl.constexpr = PRODUCT_OF_BFLOAT16 if tl.bfloat16 == DTYPE else PRODUCT_OF_FLOAT16
        words = tl.inline_asm_elementwise(
            PRODUCT, "=r,r,r", [words, factor], dtype=tl.int32, is_pure=True, pack=1
        )
    low = words.to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    if factor.dtype != tl.int32:
        low, high = (low.to(tl.float32) * factor).to(DTYPE), (high.to(tl.float32) * factor).to(DTYPE)
    return tl.join(low, high)


@triton.jit
def _of_bytes(pairs, factor, shift, DTYPE: tl.constexpr, IS_E2M1: tl.constexpr):
    """[N, K] weights of 16 bits."""
    IN_BFLOAT16: tl.constexpr = tl.bfloat16 == DTYPE
    BYTES: tl.constexpr = pairs.shape[1]
    if shift is None:
        INTEGERS: tl.constexpr = BFLOAT16_OF_BYTES if IN_BFLOAT16 else FLOAT16_OF_BYTES
        NUMBERS: tl.constexpr = E2M1_OF_BYTES if IS_E2M1 else INTEGERS
        words = tl.inline_asm_elementwise(
            NUMBERS, "=&r,r", [pairs.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        FROM_ZERO: tl.constexpr = BFLOAT16_OF_BYTES_AND_ZEROS if IN_BFLOAT16 else FLOAT16_OF_BYTES_AND_ZEROS
        given = [pairs.to(tl.int32), spread_scale(shift, BYTES)]
        words = tl.inline_asm_elementwise(FROM_ZERO, "=&r,r,r", given, dtype=tl.int32, is_pure=True, pack=1)
    weight = _products(words, spread_scale(factor, BYTES), DTYPE)
    return weight.reshape(pairs.shape[0], 2 * BYTES)


@triton.jit
def unpacked(pairs, factor, shift, DTYPE: tl.constexpr, IS_E2M1: tl.constexpr):
    """[N, K / 2] bytes, [N, K / 32] `factors` and, of zero points, `shifts` as [N, K] weights; e2m1 times 2**-63."""
    if tl.float32 == DTYPE:
        weight = _in_32_bits(pairs, factor, shift, IS_E2M1)
    else:
        weight = _of_bytes(pairs, factor, shift, DTYPE, IS_E2M1)
    return weight


@triton.jit
def _in_words(pairs):
    """[N, K / 2] bytes as [N, K / 8] words."""
    even, odd = tl.split(pairs.reshape(pairs.shape[0], pairs.shape[1] // 4, 2, 2))
    byte0, byte2 = tl.split(even.to(tl.int32))
    byte1, byte3 = tl.split(odd.to(tl.int32))
    return byte0 | (byte1 << 8) | (byte2 << 16) | (byte3 << 24)


@triton.jit
def side_by_side(first, second, third, last):
    """[N, K / 8, 2] numbers of words, four apart from the first to the fourth on, as [N, K]."""
    numbers = tl.join(tl.join(first, third), tl.join(second, last))  # N, word, half, two, one
    return numbers.reshape(first.shape[0], 8 * first.shape[1])


@triton.jit
def _ordered(rows):
    """[M, K] with columns in the order that words of them give.

    Of 32 columns four words beside each other hold eight each: first come those that each has as its first number of
    both halves, then as its second. So a thread that needs two columns in every eighth of them for the tensor cores has
    all numbers of a word.
    """
    ordered = rows.reshape(rows.shape[0], rows.shape[1] // 32, 4, 2, 2, 2).trans(0, 1, 4, 5, 2, 3)
    return ordered.reshape(rows.shape[0], rows.shape[1])


@triton.jit
def beside_words(x):
    """[M, K] as [K, M], in the order in which `unpacked_by_words` has columns."""
    return _ordered(x).trans(1, 0)


@triton.jit
def _of_words(pairs, factor, shift, DTYPE: tl.constexpr, IS_E2M1: tl.constexpr):
    """[N, K] weights of 16 bits, each word's numbers from one load."""
    IN_BFLOAT16: tl.constexpr = tl.bfloat16 == DTYPE
    words = _in_words(pairs)
    WORDS: tl.constexpr = words.shape[1]
    if shift is None:
        INTEGERS: tl.constexpr = BFLOAT16_OF_WORDS if IN_BFLOAT16 else FLOAT16_OF_WORDS
        NUMBERS: tl.constexpr = E2M1_OF_WORDS if IS_E2M1 else INTEGERS
        first, second, third, last = tl.inline_asm_elementwise(
            NUMBERS,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        FROM_ZERO: tl.constexpr = BFLOAT16_OF_WORDS_AND_ZEROS if IN_BFLOAT16 else FLOAT16_OF_WORDS_AND_ZEROS
        first, second, third, last = tl.inline_asm_elementwise(
            FROM_ZERO,
            "=&r,=&r,=&r,=&r,r,r",
            [words, spread_scale(shift, WORDS)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    factor = spread_scale(factor, WORDS)
    first, third = _products(first, factor, DTYPE), _products(third, factor, DTYPE)
    second, last = _products(second, factor, DTYPE), _products(last, factor, DTYPE)
    return side_by_side(first, second, third, last)


@triton.jit
def numbers_of_words(pairs, factor, shift, DTYPE: tl.constexpr, IS_E2M1: tl.constexpr):
    """As `unpacked`, by words. Float32 is for the interpreter, whose kernel is as a GPU's then."""
    if tl.float32 == DTYPE:
        weight = _in_32_bits(pairs, factor, shift, IS_E2M1)
    else:
        weight = _of_words(pairs, factor, shift, DTYPE, IS_E2M1)
    return weight


@triton.jit
def unpacked_by_words(pairs, factor, shift, DTYPE: tl.constexpr, IS_E2M1: tl.constexpr):
    """As `unpacked`, in another order of columns."""
    return _ordered(numbers_of_words(pairs, factor, shift, DTYPE, IS_E2M1))
