"""Products that Inductor has padded, seen as they were by the passes that raise layers.

On a GPU Inductor pads products of odd sizes with zeros where a timing says that this is faster, and cuts what they give
to size. What is not raised gets its padding back, node by node.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from inductor_passes.raising.views_of_rows import args, aten, only_user, rank, same_shape

_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)


class _Padded(NamedTuple):
    """A product of padded tensors."""

    product: Node
    read: tuple[Node, ...]
    """What it reads, padded or not."""
    cuts: tuple[Node, ...]
    """What cuts its result to size, one dimension after another."""
    value: Any
    """What is known of the result that is not cut."""


@contextmanager
def unpadded(graph: Graph) -> Iterator[None]:
    """Every padded product is one that is not, until the end."""
    found = [each for node in graph.nodes if (each := _padded(node)) is not None]
    for each in found:
        _hide(each)
    try:
        yield
    finally:
        for each in found:
            _show(graph, each)


def _padded(product: Node) -> _Padded | None:
    if product.target not in _PRODUCTS or product.kwargs:
        return None
    read = args(product)
    inner = tuple(_without_zeros(each) for each in read)
    left, right = (each.meta["val"].shape for each in inner[-2:])
    if inner == read or not same_shape(left[-1:], right[-2:-1]):
        return None
    wanted, cuts, node = (*left[:-1], right[-1]), [], product
    while not same_shape(node.meta["val"].shape, wanted):
        user = only_user(node)
        if user is None or user.target is not aten.slice.Tensor or len(args(user)) != 4 or args(user)[2] != 0:
            return None
        cuts.append(user)
        node = user
    return _Padded(product, read, tuple(cuts), product.meta["val"])


def _without_zeros(node: Node) -> Node:
    """What `node` shows with zeros behind its last rows and columns."""
    if node.target is not aten.constant_pad_nd.default or any(args(node)[2:]):
        return node
    in_front = args(node)[1][::2]
    return args(node)[0] if rank(node) > 1 and not any(in_front) else node


def _hide(each: _Padded) -> None:
    product, cuts = each.product, each.cuts
    product.args = tuple(map(_without_zeros, each.read))
    if cuts:
        cuts[-1].replace_all_uses_with(product)
        product.meta["val"] = cuts[-1].meta["val"]


def _show(graph: Graph, each: _Padded) -> None:
    product, cuts = each.product, each.cuts
    if product._erased:
        pads = (node for node in each.read if node.target is aten.constant_pad_nd.default)
        for node in (*reversed(cuts), *pads):
            if not node._erased and not node.users:
                graph.erase_node(node)
        return
    product.args = each.read
    product.meta["val"] = each.value
    if cuts:
        product.replace_all_uses_with(cuts[-1], lambda user: user not in cuts)
