"""Types, shapes and conversions of Triton's interpreter, each made once; see `brisk`. No value depends on it.

A value's type is made with it, and a shape is a tuple of constants that each have a type: of an interpreted kernel that
took a third of the time. bfloat16 is float32 without its lower half, except where a number is subnormal.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

core = tl.core


@contextmanager
def shared_types() -> Iterator[None]:
    """Within it values of one shape have one, and those of one shape and dtype have one type.

    Triton 3.6 has other ways to some of it, which stay.
    """
    with ExitStack() as stack:
        for holder, name, make in (
            (core.block_type, "__init__", _block_type),
            (core.block_type, "with_element_ty", _with_element_type),
            (core.tensor, "__init__", _tensor),
            (core.dtype, "__eq__", _equal),
            (TritonSemantic, "computation_type_impl", _computation_type),
            (TritonSemantic, "_cast_to_computation_type", _cast),
            (TritonSemantic, "broadcast_impl_value", _broadcast),
            (interpreter, "_convert_float", _convert_float),
        ):
            if hasattr(holder, name):
                stack.enter_context(mock.patch.object(holder, name, make()))
        yield


def _block_type() -> Any:
    make = core.block_type.__init__
    known: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        sizes: Any = tuple([each if type(each) is int else core._unwrap_if_constexpr(each) for each in shape])
        if sizes not in known:
            make(self, element_ty, shape)  # or raises
            known[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = known[sizes]
        self.name = f"<{text}, {element_ty.name}>"

    return made


def _with_element_type() -> Any:
    make = core.block_type.with_element_ty
    known: dict[tuple[int, str], Any] = {}

    def made(self: Any, scalar_ty: Any) -> Any:
        if scalar_ty.is_ptr():  # not known by its name alone
            return make(self, scalar_ty)
        key = id(self.shape), scalar_ty.name  # what is kept has this shape, so the number stays its own
        if key not in known:
            known[key] = core.block_type(scalar_ty, self.shape)
            known[key].shape = self.shape
        return known[key]

    return made


def _tensor() -> Any:
    make = core.tensor.__init__
    known: dict[int, tuple[Any, Any, Any]] = {}

    def made(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if id(shape) not in known:
            make(self, handle, type)
            known[id(shape)] = self.shape, self.numel, shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel, _ = known[id(shape)]

    return made


def _equal() -> Any:
    compare = core.dtype.__eq__
    return lambda self, other: self is other or compare(self, other)


def _computation_type() -> Any:
    decide = TritonSemantic.computation_type_impl
    known: dict[tuple[Any, ...], Any] = {}

    def decided(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = decide(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]

    return decided


def _cast() -> Any:
    cast = TritonSemantic._cast_to_computation_type

    def converted(self: Any, value: Any, dtype: Any) -> Any:
        is_same = type(value) is core.tensor and value.dtype is dtype
        return value if is_same else cast(self, value, dtype)

    return converted


def _broadcast() -> Any:
    broadcast = TritonSemantic.broadcast_impl_value
    return lambda self, lhs, rhs: (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)


def _convert_float() -> Any:
    convert = interpreter._convert_float

    def converted(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        is_wider = source == tl.bfloat16 and target == tl.float32
        is_cut = source == tl.float32 and target == tl.bfloat16 and rounding is None
        if not is_wider and not is_cut:
            return convert(data, source, target, rounding)
        bits = data.view(np.uint16 if is_wider else np.uint32)
        exponent, rest = (0x7F80, 0x7F) if is_wider else (0x7F800000, 0x7FFFFF)
        if np.any(((bits & exponent) == 0) & ((bits & rest) != 0)):
            return convert(data, source, target, rounding)
        shifted = bits.astype(np.uint32) << 16 if is_wider else (bits >> 16).astype(np.uint16)
        return shifted.reshape(data.shape)

    return converted
