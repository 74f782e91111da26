"""A first product whose gate and up weights are tensors of their own, as many models keep them.

`w13=(w1, w3)` is the same layer as `w13=torch.cat((w1, w3), 1)`, and neither is copied: kernels read both where they
lie. Its product [S, 2I] has gate columns, then up columns, so only gates that are not interleaved are for it.
"""

import torch
from torch import Tensor

from moe_ops import _checks, records
from moe_ops.activation import out_features
from moe_ops.errors import value_error
from moe_ops.formula import Formula
from moe_ops.types import Activation
from moe_ops.values import PairedLinear

Weight = Tensor | tuple[Tensor, Tensor]
"""Gate and up in one tensor, or in two: (gate, up)."""


def linear_of(name: str, weight: Weight, bias: Weight | None) -> PairedLinear:
    """The weight and bias that a public function got as `name`. Raises ValueError for a pair that is none."""
    if not isinstance(weight, tuple | list):
        if isinstance(bias, tuple | list):
            value_error("{}_bias is a pair: expected one tensor, as {} is", name, name)
        return PairedLinear(weight, bias)
    pairs = {name: weight, f"{name}_bias": (None, None) if bias is None else bias}
    for given, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            count = len(pair) if isinstance(pair, tuple | list) else 1
            value_error("{} has {} tensors: expected 2, of gate and of up", given, count)
    (gate, up), (gate_bias, up_bias) = pairs.values()
    return PairedLinear(gate, gate_bias, up, up_bias)


def expect_pair(name: str, linear: PairedLinear, input_name: str, x: Tensor) -> None:
    """Checks the up half of the product `name` of x, its input, against its gate half, which is checked."""
    if linear.up is None:
        if linear.up_bias is not None:
            value_error("up_bias of {} is given without up: expected both or none", name)
        return
    if (linear.bias is None) != (linear.up_bias is None):
        value_error("{} has one bias, bias or up_bias: expected both for a pair, or none", name)
    up, up_bias = (records.leaf_name(name, "weight", leaf) for leaf in ("up", "up_bias"))
    for leaf, first, second in ((up, linear.weight, linear.up), (up_bias, linear.bias, linear.up_bias)):
        if first is not None and second is not None:
            expect_like_gate(leaf, second, first, input_name, x)


def expect_like_gate(name: str, up: Tensor, gate: Tensor, input_name: str, x: Tensor) -> None:
    """Checks the up half of a weight or bias against its gate half: both are of a product of x, its input."""
    _checks.expect_shape(name, up, gate.shape)
    _checks.expect_same_dtype(x.dtype, input_name, **{name: up})
    _checks.expect_same_device(x.device, input_name, **{name: up})
    _expect_same_strides(name, up, gate)


def _expect_same_strides(name: str, tensor: Tensor, gate: Tensor) -> None:
    sizes = zip(tensor.shape, tensor.stride(), gate.stride(), strict=True)
    if any(not _is_one(size) and not _checks.are_equal(ours, theirs) for size, ours, theirs in sizes):
        value_error(
            "{} has strides {}: expected {}, those of the gate",
            name,
            list(tensor.stride()),
            list(gate.stride()),
        )


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def up_features(w13: PairedLinear, gate: Activation | Formula) -> int:
    """I, of a first product whose outcome goes through `gate`. Raises ValueError where they do not fit."""
    expect_halves("w13", w13, gate.is_gated, gate.interleaved)
    return out_features(w13.columns, gate, "w13")


def expect_halves(name: str, w13: PairedLinear, gated: bool, interleaved: bool) -> None:
    """Raises ValueError for a pair where a gate wants other columns than gate ones, then up ones."""
    if w13.up is not None and (interleaved or not gated):
        layout = "interleaved" if interleaved else "ungated"
        value_error(
            "{} is a pair with an {} activation: expected one of gate columns, then up columns", name, layout
        )
