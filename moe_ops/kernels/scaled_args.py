"""Arguments that kernels of quantised weights have in common: strides, zero points, global scales."""

from typing import Any

from moe_ops.kernels.program import Ref


def stride_args(name: str, strides: tuple[int, ...], letters: str) -> dict[str, int]:
    """A kernel's arguments for the strides of a tensor, a letter for each of its dimensions."""
    return {f"{name}_{letter}": stride for letter, stride in zip(letters, strides, strict=True)}


def zero_args(name: str, zero: Any) -> dict[str, Any]:
    """A kernel's arguments for zero points, the tensor of that name, if there are any."""
    strides = (0, 0, 0) if zero is None else zero.strides
    return {
        "zero_ptr": None if zero is None else Ref(name),
        **stride_args("zero_stride", strides, "enk"),
    }


def global_args(name: str, linear: Any) -> dict[str, Any]:
    """A kernel's arguments for a product's global scales, the tensor of that name, if there are any."""
    outer, features = linear.global_scale, linear.weight.shape[1]
    return {
        "global_ptr": None if outer is None else Ref(name),
        "global_rows": features if outer is None else features // outer.shape[1],
        **stride_args("global_stride", (0, 0) if outer is None else outer.strides, "en"),
    }
