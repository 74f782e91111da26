"""A layer with quantised rows in float64, and how far from it each number of a right layer may be.

Rounding to 8 bits jumps: a number between two of them may go either way, as what comes before it was rounded. So each
number is carried with a bound of its error (running error analysis: Higham, Accuracy and Stability of Numerical
Algorithms, section 3.3), and a row is quantised at both ends of what a number can be. Where they agree, which in
float32 is nearly everywhere, nothing but the scale is unknown. The bounds have no constants to tune: half an epsilon
for what is stored, an epsilon of what sums are in for each term of a sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ops import Activation
from tests.fuzz import oracle
from tests.kernels.oracles import activate

LEAST_LARGEST = 2.0**-118  # blocks below are zeros with a scale of 1: in `moe_ops.quantise_rows`'s own words
SINGLE = 2.0**-24  # half an epsilon of float32, in which rows are quantised whatever their dtype
LEAST_SINGLE = 2.0**-150  # half a step of float32 below its smallest normal number
# Of a function's float32 value, in epsilons: exp, a sum, a division and a product or two.
OF_A_FUNCTION = 8


class Known(NamedTuple):
    """Numbers, and a bound of the distance from each that a right result can have. Both float64."""

    value: Tensor
    error: Tensor


def exact(value: Tensor) -> Known:
    """What is given."""
    return Known(value.double(), torch.zeros_like(value, dtype=torch.float64))


@dataclass(frozen=True)
class Arithmetic:
    """Of a layer: what it stores numbers in, and the rounding of a term of a sum, relative to it."""

    dtype: torch.dtype
    term: float

    def stored(self, x: Known, times: int = 1) -> Known:
        """Rounded to the dtype, some times one after the other."""
        limits = torch.finfo(self.dtype)
        error = x.error + times * limits.eps / 2 * (x.value.detach().abs() + x.error)
        return Known(x.value, error + limits.smallest_normal * limits.eps / 2)

    def summed(self, value: Tensor, of_terms: Tensor, magnitude: Tensor, num_terms: int) -> Known:
        """A sum of so many terms. of_terms: what their errors come to, magnitude: the sum of their magnitudes."""
        return Known(value, of_terms + (num_terms + 6) * self.term * (magnitude + of_terms))

    def linear(self, x: Known, weight: Tensor, bias: Tensor | None, expert: Tensor) -> Known:
        """Each row by the weight of its expert."""
        size, least = weight.abs(), None if bias is None else bias.detach().abs()
        return self.summed(
            oracle.linear(x.value, weight, bias, expert),
            oracle.linear(x.error, size, None, expert),
            oracle.linear(x.value.abs(), size, least, expert),
            weight.shape[2],
        )

    def activated(self, gate_up: Known, activation: Activation) -> Known:
        """The farthest of the corners that gate and up can reach together."""
        value, error = activate(gate_up.value, activation), torch.zeros(())
        is_up = _is_up(gate_up.value, activation)
        for of_gate, of_up in product((-1.0, 1.0), repeat=2):
            corner = gate_up.value + torch.where(is_up, of_up, of_gate) * gate_up.error
            error = torch.maximum(error.to(value), (activate(corner, activation) - value).abs())
        terms = value.abs()
        if activation.name.startswith("gelu"):  # 1 + erf and 1 + tanh cancel where gates are negative
            terms = torch.maximum(terms, activate(gate_up.value.abs(), activation))
        return Known(value, error + OF_A_FUNCTION * self.term * (terms + error))


def _is_up(gate_up: Tensor, activation: Activation) -> Tensor:
    columns = torch.arange(gate_up.shape[1], device=gate_up.device)
    if not activation.is_gated:
        return columns < 0
    return columns % 2 == 1 if activation.interleaved else columns >= gate_up.shape[1] // 2


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest number of 8 bits, in float64."""
    most = float(torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max)
    near = values.clamp(-most, most)
    return near.round() if dtype == torch.int8 else near.float().to(dtype).double()


def quantised(x: Known, columns: int, dtype: torch.dtype) -> Known:
    """Rows of 8 bits times their scales, one for each block of so many columns."""
    most = float(torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max)
    depth = x.value.shape[1]
    columns = min(columns, max(depth, 1))
    spread = lambda each: each.repeat_interleave(columns, 1)[:, :depth]  # noqa: E731
    size = x.value.abs()
    most_at_least, most_at_most = (
        spread(_largest(each, columns)) for each in ((size - x.error).clamp(min=0), size + x.error)
    )
    largest = spread(_largest(size, columns))
    is_zero, may_be_zero = largest < LEAST_LARGEST, most_at_least < LEAST_LARGEST
    factor, scale = most / largest.where(~is_zero, most), (largest / most).where(~is_zero, 1.0)
    off = ((most_at_most - most_at_least) / most_at_least.where(~may_be_zero, 1.0)) + 4 * SINGLE
    reach = x.error * factor * (1 + off) + size * factor * off
    row = rounded(x.value * factor, dtype).where(~is_zero, 0.0)
    apart = torch.maximum(*((rounded(x.value * factor + way * reach, dtype) - row).abs() for way in (-1, 1)))
    of_scale = scale * off + LEAST_SINGLE
    error = apart * (scale + of_scale) + row.abs() * of_scale
    # Where some may take a block for zeros and others not, anything up to its largest is right.
    is_open = may_be_zero & (most_at_most >= LEAST_LARGEST)
    error = torch.where(is_open, most_at_most + (row * scale).abs(), error.where(~is_zero, 0.0))
    return Known(row * scale, error)


def with_scale(x: Known, scale: float, dtype: torch.dtype) -> Known:
    """The same with one scale that is known before."""
    divided, reach = x.value / scale, x.error / scale + (x.value.abs() + x.error) / scale * 4 * SINGLE
    row = rounded(divided, dtype)
    apart = torch.maximum(*((rounded(divided + way * reach, dtype) - row).abs() for way in (-1, 1)))
    return Known(row * scale, apart * scale)


def _largest(size: Tensor, columns: int) -> Tensor:
    padded = F.pad(size, (0, -size.shape[1] % columns))
    return padded.unflatten(1, (-1, columns)).amax(2)


class Weights(NamedTuple):
    """What the weights of a layer stand for, float64, columns that share a scale, and what scales of rows are given."""

    w13: Tensor
    w2: Tensor
    w13_columns: int
    w2_columns: int
    dtype: torch.dtype
    given: tuple[float, ...] = ()

    def rows(self, x: Known, index: int) -> Known:
        """What w13 (index 0) or w2 is multiplied with."""
        if self.given:
            return with_scale(x, self.given[index], self.dtype)
        return quantised(x, (self.w13_columns, self.w2_columns)[index], self.dtype)


class Layer(NamedTuple):
    """The output of a layer, and before it is weighed that of every slot."""

    output: Known
    slots: Known


def layer(
    arithmetic: Arithmetic,
    x: Known,
    weights: Weights,
    routing: Known,
    expert: Tensor,
    activation: Activation,
    rest: dict[str, Tensor],
) -> Layer:
    """Tokens [T, H], weights of their choices [T, K], and the local expert of every slot, -1 where it is dropped."""
    top_k = routing.value.shape[1]
    tokens = weights.rows(x, 0)
    slots = Known(*(each.repeat_interleave(top_k, 0) for each in tokens))
    store = arithmetic.stored
    gate_up = store(arithmetic.linear(slots, weights.w13, rest.get("w13_bias"), expert))
    activated = store(arithmetic.activated(gate_up, activation))
    rows = Known(*(each.detach() for each in weights.rows(activated, 1)))
    down = store(arithmetic.linear(rows, weights.w2, rest.get("w2_bias"), expert))
    return Layer(store(_weighed(arithmetic, down, routing, expert, rest.get("shared"))), down)


def _weighed(
    arithmetic: Arithmetic, down: Known, routing: Known, expert: Tensor, shared: Tensor | None
) -> Known:
    weighted = lambda rows, weights: oracle.weighted_sum(rows, weights, expert, None)  # noqa: E731
    size, of_slots = routing.value.detach().abs(), down.value.detach().abs()
    of_terms = weighted(down.error, size + routing.error) + weighted(of_slots, routing.error)
    magnitude = weighted(of_slots, size)
    if shared is not None:
        magnitude = magnitude + shared.detach().abs()
    value = oracle.weighted_sum(down.value, routing.value, expert, shared)
    return arithmetic.summed(value, of_terms, magnitude, size.shape[1])


def gradients(
    arithmetic: Arithmetic, found: Layer, routing: Known, expert: Tensor, grad: Tensor
) -> dict[str, Callable[[Tensor], Tensor]]:
    """By the name of what has a gradient beside quantised rows: how far that may be off, given what it is."""
    top_k, half = routing.value.shape[1], torch.finfo(arithmetic.dtype).eps / 2
    each, is_kept = grad.double().abs().repeat_interleave(top_k, 0), expert >= 0
    terms, least = each.shape[1] + 6, torch.finfo(arithmetic.dtype).smallest_normal * half

    def to_weights(wanted: Tensor) -> Tensor:
        down = found.slots
        sums = (each * (down.error + terms * arithmetic.term * (down.value.detach().abs() + down.error))).sum(
            1
        )
        return sums.where(is_kept, 0.0).view_as(wanted)

    def to_bias(wanted: Tensor) -> Tensor:
        rows = int(is_kept.sum()) + 6
        off = routing.value.abs() * (2 * half + rows * arithmetic.term) + routing.error
        sums = torch.zeros_like(wanted)
        sums.index_add_(0, expert[is_kept], (each * off.flatten().unsqueeze(1))[is_kept])
        return sums + rows * least

    return {"topk_weights": to_weights, "w2_bias": to_bias, "shared": lambda wanted: half * wanted.abs()}
