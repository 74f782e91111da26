"""What the PTX of `pairs_numbers` makes of every byte, by its instructions: the interpreter runs none."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from moe_ops.kernels import pairs_numbers as pairs
from moe_ops.pairs import paired
from tests.kernels.test_scaled_pairs import number

BYTES = torch.arange(256)
APART = 4  # columns between the two numbers that words make of four bytes


def _halves(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., 2] numbers of 16 bits in a word of 32, that of the lower half first."""
    both = torch.stack((word & 0xFFFF, word >> 16), -1)
    return torch.where(both < 2**15, both, both - 2**16).to(torch.int16).view(dtype)


def _fused(operands: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    first, second, third = (_halves(each, dtype).double() for each in operands)
    bits = (first * second + third).to(dtype).view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | bits[..., 1] << 16


def _run(ptx: str, *given: torch.Tensor, outputs: int = 1) -> list[torch.Tensor]:
    """The words $0 and on that the text makes of those behind them."""
    held = {f"${place}": value for place, value in enumerate(given, outputs)}
    for line in re.findall(r"(\b[a-z]\w*\.[\w.]+ [^;]*);", ptx):
        name, _, rest = line.partition(" ")
        result, *read = rest.split(", ")
        values = [
            held[each] if each in held else torch.tensor(int(each, 0)).expand(given[0].shape) for each in read
        ]
        if name == "mov.b32":
            (held[result],) = values
        elif name == "mul.lo.u32":
            held[result] = values[0] * values[1] & 0xFFFFFFFF
        elif name == "and.b32":
            held[result] = values[0] & values[1]
        elif name == "shr.u32":
            held[result] = values[0] >> values[1]
        elif name == "lop3.b32" and read[3] == "0xEA":
            held[result] = values[0] & values[1] | values[2]
        else:
            kind = name.removeprefix("fma.rn.")
            held[result] = _fused(values, {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[kind])
    return [held[f"${place}"] for place in range(outputs)]


def _of_bytes(ptx, dtype, *given) -> torch.Tensor:
    """[256, 2] numbers of every byte."""
    return _halves(_run(ptx.value, BYTES, *given)[0], dtype)


def _of_words(ptx, dtype, codes, *given) -> torch.Tensor:
    """[..., 8] numbers of words of codes [..., 8]."""
    words = (codes << 4 * torch.arange(8)).sum(-1)
    made = _run(ptx.value, words, *given, outputs=4)
    return torch.stack([_halves(each, dtype) for each in made], -1).flatten(-2)


def _all_codes() -> torch.Tensor:
    """[256, 8]: of each pair of a column and the one beside it, and others around."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (8, 256, 8), generator=generator)
    for column in range(8):
        codes[column, :, column], codes[column, :, (column + 1) % 8] = BYTES & 15, BYTES >> 4
    return codes.flatten(0, 1)


def test_numbers_of_mxfp4():
    found = _of_bytes(pairs.E2M1_OF_BYTES, torch.bfloat16).double() * 2.0**126
    assert found.tolist() == [[number(byte & 15), number(byte >> 4)] for byte in range(256)]


def test_numbers_of_mxfp4_in_words():
    codes = _all_codes()
    found = _of_words(pairs.E2M1_OF_WORDS, torch.bfloat16, codes).double() * 2.0**126
    assert found.tolist() == [[number(code) for code in row] for row in codes.tolist()]


@pytest.mark.parametrize(
    ("of_bytes", "of_words", "dtype"),
    [
        (pairs.BFLOAT16_OF_BYTES, pairs.BFLOAT16_OF_WORDS, torch.bfloat16),
        (pairs.FLOAT16_OF_BYTES, pairs.FLOAT16_OF_WORDS, torch.float16),
    ],
    ids=["bfloat16", "float16"],
)
def test_integers(of_bytes, of_words, dtype):
    found = _of_bytes(of_bytes, dtype)
    assert found.tolist() == [[(byte & 15) - 8, (byte >> 4) - 8] for byte in range(256)]
    codes = _all_codes()
    assert torch.equal(_of_words(of_words, dtype, codes), (codes - 8).to(dtype))


@pytest.mark.parametrize(
    ("of_bytes", "of_words", "dtype"),
    [
        (pairs.BFLOAT16_OF_BYTES_AND_ZEROS, pairs.BFLOAT16_OF_WORDS_AND_ZEROS, torch.bfloat16),
        (pairs.FLOAT16_OF_BYTES_AND_ZEROS, pairs.FLOAT16_OF_WORDS_AND_ZEROS, torch.float16),
    ],
    ids=["bfloat16", "float16"],
)
def test_integers_from_zero_points(of_bytes, of_words, dtype):
    codes = _all_codes()
    for zero in range(16):
        shift = _shift_of(zero, dtype)
        found = _of_bytes(of_bytes, dtype, torch.full((256,), shift))
        assert found.tolist() == [[(byte & 15) - zero, (byte >> 4) - zero] for byte in range(256)]
        found = _of_words(of_words, dtype, codes, torch.full(codes.shape[:1], shift))
        assert torch.equal(found, (codes - zero).to(dtype))


@pytest.mark.parametrize(
    ("ptx", "dtype"),
    [(pairs.PRODUCT_OF_BFLOAT16, torch.bfloat16), (pairs.PRODUCT_OF_FLOAT16, torch.float16)],
    ids=["bfloat16", "float16"],
)
def test_products(ptx, dtype):
    numbers, factors = torch.randn(2, 256, 2).to(dtype)
    words = [each.view(torch.int16).long() & 0xFFFF for each in (numbers, factors)]
    (found,) = _run(ptx.value, *(each[:, 0] | each[:, 1] << 16 for each in words))
    assert torch.equal(_halves(found, dtype), numbers * factors)


interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


@triton.jit
def _prepared_kernel(scale_ptr, zero_ptr, factor_ptr, shift_ptr, DTYPE: tl.constexpr):
    places = tl.arange(0, 256)
    tl.store(factor_ptr + places, pairs.factors(tl.load(scale_ptr + places), DTYPE))
    tl.store(shift_ptr + places, pairs.shifts(tl.load(zero_ptr + places), DTYPE))


def _prepared(scale: torch.Tensor, dtype: tl.dtype, made: torch.dtype = torch.int32) -> list[torch.Tensor]:
    """`factors` of 256 scales, and `shifts` of zero points from 0 to 15 in turn."""
    found = torch.empty(256, dtype=made), torch.empty(256, dtype=torch.int32)
    _prepared_kernel[(1,)](scale, (BYTES % 16).to(torch.uint8), *found, dtype)
    return [each.long() & 0xFFFFFFFF if each.dtype == torch.int32 else each for each in found]


def _shift_of(zero: int, dtype: torch.dtype) -> int:
    return ((0xC300 if dtype == torch.bfloat16 else 0xE400) | zero) * 0x10001


@interpreted
def test_powers_in_both_halves_of_a_word():
    factors, shifts = _prepared(BYTES.to(torch.uint8), tl.bfloat16)
    expected = torch.where(BYTES > 191, float("nan"), 2.0 ** (BYTES - 64.0))
    torch.testing.assert_close(
        _halves(factors, torch.bfloat16).double(), expected.double()[:, None].expand(256, 2), equal_nan=True,
        rtol=0, atol=0,
    )  # fmt: skip
    assert shifts[:16].tolist() == [_shift_of(zero, torch.bfloat16) for zero in range(16)]
    in_float32, zeros = _prepared(BYTES.to(torch.uint8), tl.float32, torch.float32)
    torch.testing.assert_close(in_float32, expected.float(), equal_nan=True, rtol=0, atol=0)
    assert zeros[:16].tolist() == list(range(16))


@interpreted
def test_scales_of_8_bits_in_both_halves_of_a_word():
    """All of them; of the bits of a NaN there is one."""
    scale = BYTES.to(torch.uint8).view(torch.float8_e4m3fn)
    expected = scale.double() * 2.0**63
    assert expected.isnan().sum() == 2
    found = _halves(_prepared(scale, tl.bfloat16)[0], torch.bfloat16).double()
    torch.testing.assert_close(found, expected[:, None].expand(256, 2), equal_nan=True, rtol=0, atol=0)
    in_float32, _ = _prepared(scale, tl.float32, torch.float32)
    torch.testing.assert_close(in_float32, expected.float(), equal_nan=True, rtol=0, atol=0)


@interpreted
def test_scales_in_both_halves_of_a_word():
    scale = torch.randn(256, dtype=torch.float16)
    factors, shifts = _prepared(scale, tl.float16)
    assert torch.equal(_halves(factors, torch.float16), scale[:, None].expand(256, 2))
    assert shifts[:16].tolist() == [_shift_of(zero, torch.float16) for zero in range(16)]
    assert torch.equal(_prepared(scale.float(), tl.float16, torch.float32)[0], scale.float())


@triton.jit
def _side_by_side_kernel(numbers_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr):
    """Numbers lie [4, N, K / 8, 2]: each output's of every word."""
    words = tl.arange(0, N)[:, None, None] * (K // 8) + tl.arange(0, K // 8)[None, :, None]
    place = numbers_ptr + words * 2 + tl.arange(0, 2)[None, None, :]
    SIZE: tl.constexpr = N * K // 4
    weight = pairs.side_by_side(
        tl.load(place), tl.load(place + SIZE), tl.load(place + 2 * SIZE), tl.load(place + 3 * SIZE)
    )
    tl.store(out_ptr + tl.arange(0, N)[:, None] * K + tl.arange(0, K)[None, :], weight)


@interpreted
@pytest.mark.parametrize("depth", [32, 64, 128])
def test_numbers_of_words_lie_as_their_columns_do(depth):
    weight = torch.randint(-9, 9, (8, depth)).float()
    numbers = (
        weight.view(8, depth // 8, 2, APART).permute(3, 0, 1, 2).contiguous()
    )  # as `_of_words` finds them
    out = torch.empty(8, depth)
    _side_by_side_kernel[(1,)](numbers, out, 8, depth)
    assert torch.equal(out, weight)


@triton.jit
def _beside_kernel(x_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :])
    tl.store(out_ptr + tl.arange(0, K)[:, None] * M + tl.arange(0, M)[None, :], pairs.beside_words(x))


@interpreted
def test_a_thread_of_the_tensor_cores_has_whole_words():
    """Of 16 columns it multiplies 2t, 2t + 1, 2t + 8 and 2t + 9; of 32 in a row t is one word's."""
    columns, out = torch.arange(64).float().repeat(2, 1), torch.empty(64, 2)
    _beside_kernel[(1,)](columns, out, 2, 64)
    words = (out[:, 0].long() // 8).view(
        2, 2, 2, 4, 2
    )  # 32 columns, 16 of them, 8 of them, thread, two beside each other
    for half, thread in ((half, thread) for half in range(2) for thread in range(4)):
        assert (words[half, :, :, thread] == 4 * half + thread).all()


@triton.jit
def _words_kernel(pairs_ptr, out_ptr, N: tl.constexpr, BYTES: tl.constexpr):
    places = tl.arange(0, N)[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    words = pairs._in_words(tl.load(pairs_ptr + places))
    tl.store(out_ptr + tl.arange(0, N)[:, None] * (BYTES // 4) + tl.arange(0, BYTES // 4)[None, :], words)


@interpreted
def test_bytes_in_words():
    given, out = torch.randint(0, 256, (8, 16), dtype=torch.uint8), torch.empty(8, 4, dtype=torch.int32)
    _words_kernel[(1,)](given, out, 8, 16)
    assert torch.equal(out, given.view(torch.int32))


class _Made:
    """What the interpreter takes of `inline_asm`."""

    def __init__(self, words: list[torch.Tensor]) -> None:
        self.words = words

    def get_result(self, index: int) -> interpreter.TensorHandle:
        return interpreter.TensorHandle(self.words[index].numpy().astype("uint32").view("int32"), tl.int32)


@pytest.fixture
def ptx_by_instructions(monkeypatch):
    """The interpreter runs PTX as `_run` does."""

    def create(ptx, constraints, values, types, is_pure, pack):
        given = [torch.from_numpy(each.data.astype("int64")) & 0xFFFFFFFF for each in values]
        return _Made(_run(ptx, *given, outputs=len(types)))

    monkeypatch.setattr(interpreter.interpreter_builder, "create_inline_asm", create)


@triton.jit
def _unpacked_kernel(
    pairs_ptr, scale_ptr, zero_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr,
    DTYPE: tl.constexpr, GROUP: tl.constexpr, IS_E2M1: tl.constexpr, BY_WORDS: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, N)[:, None]
    groups = rows * (K // GROUP) + tl.arange(0, K // GROUP)[None, :]
    given = tl.load(pairs_ptr + rows * (K // 2) + tl.arange(0, K // 2)[None, :])
    factor, shift = pairs.factors(tl.load(scale_ptr + groups), DTYPE), None
    if zero_ptr is not None:
        shift = pairs.shifts(tl.load(zero_ptr + groups), DTYPE)
    if BY_WORDS:
        weight = pairs._of_words(given, factor, shift, DTYPE, IS_E2M1)
    else:
        weight = pairs._of_bytes(given, factor, shift, DTYPE, IS_E2M1)
    tl.store(out_ptr + rows * K + tl.arange(0, K)[None, :], weight.to(tl.float32))


FORMATS = [("mxfp4", torch.uint8, torch.bfloat16), ("nvfp4", torch.float8_e4m3fn, torch.bfloat16)] + [
    (form, scale, dtype)
    for form in ("integers", "zero points")
    for scale, dtype in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
    )
]


@interpreted
@pytest.mark.parametrize("by_words", [True, False])
@pytest.mark.parametrize(("form", "scale_dtype", "dtype"), FORMATS, ids=str)
def test_weights_of_16_bits(form, scale_dtype, dtype, by_words, ptx_by_instructions):
    """In the order of columns: what helpers make of PTX is put where it belongs."""
    codes = torch.randint(0, 16, (8, 64))
    stored = paired(codes)
    zero = torch.randint(0, 16, (8, 2), dtype=torch.uint8) if form == "zero points" else None
    group, is_e2m1 = 16 if form == "nvfp4" else 32, form in ("mxfp4", "nvfp4")
    if is_e2m1:
        scale = torch.randint(120, 134, (8, 2), dtype=torch.uint8)
        numbers = torch.tensor([[number(code) for code in row] for row in codes.tolist()])
        factor = 2.0 ** (scale.double() - 64 - 126)  # numbers are 2**126 times as small
        if form == "nvfp4":
            scale = torch.randint(127, (8, 4), dtype=torch.uint8).view(scale_dtype)
            factor = scale.double() * 2.0 ** (63 - 126)
    else:
        scale = (torch.rand(8, 2) + 0.5).to(scale_dtype)
        factor, less = scale.double(), 8 if zero is None else zero.long().repeat_interleave(32, 1)
        numbers = (codes - less).double()
    out = torch.empty(8, 64)
    names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    _unpacked_kernel[(1,)](stored, scale, zero, out, 8, 64, names[dtype], group, is_e2m1, by_words)
    exact = numbers.double() * factor.repeat_interleave(group, 1)
    assert (out.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
