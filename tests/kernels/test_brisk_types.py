"""Conversions of the interpreter that tests use have the bits of Triton's own."""

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.brisk_types import shared_types

TRITONS = interpreter._convert_float  # before anything replaces it
HALVES = np.arange(1 << 16, dtype=np.uint16)
SUBNORMAL = ((HALVES & 0x7F80) == 0) & ((HALVES & 0x7F) != 0)


@pytest.mark.parametrize(
    "some", [HALVES, HALVES[~SUBNORMAL], HALVES[~SUBNORMAL][:6].reshape(2, 3), HALVES[0]]
)
def test_bfloat16_to_and_from_float32(some: np.ndarray) -> None:
    some = np.asarray(some)
    wide = (some.astype(np.uint32) << 16 | some.astype(np.uint32)).reshape(some.shape)
    kinds = [(some, tl.bfloat16, tl.float32), (wide.view(np.float32), tl.float32, tl.bfloat16)]
    for data, source, target in kinds:
        expected = TRITONS(data, source, target, None)
        with shared_types():
            converted = interpreter._convert_float(data, source, target, None)
        assert converted.dtype == expected.dtype
        np.testing.assert_array_equal(converted, expected, strict=True)


def test_types_of_one_shape_are_told_apart_by_their_elements() -> None:
    with shared_types():
        blocks = [tl.block_type(kind, [2, 4]) for kind in (tl.int32, tl.float32)]
        assert blocks[0].shape is blocks[1].shape
        assert blocks[0] != blocks[1]
        assert [str(block) for block in blocks] == ["<['2', '4'], int32>", "<['2', '4'], fp32>"]
        pointer = tl.pointer_type(tl.int32)
        assert blocks[0].with_element_ty(tl.float32) == blocks[1]
        assert blocks[0].with_element_ty(pointer).scalar is pointer
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [3])
