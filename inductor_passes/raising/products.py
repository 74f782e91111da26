"""Products of rows with the weights of their experts, as models write them.

Grouped: `_grouped_mm(rows, weight, offsets)`, whose rows lie in expert order. Gathered: `bmm` with `weight[experts]`,
whose rows lie in the order of slots.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import concrete
from inductor_passes.raising.indices import Found, Indices, Order, ids_behind, is_integral, taken
from inductor_passes.raising.stacks import Stack
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    features,
    gathered_rows,
    has_layout,
    indexed,
    is_copy,
    is_one,
    is_shown,
    is_view,
    only_user,
    rank,
    same_shape,
    seen_from,
    size,
)

_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


class Product(NamedTuple):
    """One product: rows [S, A] times weight [E, B, A] of the expert of each."""

    node: Node
    rows: Node
    weight: Stack
    experts: Node
    """What says which expert a row belongs to: where experts end, or the expert of each row."""
    kind: str
    """"grouped"; "gathered"; "shared" where a row [T, A] meets all experts of its token at once; "looped"."""

    @property
    def num_experts(self) -> int:
        """E."""
        return self.weight.value.shape[0]

    @property
    def num_slots(self) -> int | torch.SymInt:
        """S."""
        if self.kind == "grouped":
            return self.rows.meta["val"].shape[0]
        return self.experts.meta["val"].numel()


def products(graph: Graph) -> list[Product]:
    """Every product in `graph`, in order."""
    found = (_grouped(node) or _gathered(node) for node in graph.nodes if node.op == "call_function")
    return [each for each in found if each is not None]


def _grouped(node: Node) -> Product | None:
    if str(node.target) not in _GROUPED:
        return None
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given: dict[str, Any] = dict(zip(names, args(node), strict=False)) | dict(node.kwargs)
    rows, weight, offsets = args(node)[0], args(node)[1], given.get("offs")
    if offsets is None or given.get("bias") is not None or (rank(rows), rank(weight)) != (2, 3):
        return None
    return Product(node, rows, _stored(weight, True), offsets, "grouped")


def _gathered(node: Node) -> Product | None:
    """`bmm(rows [S, 1, A], weight [S, A, B])`, or the other way round, transposed; of one row Inductor makes `mm`.

    `baddbmm` adds biases to it.
    """
    if node.target not in (aten.bmm.default, aten.mm.default, aten.baddbmm.default) or node.kwargs:
        return None
    *_, left, right = args(node)
    if is_one(size(left, -2)) and (found := _read(right, (0, 1, 2))) is not None:
        return _gathered_product(node, left, found)
    if is_one(size(right, -1)) and (found := _read(left, (0, 2, 1))) is not None:
        return _gathered_product(node, right, found)
    return None


class _Read(NamedTuple):
    """How a product reads `weight[experts]`."""

    weight: Stack
    experts: Node
    kind: str
    columns: int


def _gathered_product(node: Node, rows: Node, read: _Read) -> Product | None:
    out = node
    while read.kind == "shared" and features(out.meta["val"]) != read.columns:
        user = only_user(out)  # [T, K * B] is [T, K, B]: nobody may see it otherwise
        if user is None or not is_view(user):
            return None
        out = user
    return Product(out, rows, read.weight, read.experts, read.kind)


def _read(operand: Node, dims: tuple[int, int, int]) -> _Read | None:
    """How `operand` shows `weight[experts]`; `dims` are those of the rows, of what is summed, and of the columns."""
    gathered: Any = operand
    shape: Sequence[Any] = operand.meta["val"].shape
    while is_shown(gathered):
        shape = gathered.meta["val"].shape
        gathered = args(gathered)[0]
    source = indexed(gathered)
    if source is None or rank(source[0]) != 3 or not is_integral(source[1]):
        return None
    shown = seen_from(gathered, operand)
    if shown is None:
        is_beside = _are_beside(gathered, operand, _split(gathered, shape), dims)
        return _Read(_stored(source[0], True), source[1], "shared", size(gathered, -1)) if is_beside else None
    if shown.dim() == 2:
        shown = shown.unsqueeze(0)
    layout = _layout(shown.permute(dims), _split(gathered, shape))
    if layout is None:
        return None
    return _Read(_stored(source[0], layout[1]), source[1], layout[0], size(gathered, -2))


def _are_beside(gathered: Node, operand: Node, shape: Sequence[int], dims: tuple[int, int, int]) -> bool:
    """Whether `operand` [T, X, K * Y], by `dims`, is a copy of [T, K, X, Y], each token's matrices side by side.

    No view of what was gathered is.
    """
    *leading, x, y = shape
    whole = (math.prod(leading[:-1]), leading[-1], x, y)
    is_turned, columns = dims[1] > dims[2], leading[-1] * y
    last = (columns, x) if is_turned else (x, columns)
    order = (0, 1, 3, 2) if is_turned else (0, 2, 1, 3)
    return same_shape(operand.meta["val"].shape[-2:], last) and is_copy(gathered, operand, whole, order)


def _split(gathered: Node, shown: Sequence[Any]) -> list[int]:
    """The shape [S, X, Y] of what was gathered or, where it is shown so next, [T, K, X, Y]."""
    own = gathered.meta["val"].shape
    is_split = len(shown) > len(own) == 3 and same_shape(own[1:], shown[-2:])
    return [int(concrete(each) or 0) for each in (shown if is_split else own)]


def _layout(shown: Tensor, shape: Sequence[int]) -> tuple[str, bool] | None:
    """How a view [rows, summed, columns] of [S, X, Y] pairs rows with weights, and whether X is what is summed."""
    *leading, x, y = shape
    slots, together = math.prod(leading), leading[-1] * x
    if has_layout(shown, (slots, y, x), (x * y, 1, y)):
        return "gathered", False
    if has_layout(shown, (slots, x, y), (x * y, y, 1)):
        return "gathered", True
    if has_layout(shown, (math.prod(leading[:-1] or leading), y, together), (together * y, 1, y)):
        return "shared", False
    return None


def _stored(weight: Node, is_transposed: bool) -> Stack:
    """The tensor behind `weight`, which is [E, A, B] if `is_transposed`."""
    while weight.target is aten.permute.default and list(args(weight)[1]) == [0, 2, 1]:
        weight, is_transposed = args(weight)[0], not is_transposed
    return Stack(weight).transposed() if is_transposed else Stack(weight)


def order_of(product: Product, indices: Indices) -> Order:
    """The order of the rows of a product. Raises Refusal where it is none that experts can own rows in."""
    if product.kind == "grouped":
        return _by_expert(product, indices)
    for order in _orders(product, indices):
        if indices.are_experts(product.experts, order):
            return order
    raise Refusal(product.node, f"{describe(product.experts)} is not the expert of each slot")


def _orders(product: Product, indices: Indices) -> Iterator[Order]:
    """Those in which a model may have gathered weights."""
    yield indices.slot_order
    yield indices.by_choice
    with contextlib.suppress(Refusal):
        yield _by_expert(product, indices)


def _by_expert(product: Product, indices: Indices) -> Order:
    """The order of rows that were gathered in it. Raises Refusal where they were not."""
    node, order = sorted_places(product, indices)
    places = indices.values(node)
    assert places is not None  # or they were not found
    return taken(order, places)


def sorted_places(product: Product, indices: Indices) -> tuple[Node, Order]:
    """[S]: the place of each row of a product, in the order that is given with them.

    Raises Refusal where rows lie in another order than that of experts.
    """
    gathered = gathered_rows(product.rows, indices)
    source = None if gathered is None else indexed(gathered)
    places = None if source is None else indices.slots_behind(source[1])
    if places is None:
        raise Refusal(
            product.node, f"rows come from {describe(product.rows)}, not from tokens in expert order"
        )
    return places


def ids_of(product: Product, found: Found) -> Indices:
    """The ids that choose the experts of a product, with what was `found` of others. Raises Refusal without any."""
    ids = ids_behind(product.experts, product.num_slots)
    return Indices(ids, product.num_experts, found)
