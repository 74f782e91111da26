"""What the PTX of `scaled_pairs` makes of every byte, by the instructions it consists of: the interpreter runs none."""

import re

import pytest
import torch

from moe_ops.kernels import scaled_pairs as pairs
from tests.kernels.test_scaled_pairs import number

BYTES = torch.arange(256)


def _halves(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., 2] numbers of 16 bits in a word of 32, that of the lower half first."""
    both = torch.stack((word & 0xFFFF, word >> 16), -1)
    return torch.where(both < 2**15, both, both - 2**16).to(torch.int16).view(dtype)


def _fused(operands: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    first, second, third = (_halves(each, dtype).double() for each in operands)
    bits = (first * second + third).to(dtype).view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | bits[..., 1] << 16


def _run(ptx: str, *given: torch.Tensor) -> torch.Tensor:
    """The word $0 that the text makes of $1 and $2."""
    held = {f"${place}": value for place, value in enumerate(given, 1)}
    for line in re.findall(r"^(\w+\.[\w.]+ .*);$", ptx, re.MULTILINE):
        name, _, rest = line.partition(" ")
        result, *read = rest.split(", ")
        values = [held[each] if each in held else torch.tensor(int(each, 16)).expand(256) for each in read]
        if name == "mov.b32":
            (held[result],) = values
        elif name == "mul.lo.u32":
            held[result] = values[0] * values[1] & 0xFFFFFFFF
        elif name == "and.b32":
            held[result] = values[0] & values[1]
        elif name == "lop3.b32" and read[3] == "0xEA":
            held[result] = values[0] & values[1] | values[2]
        else:
            kind = name.removeprefix("fma.rn.")
            held[result] = _fused(values, {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[kind])
    return held["$0"]


def test_numbers_of_mxfp4():
    found = _halves(_run(pairs._MXFP4.value, BYTES), torch.bfloat16).double() * 2.0**126
    assert found.tolist() == [[number(byte & 15), number(byte >> 4)] for byte in range(256)]


@pytest.mark.parametrize(
    ("ptx", "dtype"),
    [(pairs._IN_BFLOAT16, torch.bfloat16), (pairs._IN_FLOAT16, torch.float16)],
    ids=["bfloat16", "float16"],
)
def test_integers(ptx, dtype):
    found = _halves(_run(ptx.value, BYTES), dtype)
    assert found.tolist() == [[(byte & 15) - 8, (byte >> 4) - 8] for byte in range(256)]


@pytest.mark.parametrize(
    ("ptx", "dtype", "first"),
    [
        (pairs._FROM_ZERO_IN_BFLOAT16, torch.bfloat16, 0xC300),
        (pairs._FROM_ZERO_IN_FLOAT16, torch.float16, 0xE400),
    ],
    ids=["bfloat16", "float16"],
)
def test_integers_from_zero_points(ptx, dtype, first):
    for zero in range(16):
        found = _halves(_run(ptx.value, BYTES, torch.full((256,), (first | zero) * 0x10001)), dtype)
        assert found.tolist() == [[(byte & 15) - zero, (byte >> 4) - zero] for byte in range(256)]


@pytest.mark.parametrize(
    ("ptx", "dtype"),
    [(pairs._OF_BFLOAT16, torch.bfloat16), (pairs._OF_FLOAT16, torch.float16)],
    ids=["bfloat16", "float16"],
)
def test_products(ptx, dtype):
    numbers, factors = torch.randn(2, 256, 2).to(dtype)
    words = [each.view(torch.int16).long() & 0xFFFF for each in (numbers, factors)]
    found = _halves(_run(ptx.value, *(each[:, 0] | each[:, 1] << 16 for each in words)), dtype)
    assert torch.equal(found, numbers * factors)
