"""Products of rows with the weights of their experts, as models write them.

Grouped: `_grouped_mm(rows, weight, offsets)`, whose rows lie in expert order. Gathered: `bmm` of each row with
`weight[expert]`, whose rows lie in any order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.indices import Indices, Order, ids_behind, is_integral

aten, prims = torch.ops.aten, torch.ops.prims

VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.expand.default,
)
_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
_COPIES = (aten.clone.default, aten.alias.default, prims.convert_element_type.default)


class Product(NamedTuple):
    """One product: rows [S, A] times weight [E, B, A] of the expert of each."""

    node: Node
    rows: Node
    weight: Node
    is_transposed: bool
    """Whether `weight` is [E, A, B]."""
    index: Node
    """What says which expert a row belongs to: where experts end, or the expert of each row."""
    is_grouped: bool

    @property
    def num_experts(self) -> int:
        """E."""
        return self.weight.meta["val"].shape[0]


def products(graph: Graph) -> list[Product]:
    """Every product in `graph`, in order."""
    found = (_grouped(node) or _gathered(node) for node in graph.nodes if node.op == "call_function")
    return [each for each in found if each is not None]


def _grouped(node: Node) -> Product | None:
    if str(node.target) not in _GROUPED:
        return None
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    rows, weight, offsets = node.args[0], node.args[1], given.get("offs")
    if offsets is None or given.get("bias") is not None or (_rank(rows), _rank(weight)) != (2, 3):
        return None
    plain, is_turned = _without_transposes(weight)  # type: ignore[arg-type]
    return Product(node, rows, plain, not is_turned, offsets, True)  # type: ignore[arg-type]


def _gathered(node: Node) -> Product | None:
    if node.target is not aten.bmm.default:
        return None
    left, right = node.args
    if _size(right, 2) == 1 and (found := _gathered_weight(left)) is not None:  # type: ignore[arg-type]
        weight, experts, is_turned = found
        return Product(node, right, weight, is_turned, experts, False)  # type: ignore[arg-type]
    if _size(left, 1) == 1 and (found := _gathered_weight(right)) is not None:  # type: ignore[arg-type]
        weight, experts, is_turned = found
        return Product(node, left, weight, not is_turned, experts, False)  # type: ignore[arg-type]
    return None


def _gathered_weight(node: Node) -> tuple[Node, Node, bool] | None:
    """`weight[experts]`: weight [E, ., .], experts [S], and whether the last two dimensions are swapped."""
    gathered, is_turned = _without_transposes(node)
    source = indexed(gathered)
    if source is None or (_rank(source[0]), _rank(source[1])) != (3, 1) or not is_integral(source[1]):
        return None
    plain, is_turned_before = _without_transposes(source[0])
    return plain, source[1], is_turned ^ is_turned_before


def _without_transposes(node: Node) -> tuple[Node, bool]:
    is_turned = False
    while node.target is aten.permute.default and list(node.args[1]) == [0, 2, 1]:  # type: ignore[arg-type]
        node, is_turned = node.args[0], not is_turned  # type: ignore[assignment]
    return node, is_turned


def _rank(node: Any) -> int:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dim() if isinstance(value, Tensor) else -1


def _size(node: Any, dim: int) -> Any:
    return node.meta["val"].shape[dim]


# What stands between products


def is_view_of_rows(node: Node) -> bool:
    """Whether `node` shows rows [S, F] in another shape, such as [T, K, F] or [S, F, 1]: all rows, in their order."""
    if node.target in _COPIES:
        return True
    return is_view(node) and _features(node.args[0].meta["val"]) == _features(node.meta["val"])  # type: ignore[union-attr]


def is_view(node: Node) -> bool:
    """Whether `node` shows all elements of a tensor, in their order, in another shape."""
    if node.target is aten.permute.default:
        kept = [dim for dim in node.args[1] if _size(node.args[0], dim) != 1]  # type: ignore[union-attr]
        return kept == sorted(kept)
    if node.target not in VIEWS:
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return _compat.statically_known_true(before.numel() == after.numel())


def _features(value: Tensor) -> Any:
    """The last size that is not 1."""
    return next((size for size in reversed(value.shape) if not (isinstance(size, int) and size == 1)), 1)


def without_views(node: Node, indices: Indices) -> Node:
    """What `node` shows, past views, copies and masks of rows whose ids are out of range; not past casts."""
    while node.op == "call_function":
        if is_view_of_rows(node) and not is_cast(node):
            node = node.args[0]  # type: ignore[assignment]
        elif (kept := unmasked(node, indices)) is not None:
            node = kept
        else:
            break
    return node


def is_cast(node: Node) -> bool:
    """Whether `node` changes a dtype."""
    return node.target is prims.convert_element_type.default


def unmasked(node: Node, indices: Indices) -> Node | None:
    """Which operand of a `where` on ids is taken for every id in range."""
    if node.target is not aten.where.self:
        return None
    mask, if_true, if_false = node.args
    if indices.is_everywhere(mask, False):  # type: ignore[arg-type]
        return if_false  # type: ignore[return-value]
    return if_true if indices.is_everywhere(mask, True) else None  # type: ignore[arg-type,return-value]


def operand(node: Node, other: Node) -> Node | None:
    """The operand of a binary operator that is not `other`; None for a number."""
    rest = [each for each in node.args if each is not other]
    return rest[0] if len(rest) == 1 and isinstance(rest[0], Node) else None


def only_user(node: Node) -> Node | None:
    """Who reads `node`, where it is one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def indexed(node: Node) -> tuple[Node, Node] | None:
    """`(source, index)` where `node` is `source[index]`, rows of a tensor."""
    if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
        return node.args[0], node.args[1][0]  # type: ignore[index,return-value]
    if node.target is aten.index_select.default and node.args[1] == 0:
        return node.args[0], node.args[2]  # type: ignore[return-value]
    if node.target is aten.gather.default and node.args[1] == 0:
        index = row_index(node.args[2])  # type: ignore[arg-type]
        return None if index is None else (node.args[0], index)  # type: ignore[return-value]
    return None


def row_index(index: Node) -> Node | None:
    """[S] where `index` is [S, F], the same number all along each row."""
    if index.target is not aten.expand.default:
        return None
    column = index.args[0]
    is_column = _rank(column) == 2 and _size(column, 1) == 1
    while is_column and _rank(column) == 2 and is_view(column):  # type: ignore[arg-type]
        column = column.args[0]  # type: ignore[union-attr]
    return column if is_column and _rank(column) == 1 else None  # type: ignore[return-value]


def order_of(product: Product, indices: Indices) -> Order:
    """The order of the rows of a product. Raises Refusal where it is none that experts can own rows in."""
    if product.is_grouped:
        return _sorted_order(product, indices)
    if indices.are_experts(product.index, indices.slot_order):
        return indices.slot_order
    raise Refusal(product.node, f"{describe(product.index)} is not the expert of each slot")


def _sorted_order(product: Product, indices: Indices) -> Order:
    gathered = gathered_rows(product.rows, indices)
    source = None if gathered is None else indexed(gathered)
    order = None if source is None else indices.order_behind(source[1])
    if order is None:
        raise Refusal(
            product.node, f"rows come from {describe(product.rows)}, not from tokens in expert order"
        )
    return order


def gathered_rows(rows: Node, indices: Indices) -> Node | None:
    """`tokens[index]` behind `rows`, which may be weighed and rounded."""
    rows = without_views(rows, indices)
    if indexed(rows) is not None:
        return rows
    inner = rows.all_input_nodes if rows.target is aten.mul.Tensor or is_cast(rows) else []
    found = (gathered_rows(each, indices) for each in inner if _rank(each) == 2 and _size(each, 1) != 1)
    return next((each for each in found if each is not None), None)


def ids_of(product: Product) -> Indices:
    """The ids that choose the experts of a product. Raises Refusal where they cannot be found."""
    num_slots = product.rows.meta["val"].shape[0]
    ids = ids_behind(product.index, num_slots)
    return Indices(ids, product.num_experts)
