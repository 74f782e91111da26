"""What stands between the rows of a layer and what its experts give: products, biases, masks and the gate."""

from collections.abc import Sequence

from torch.fx import Node

from inductor_passes import _compat
from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import Cut, cut, is_size
from inductor_passes.raising.gates import are_columns, is_in_gate
from inductor_passes.raising.indices import Indices, Order
from inductor_passes.raising.layer import Outcome, Parts
from inductor_passes.raising.products import Product
from inductor_passes.raising.stacks import Stack
from inductor_passes.raising.tokens import tokens_of
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    indexed,
    is_cast,
    is_one,
    is_view,
    is_view_of_rows,
    only_user,
    operand,
    rank,
    same_shape,
    unmasked,
    without_views,
)
from inductor_passes.raising.weights import weights_beside


def parts_of(firsts: Sequence[Product], second: Product, order: Order, indices: Indices) -> Parts:
    """The parts around the products of a layer. Raises Refusal where one is not what a layer has."""
    outcomes = tuple(_outcome(first, order, indices) for first in firsts)
    last = _outcome(second, order, indices)
    tokens, *others = (tokens_of(first, order, indices) for first in firsts)
    if any(other != tokens for other in others):
        raise Refusal(second.node, "the products before the gate have different inputs")
    activated, weights = _activated(second, outcomes, indices), tokens.topk_weights
    if weights is None and last.bias is None:
        activated, weights = _unweighed(activated, order, indices)
    gate = cut([activated], lambda node: any(node is o.node for o in outcomes) or not is_in_gate(node))
    masks = _masks(gate, outcomes, indices, second.node)
    return Parts(tokens, outcomes, gate, masks, activated, last, weights)


def _activated(second: Product, outcomes: Sequence[Outcome], indices: Indices) -> Node:
    """What the gate gives; where nothing is between the products, as in LoRA, that is what the first one gives."""
    node = without_views(second.rows, indices)
    same = (each.node for each in outcomes if without_views(each.node, indices) is node)
    return next(same, node)


def _unweighed(activated: Node, order: Order, indices: Indices) -> tuple[Node, Node | None]:
    """What a gate gives, and the weights where a model weighs that, which is to weigh what its experts give."""
    product = args(activated)[0] if is_cast(activated) else activated
    for rows in product.all_input_nodes if product.target is aten.mul.Tensor else ():
        weights = weights_beside(product, rows, order, indices)
        if weights is not None:
            return args(rows)[0] if is_cast(rows) else rows, weights
    return activated, None


def _outcome(product: Product, order: Order, indices: Indices) -> Outcome:
    """Follows a product past its bias and masks, as far as it is [S, B] or else [T, K, B]."""
    _expect_order(product, order, indices)
    node, bias, found = product.node, _bias_within(product, order, indices), None
    while node is not None:
        user = only_user(node)
        if _shows_rows(node, product, indices):
            found = Outcome(product, bias, node)
        if user is not None and bias is None and (added := _bias(user, node, order, indices)) is not None:
            bias = added
        elif user is None or not (
            (is_view(user) and is_view_of_rows(user)) or unmasked(user, indices) is node
        ):
            break
        node = user
    if found is None:
        raise Refusal(
            node, f"the product with experts has shape {list(node.meta['val'].shape)}, not [rows, columns]"
        )
    return found


def _shows_rows(node: Node, product: Product, indices: Indices) -> bool:
    """Whether `node` is [S, B], [S, 1, B], [S, B, 1], [T, K, B] or [T, K, 1, B]; [B, S, K] may be [T, K]."""
    if rank(node) == 2:
        return True
    shape, of_ids = node.meta["val"].shape, indices.ids.meta["val"].shape
    if len(shape) == 3 and is_one(shape[1]) and not is_one(shape[2]):
        return _compat.statically_known_true(shape[0] == product.num_slots)
    columns = product.weight.value.shape[1]
    if are_columns(node.meta["val"]) and len(shape) == 3:
        return same_shape(shape[:2], (product.num_slots, columns))
    if len(of_ids) > 2 and same_shape(shape[: len(of_ids)], of_ids):
        shape = shape[len(of_ids) - 2 :]
    return len(shape) == 3 or (len(shape) == 4 and is_one(shape[2]) and same_shape(shape[3:], [columns]))


def _expect_order(product: Product, order: Order, indices: Indices) -> None:
    index = product.experts
    fits = indices.are_offsets(index) if product.kind == "grouped" else indices.are_experts(index, order)
    if not fits:
        raise Refusal(
            product.node, f"{describe(index)} gives rows to other experts than the ids of the layer"
        )


def _bias(sum: Node, product: Node, order: Order, indices: Indices) -> Stack | None:
    """`bias` [E, B] where `sum` is `product + bias[experts of the rows]`."""
    added = operand(sum, product) if sum.target is aten.add.Tensor else None
    return None if added is None else _bias_of_rows(added, order, indices)


def _bias_within(product: Product, order: Order, indices: Indices) -> Stack | None:
    """`bias` [E, B] of a product that adds it. Raises Refusal where it adds anything else."""
    if product.node.target is not aten.baddbmm.default:
        return None
    added = args(product.node)[0]
    bias = _bias_of_rows(added, order, indices)
    if bias is None:
        raise Refusal(product.node, f"the product with experts adds {describe(added)}, no bias of theirs")
    return bias


def _bias_of_rows(added: Node, order: Order, indices: Indices) -> Stack | None:
    """`bias` [E, B] where `added` is `bias[experts of the rows]`."""
    source = indexed(without_views(added, indices))
    if source is None or rank(source[0]) != 2 or not indices.are_experts(source[1], order):
        return None
    return Stack(source[0])


def _masks(gate: Cut, outcomes: tuple[Outcome, ...], indices: Indices, second: Node) -> dict[Node, bool]:
    """The leaves of a gate besides its products. Raises Refusal for what is not a mask."""
    masks: dict[Node, bool] = {}
    for leaf in gate.leaves:
        if is_size(leaf) or any(leaf is outcome.node for outcome in outcomes):
            continue
        value = next((v for v in (False, True) if indices.is_everywhere(leaf, v)), None)
        if value is None:
            raise Refusal(second, f"the gate also reads {describe(leaf)}")
        masks[leaf] = value
    return masks
