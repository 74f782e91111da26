"""Which activation a piece of a graph computes."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from inductor_passes.base import Refusal
from inductor_passes.raising.evaluation import VIEWS, Cut, evaluate, is_size, numbers
from inductor_passes.raising.rowwise import leading
from inductor_passes.raising.views_of_rows import aten, features, is_one, is_view, prims
from moe_ops.activation import apply_activation, out_features
from moe_ops.types import Activation

_PLAIN = ("silu", "gelu", "gelu_tanh", "relu2", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul")
_ROWS, _FAR = 64, 8
_CLOSE = 1e-9


def is_in_gate(node: Node) -> bool:
    """Whether `node` works on each row by itself."""
    target = node.target
    if (
        target in _SHAPES
        or is_view(node)
        or (isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags)
    ):
        value = node.meta.get("val")
        return not (isinstance(value, Tensor) and value.dtype == torch.bool and _is_of_ids(node))
    return all(map(is_size, node.all_input_nodes))


def _is_of_ids(node: Node) -> bool:
    """Whether a mask is of rows by their ids, rather than of numbers."""
    values = (each.meta["val"] for each in node.all_input_nodes)
    return not any(isinstance(value, Tensor) and value.dtype.is_floating_point for value in values)


_SHAPES = frozenset(
    (
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.select.int,
        aten.unbind.int,
        aten.clone.default,
        prims.convert_element_type.default,
        operator.getitem,
    )
)


def written_as(gate: Cut) -> str:
    """How a gate is written, whatever it reads: two gates that are written alike are the same."""
    names = {node: f"%{index}" for index, node in enumerate((*gate.leaves, *gate.nodes))}
    return str([(node.target, map_arg((node.args, node.kwargs), names.__getitem__)) for node in gate.nodes])


def recognised(
    gate: Cut, products: Sequence[Node], output: Node, masks: Mapping[Node, bool]
) -> Activation | None:
    """The activation that `gate` computes of gate_up [S, 2I], tried in float64 on numbers small and large.

    `products` is that, or gate and up [S, I] of which it would be made.
    """
    tried = _evaluated(gate, products, output, masks)
    if tried is None:
        return None
    values, wanted = tried
    candidates = (each for each in _candidates(gate) if len(products) == 1 or _takes_halves(each))
    return next((each for each in candidates if _is(each, values, wanted)), None)


def _takes_halves(activation: Activation) -> bool:
    return activation.is_gated and not activation.interleaved


def _evaluated(
    gate: Cut, products: Sequence[Node], output: Node, masks: Mapping[Node, bool]
) -> tuple[Tensor, Tensor] | None:
    columns = [features(product.meta["val"]) for product in products]
    if not all(isinstance(each, int) for each in columns):
        return None  # as below, a symbol
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_ROWS, sum(columns), generator=generator, dtype=torch.float64)
    scales = torch.logspace(-1, 2, _ROWS, dtype=torch.float64)
    scales[-_FAR:] = torch.logspace(2, _magnitude(gate), _FAR, dtype=torch.float64)
    values = values * scales[:, None]
    half = sum(columns) // 2
    parts = (slice(half), slice(half, None), slice(0, None, 2), slice(1, None, 2))
    for row, (spoilt, part) in enumerate(product((math.nan, math.inf, -math.inf), parts)):
        values[row, part] = spoilt  # in the gate alone, or in what it multiplies
    value = products[0].meta["val"]
    constant = {mask: in_dimensions(torch.full((_ROWS, 1), each), value) for mask, each in masks.items()}
    filled = {node: fill(node, torch.float64) for node in gate.nodes if node.target is aten.full.default}
    nodes = [node for node in gate.nodes if node not in filled]
    parts = (in_dimensions(part, value) for part in values.split(columns, 1))
    known: dict[Node, Any] = {**dict(zip(products, parts, strict=True)), **constant, **filled}
    try:
        shapes = shapes_of_rows(gate, num_rows(value))
        if any(is_size(each) for node in nodes if node not in shapes for each in node.all_input_nodes):
            return None  # as below, a symbol
        for node in nodes:
            if node in shapes:
                known[node] = known[node.all_input_nodes[0]].reshape(_ROWS, *shapes[node])
            else:
                known = evaluate([node], known)
    except (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        Refusal,
    ):  # a shape is written in: not the gate of any rows
        return None
    return values, known[output].flatten(1)


def shapes_of_rows(gate: Cut, num_slots: int | torch.SymInt) -> dict[Node, list[int]]:
    """How each view in a gate, which names how many rows there are, shows one of the S rows.

    Raises:
        Refusal: it shows several as one.
    """
    shapes = {}
    for node in filter(shows_rows, gate.nodes):
        shape, of_rows = node.meta["val"].shape, max(1, leading(node, num_slots))
        shapes[node] = [*[1] * (of_rows - 1), *shape[of_rows:]]
    return shapes


def shows_rows(node: Node) -> bool:
    """Whether `node` shows all that a tensor holds in another shape."""
    return node.target in VIEWS and is_view(node)


def fill(node: Node, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """What is filled with one number, whatever its shape."""
    value = node.meta["val"]
    number: Any = node.args[1]
    dtype = dtype if value.is_floating_point() else value.dtype
    return torch.full([1] * value.dim(), number, dtype=dtype, device=device)


def in_dimensions(rows: Tensor, value: Tensor) -> Tensor:
    """Rows [S, F] as [S, 1, F], with more dimensions of size 1, or as columns [S, F, 1]: as a gate counts with them."""
    ones = [1] * (value.dim() - 2)
    if are_columns(value):
        return rows.view(rows.shape[0], *ones[1:], rows.shape[1], 1)
    return rows.view(rows.shape[0], *ones, rows.shape[1])


def are_columns(value: Tensor) -> bool:
    """Whether what a product gives is [..., F, 1]."""
    return value.dim() > 2 and is_one(value.shape[-1]) and not is_one(value.shape[-2])


def num_rows(value: Tensor) -> Any:
    """S."""
    return math.prod(value.shape[: -2 if are_columns(value) else -1])


def _magnitude(gate: Cut) -> float:
    """The power of ten of the largest numbers to try: beyond every limit that stands in the graph."""
    written = (each for each in numbers(gate.nodes) if math.isfinite(each))
    return math.log10(max(100.0, *(2 * each for each in written), 0.0))


def _candidates(gate: Cut) -> Iterator[Activation]:
    """Plain ones, then those with a number, which must stand in the graph."""
    written = sorted(numbers(gate.nodes))
    limits = [each for each in written if each > 0]
    for interleaved in (False, True):
        for name in _PLAIN:
            if not interleaved or Activation(name).is_gated:
                yield Activation(name, interleaved=interleaved)
        for limit in limits:
            yield Activation("silu", limit=limit, interleaved=interleaved)
            yield Activation("swiglustep", limit=limit, interleaved=interleaved)
            for alpha in limits:
                for beta in {0.0, 1.0, *limits}:
                    yield Activation(
                        "swiglu_oai", alpha=alpha, limit=limit, beta=beta, interleaved=interleaved
                    )


def _is(activation: Activation, values: Tensor, wanted: Tensor) -> bool:
    columns = values.shape[1]
    if (activation.is_gated and columns % 2) or wanted.shape != (_ROWS, out_features(columns, activation)):
        return False
    ours = apply_activation(values, activation)
    return torch.allclose(ours, wanted, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)
