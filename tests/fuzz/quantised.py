"""The levels of operators with weights of 8 or 4 bits: a layer and a product."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import moe_ops
from moe_ops import ScaledWeight
from tests.fuzz import levels, oracle, rounding
from tests.fuzz.levels import LEVELS, Dispatched
from tests.fuzz.problem import (
    Mismatch,
    Problem,
    Tensors,
    layer_bound,
    stage_bound,
    without_none,
)
from tests.fuzz.quantised_cases import IN_4_BITS, num_blocks
from tests.fuzz.rounding import Known
from tests.fuzz.tensors import MATRIX_LAYOUTS, WEIGHT_LAYOUTS, Maker

SCALE_LAYOUTS = {**WEIGHT_LAYOUTS, "strided": MATRIX_LAYOUTS["strided"]}
SPREAD = 50.0  # of float8 weights; 448 is their largest
FAINT = 2.0**-100
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 4 bits
TYPICAL = {
    "int8": 128 / 3**0.5,
    "mxfp4": 2.93,
    "nvfp4": 2.93,
    "int4": 4.6,
    "float8_e4m3fn": SPREAD,
}  # magnitudes
MADE = {
    "int4": torch.uint4,
    "nvfp4": torch.float4_e2m1fn_x2,
}  # formats as `quantise_experts` is told, if by no dtype
TENSOR_CORES = 2.0**-13  # of Hopper's, which keep 14 bits of a sum of float8 products


def spread(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """[..., B, A] float64: the scale of each number, by its place."""
    rows, columns = (torch.arange(size, device=scale.device) for size in shape[-2:])
    return scale.double()[..., rows // block[0], :][..., columns // block[1]]


@dataclass(frozen=True)
class Made:
    """A weight and the block it is in, whether or not a call is told of it."""

    given: ScaledWeight
    block: tuple[int, int]

    def dense(self) -> Tensor:
        """What it stands for, in float64."""
        weight, scale = meant(self.given.weight, self.given.scale)
        weight = weight.double() + shift(self.given.zero, weight.shape, self.block)
        return (
            weight * spread(scale, weight.shape, self.block) * of_parts(self.given.global_scale, weight.shape)
        )


def of_parts(outer: Tensor | None, shape: torch.Size) -> Tensor | float:
    """Global scales [E] or [E, P], of each of so many parts of the rows, by their place."""
    if outer is None:
        return 1.0
    outer = outer.view(shape[0], -1)
    return outer.double()[:, torch.arange(shape[1]) * outer.shape[1] // shape[1], None]


def shift(zero: Tensor | None, shape: torch.Size, block: tuple[int, int]) -> Tensor | float:
    """What zero points add to numbers of 4 bits that are 8 less than their codes."""
    return 0.0 if zero is None else 8 - spread(zero, shape, block)


def meant(stored: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and factors: of 4 bits two numbers are in a byte, and bytes beside them are exponents, or float8."""
    if stored.dtype != torch.uint8:
        return stored, scale
    if scale.dtype == torch.float8_e4m3fn:
        return unpacked(stored), scale.double()
    if scale.dtype.itemsize == 1:
        return unpacked(stored), torch.exp2(scale.view(torch.uint8).double() - 127)
    return unpacked(stored, torch.arange(-8.0, 8.0)), scale


MXFP4 = torch.cat((torch.tensor(MAGNITUDES), -torch.tensor(MAGNITUDES)))
"""What codes stand for."""


def unpacked(pairs: Tensor, of_codes: Tensor = MXFP4) -> Tensor:
    """[..., A / 2] bytes as [..., A] numbers of 4 bits, that of the even column in the lower half."""
    table = of_codes.to(pairs.device, torch.float64)
    return torch.stack((table[(pairs % 16).long()], table[(pairs // 16).long()]), -1).flatten(-2)


class Quantised:
    """Makes the weights of a case."""

    def __init__(self, make: Maker) -> None:
        self.make, self.scaled = make, make.case.scaled
        self.is_paired, self.has_exponents = self.scaled.stored in IN_4_BITS, self.scaled.stored == "mxfp4"
        self.is_e2m1, self.outer = self.scaled.stored in ("mxfp4", "nvfp4"), self.scaled.stored == "nvfp4"
        self.dtype = torch.uint8 if self.is_paired else getattr(torch, self.scaled.stored)
        self.made = MADE.get(self.scaled.stored, self.dtype)

    def numbers(self, *shape: int) -> Tensor:
        """Of 8 bits, or two of 4."""
        if self.is_paired:
            return (self.make.uniform(*shape[:-1], shape[-1] // 2) * 256).to(self.dtype)
        if self.dtype == torch.int8:
            return (self.make.uniform(*shape) * 256 - 128).floor().to(self.dtype)
        return (self.make.normal(*shape) * SPREAD).clamp(-448, 448).to(self.dtype)

    def scale(self, depth: int, *shape: int) -> Tensor:
        """By which products of this depth are about as large as what is multiplied; each some powers of two apart."""
        typical = TYPICAL[self.scaled.stored]
        values = torch.exp2(4 * self.make.uniform(*shape) - 2) / typical / max(depth, 1) ** 0.5
        if self.has_exponents:
            return (values.log2().round() + 127).to(self.make.device, torch.uint8)
        if self.outer:
            return values.to(self.make.device, torch.float8_e4m3fn)
        return values.to(self.make.device, getattr(torch, self.scaled.scale_dtype))

    def weight(
        self, layout: str, block: tuple[int, int], rows: int, columns: int, unused: Tensor, parts: int = 0
    ) -> Made:
        """[local experts, rows, columns] in blocks; what `unused` experts have is NaN, of integers their scales are."""
        experts = self.make.case.local_experts
        stored = self.numbers(experts, rows, columns).to(self.make.device)
        blocks = num_blocks(rows, block[0]), num_blocks(columns, block[1])
        scale = self.scale(columns, experts, *blocks)
        if self.scaled.strange:
            if self.outer:
                scale.view(torch.uint8)[unused] = 0x7F  # NaN; not all writes are there for float8
            else:
                scale[unused] = 255 if self.has_exponents else float("nan")
            if self.dtype.is_floating_point:
                stored[unused] = torch.full_like(stored[unused], float("nan"))
        stored, scale = WEIGHT_LAYOUTS[layout](stored), SCALE_LAYOUTS[self.scaled.scale_layout](scale)
        if self.has_exponents and self.scaled.scale_dtype == "float32":  # the dtype of the same bytes
            scale = scale.view(torch.float8_e8m0fnu)
        follows = not any(size % each for size, each in zip((rows, columns), blocks, strict=True))
        follows &= all(
            size // each == min(edge, size)
            for size, each, edge in zip((rows, columns), blocks, block, strict=True)
        )
        said = None if follows and not self.scaled.is_said else block
        given = ScaledWeight(
            stored, scale, said, self.zero(experts, *blocks), self.global_scale(experts, parts)
        )
        return Made(given, block)

    def global_scale(self, experts: int, parts: int) -> Tensor | None:
        """[E, P], or [E] of one part, some powers of two apart."""
        if not parts:
            return None
        made = torch.exp2(4 * self.make.uniform(parts, experts) - 2).t()
        made = made.to(self.make.device, getattr(torch, self.scaled.scale_dtype))
        return made[:, 0] if parts == 1 and self.scaled.is_said else made

    def zero(self, *shape: int) -> Tensor | None:
        """Zero points of integers, of strides of their own."""
        if not self.scaled.zero_points:
            return None
        zero = (self.make.uniform(*shape) * 16).to(torch.uint8).mT.contiguous().mT
        return zero.to(self.make.device)

    def arithmetic(self) -> rounding.Arithmetic:
        """Of a layer in the dtype of the case."""
        term = torch.finfo(torch.float64 if self.make.dtype == torch.float64 else torch.float32).eps
        if self.make.device == "cuda" and self.dtype.is_floating_point:
            term = max(term, TENSOR_CORES)
        return rounding.Arithmetic(self.make.dtype, term)

    def unused(self, expert: Tensor) -> Tensor:
        """[local experts]: those that no slot has, unless experts or their rows are one in memory."""
        counts = torch.bincount(expert[expert >= 0].cpu(), minlength=self.make.case.local_experts)
        case = self.make.case
        layouts = case.w13_layout, case.w2_layout, self.scaled.scale_layout
        return ((counts == 0) & ("experts expanded" not in layouts)).to(self.make.device)

    def tokens(self) -> Tensor:
        """[T, H], some of them zeros or next to that."""
        x = self.make.matrix(self.make.case.tokens, self.make.case.hidden)
        if not self.scaled.faint or x.numel() == 0 or self.make.case.hidden_layout == "expanded":
            return x
        factor = torch.tensor([1.0, 1.0, 0.0, FAINT])[(self.make.uniform(x.shape[0]) * 4).long()]
        return x.mul_(factor.to(x).unsqueeze(1))


def scaled_fused_experts(make: Maker) -> Problem:
    case, quantised, expert_map = make.case, Quantised(make), make.expert_map()
    scaled, routing, ids = quantised.scaled, make.topk_weights(), make.topk_ids()
    given = [torch.tensor([each / 3, -each, 0.0], device=make.device) for each in scaled.given]
    rows = moe_ops.InputScales(*given) if given else scaled.rows
    expert = levels.local_experts(make, ids, expert_map)
    unused = quantised.unused(expert)
    sizes = (case.columns, case.hidden), (case.hidden, case.intermediate)
    w13 = quantised.weight(case.w13_layout, scaled.w13_block, *sizes[0], unused, scaled.parts[0])
    w2 = quantised.weight(case.w2_layout, scaled.w2_block, *sizes[1], unused, scaled.parts[1])
    tensors = without_none(
        hidden_states=quantised.tokens(), topk_weights=routing, w13_bias=make.bias(case.columns),
        w2_bias=make.bias(case.hidden), shared=make.shared(),
    )  # fmt: skip

    def run(t: Tensors) -> Tensor:
        rest = {name: t.get(name) for name in ("w13_bias", "w2_bias", "shared")}
        return moe_ops.scaled_fused_experts(
            t["hidden_states"], w13.given, w2.given, t["topk_weights"], ids, case.activation, **rest,
            expert_map=expert_map, apply_router_weight_on_input=case.weight_on_input, rows=rows,
        )  # fmt: skip

    weights = rounding.Weights(
        w13.dense(),
        w2.dense(),
        w13.block[1],
        w2.block[1],
        quantised.dtype,
        tuple(each.abs().max().item() for each in given),
    )
    of_layer = OfLayer(quantised, weights, expert, lambda t: rounding.exact(t["topk_weights"]))
    return of_layer.problem(tensors, run, layer_bound(case))


class OfLayer:
    """The float64 side of a layer, and the problem of which it is that."""

    def __init__(
        self,
        quantised: Quantised,
        weights: rounding.Weights,
        expert: Tensor,
        routing: Callable[[Tensors], Known],
    ) -> None:
        self.quantised, self.weights, self.expert, self.routing = quantised, weights, expert, routing
        self.case, self.arithmetic = quantised.make.case, quantised.arithmetic()
        self.found: tuple[rounding.Layer, Known] | None = None

    def problem(
        self, tensors: Tensors, run: Callable[[Tensors], Tensor], bound: float, **named: Any
    ) -> Problem:
        """That of a call; with quantised rows each number has a bound of its own."""
        problem = Problem(tensors, compiled(self.case, run), self.dense, bound, **named)
        routing = self.routing({name: tensor.detach() for name, tensor in tensors.items()}).value.detach()
        is_kept = (self.expert >= 0).view_as(routing).any(1)
        problem = replace(problem, reached=is_kept)
        if self.quantised.scaled.rows == "exact":
            return problem
        constants = frozenset(("hidden_states", "w13_bias"))
        if self.case.weight_on_input:  # then what is quantised has been weighed
            constants |= {"topk_weights"}
        return replace(problem, expected=self.rounded, constants=constants, allowed=self.allowed)

    def _routed(self, t: Tensors) -> tuple[Known, Known]:
        """Tokens and weights of their choices, where these are applied."""
        routing, x = self.routing(t), rounding.exact(t["hidden_states"])
        if not self.case.weight_on_input:
            return x, routing
        weighed = oracle.stored(x.value * routing.value)
        return self.arithmetic.stored(x._replace(value=weighed), times=2), rounding.exact(
            torch.ones_like(routing.value)
        )

    def dense(self, t: Tensors) -> Tensor:
        """With rows as they are."""
        x, routing = self._routed(t)
        named = {**t, "hidden_states": x.value, "w13": self.weights.w13, "w2": self.weights.w2}
        return oracle.layer(named, routing.value, self.expert, self.case.activation)

    def rounded(self, t: Tensors) -> Tensor:
        """With rows in 8 bits."""
        x, routing = self._routed(t)
        x = Known(x.value.detach(), x.error.detach())
        found = rounding.layer(
            self.arithmetic, x, self.weights, routing, self.expert, self.case.activation, t
        )
        self.found = found, Known(routing.value.detach(), routing.error)
        return found.output.value

    def allowed(self, grad: Tensor | None) -> Tensors:
        """Of the output, and of gradients a function of what they are."""
        found, routing = self.found
        allowed = {"output": lambda wanted: found.output.error.detach()}
        if grad is None:
            return allowed
        of_gradients = rounding.gradients(self.arithmetic, found, routing, self.expert, grad)
        return allowed | of_gradients


def compiled(case: Any, run: Callable[[Tensors], Tensor]) -> Callable[[Tensors], Tensor]:
    backend = case.scaled.compiled
    return torch.compile(run, backend=backend, fullgraph=True) if backend else run


def scaled_grouped_gemm(make: Maker) -> Problem:
    case, quantised, at = make.case, Quantised(make), Dispatched(make)
    scaled, (rows, columns) = quantised.scaled, (case.columns, case.hidden)
    unused = quantised.unused(at.slot_experts)
    weight = quantised.weight(case.w13_layout, scaled.w13_block, rows, columns, unused, scaled.parts[0])
    offsets, slots = at.plan.expert_offsets, at.plan.sorted_slots if scaled.gathered else None
    num_rows = case.tokens if scaled.gathered else len(at.order)
    tokens = at.tokens(case.top_k) if scaled.gathered else torch.arange(num_rows, device=make.device)
    bias, dense, named = make.bias(rows), weight.dense(), {"sorted_slots": slots, "dtype": make.dtype}
    if scaled.widened and make.dtype != torch.float64:
        named["dtype"] = torch.float32
    if scaled.rows == "exact":
        stored, x = make.matrix(num_rows, columns), None
    else:
        width = scaled.w13_block[1]
        values = quantised.numbers(num_rows, columns).to(make.device)
        stored = MATRIX_LAYOUTS[case.hidden_layout](values)
        of_rows = quantised.scale(1, num_rows, num_blocks(columns, width))
        named["x_scale"] = MATRIX_LAYOUTS[case.small_layout](of_rows)
        x = stored.double() * spread(named["x_scale"], stored.shape, (1, width))

    def run(t: Tensors) -> Tensor:
        given = t.get("x", stored), weight.given, offsets, t.get("bias")
        out = moe_ops.scaled_grouped_gemm(*given, **named)
        if out.dtype != named["dtype"]:
            raise Mismatch(f"output has dtype {out.dtype}, expected {named['dtype']}")
        return out.to(make.dtype)

    def expected(t: Tensors) -> Tensor:
        rows = t["x"] if x is None else x
        return oracle.linear(rows[tokens], dense, t.get("bias"), at.row_experts)

    tensors = without_none(x=stored if x is None else None, bias=bias)
    bound = stage_bound(case)
    if make.device == "cuda" and x is not None and quantised.dtype.is_floating_point:
        bound = max(bound, 8 * TENSOR_CORES)
    return Problem(tensors, compiled(case, run), expected, bound)


for level in (scaled_fused_experts, scaled_grouped_gemm):
    LEVELS[level.__name__] = level
