"""The levels of what makes 8 bits: rows, and a module whose weights `quantise_experts` made."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moe_ops
from tests.fuzz import rounding
from tests.fuzz.levels import LEVELS, Routed, module_of
from tests.fuzz.problem import Mismatch, Problem, Tensors, layer_bound, routing_bound, without_none
from tests.fuzz.quantised import OfLayer, Quantised, compiled, meant, of_parts, shift, spread
from tests.fuzz.quantised_cases import num_blocks
from tests.fuzz.rounding import Known
from tests.fuzz.tensors import Maker


def quantise_rows(make: Maker) -> Problem:
    """Each number to the nearest, each scale of its block's largest; NaN stays in its block."""
    case, quantised = make.case, Quantised(make)
    x, dtype = quantised.tokens(), quantised.dtype
    columns = quantised.scaled.w13_block[1]
    call = compiled(case, lambda t: moe_ops.quantise_rows(t["x"], columns, dtype))

    def run(t: Tensors) -> None:
        rows, scale = call(t)
        _expect_nearest(x.double().float().double(), rows, scale, columns, dtype)
        if not case.poisoned or not x.numel() or case.hidden_layout == "expanded":
            return
        row, column = (int(make.uniform(1) * size) for size in x.shape)
        kept = x[row, column].clone()
        x[row, column] = float("nan")
        _, spoilt = call(t)
        x[row, column] = kept
        is_its = torch.zeros_like(spoilt, dtype=torch.bool)
        is_its[row, column // columns] = True
        if not torch.equal(spoilt.isnan(), is_its) or not torch.equal(spoilt[~is_its], scale[~is_its]):
            raise Mismatch(f"a NaN at [{row}, {column}]: other scales changed, or its own is a number")

    return Problem({"x": x}, run, lambda t: torch.zeros(0), 0.0, constants=frozenset("x"))


def _expect_nearest(x: Tensor, rows: Tensor, scale: Tensor, columns: int, dtype: torch.dtype) -> None:
    most = 127.0 if dtype == torch.int8 else 448.0
    blocks = num_blocks(x.shape[1], columns)
    if rows.dtype != dtype or rows.shape != x.shape or scale.shape != (x.shape[0], blocks):
        raise Mismatch(f"rows {rows.dtype} {list(rows.shape)}, scales {list(scale.shape)}")
    for block in range(blocks):
        part = slice(block * columns, (block + 1) * columns)
        largest = x[:, part].abs().amax(1)
        is_zero = largest < rounding.LEAST_LARGEST
        wanted = (largest / most).where(~is_zero, 1.0)
        error = (scale[:, block].double() - wanted).abs()
        exact = x[:, part] * (most / largest.where(~is_zero, 1.0)).where(~is_zero, 0.0).unsqueeze(1)
        slack = 4 * rounding.SINGLE * exact.abs()
        step = torch.exp2((exact.abs() + slack).clamp(min=2.0**-6).log2().floor()) / 8
        step = torch.ones_like(step) if dtype == torch.int8 else step
        off = (rows[:, part].double() - exact).abs()
        if not (error <= rounding.SINGLE * wanted + rounding.LEAST_SINGLE).all():
            raise Mismatch(f"scales of block {block}: off by up to {error.max():.3e}")
        if not (off <= step / 2 + slack).all():
            raise Mismatch(f"rows of block {block}: off by up to {(off / step).max():.3f} steps")


def quantised_layer(make: Maker) -> Problem:
    case, quantised, routed, sizes = make.case, Quantised(make), Routed(make), {}
    module = module_of(make, routed)
    weights = _quantise(module, quantised)
    tensors = without_none(
        hidden_states=quantised.tokens(), router_logits=routed.logits, w13_bias=make.bias(case.columns),
        w2_bias=make.bias(case.hidden), shared=make.shared(),
    )  # fmt: skip

    def run(t: Tensors) -> Tensor:
        biases = {name: tensor for name, tensor in t.items() if name in ("w13_bias", "w2_bias")}
        inputs = t["hidden_states"], t["router_logits"], t.get("shared")
        return torch.func.functional_call(module, biases, inputs)

    def routing(t: Tensors) -> Known:
        value = routed.weights(t["router_logits"].double(), sizes)
        return Known(value, routing_bound(case) * value.detach().abs())

    bound = max(layer_bound(case), routing_bound(case))
    problem = OfLayer(quantised, weights, routed.expert, routing).problem(tensors, run, bound, sizes=sizes)
    if (
        quantised.scaled.rows == "quantised"
    ):  # a gradient of logits is that of weights, with no bound of its own
        problem = replace(problem, constants=problem.constants | {"router_logits"})
    return problem


def _quantise(module: Any, quantised: Quantised) -> rounding.Weights:
    """What the module's weights are then; raises Mismatch where one is not the nearest to what it was."""
    from layers import quantise_experts
    from layers.weights.scales import WeightScale

    make, scaled, case = quantised.make, quantised.scaled, quantised.make.case
    with torch.no_grad():
        for parameter, given in ((module.w13_weight, make.w13()), (module.w2_weight, make.w2())):
            parameter.copy_(given)
    before = [each.detach().clone() for each in (module.w13_weight, module.w2_weight)]
    kind = WeightScale(scaled.kind)
    how = {"dtype": quantised.made, "rows": scaled.rows, "zero_points": scaled.zero_points}
    quantise_experts(module, kind, scaled.w13_block, **how)
    blocks = [_block_of(scaled, case, *each.shape[1:]) for each in before]
    dense = []
    for name, block, was in zip(("w13_weight", "w2_weight"), blocks, before, strict=True):
        stored, scale = getattr(module, name), getattr(module, f"{name}_scale")
        if scaled.kind == "tensor":
            scale = scale.unsqueeze(2) if scale.dim() == 2 else scale[:, None, None]
        stored, scale = meant(stored, scale)
        moved = shift(getattr(module, f"{name}_zero_point", None), was.shape, block)
        stored = stored.double() + moved
        of_each = spread(scale, was.shape, block) * of_parts(
            getattr(module, f"{name}_scale_2", None), was.shape
        )
        ratio = was.float().double() / of_each
        step = torch.ones_like(ratio)
        if quantised.is_e2m1:
            step = torch.exp2(ratio.abs().clamp(min=1.0).log2().floor()) / 2
            ratio = ratio.clamp(-6.0, 6.0)
        elif quantised.is_paired:
            ratio = (ratio - moved).clamp(-8.0, 7.0) + moved
        elif quantised.dtype.is_floating_point:
            step = torch.exp2(ratio.abs().clamp(min=2.0**-6).log2().floor()) / 8
        if not ((stored.double() - ratio).abs() <= step / 2 + 8 * rounding.SINGLE * ratio.abs()).all():
            raise Mismatch(f"{name} is not the nearest to what it was")
        dense.append((stored.double() * of_each).detach())
    return rounding.Weights(*dense, *(block[1] for block in blocks), quantised.dtype)


def _block_of(scaled: Any, case: Any, rows: int, columns: int) -> tuple[int, int]:
    """Of a weight, by the kind of its scales: those of a matrix are of gate and of up."""
    is_up = rows == case.columns and columns == case.hidden
    if scaled.kind == "tensor":
        return (case.intermediate if is_up else rows), columns
    if scaled.kind == "channel":
        return 1, columns
    return (scaled.w13_block[0] if scaled.kind == "block" else 1), scaled.w13_block[1]


for level in (quantise_rows, quantised_layer):
    LEVELS[level.__name__] = level
