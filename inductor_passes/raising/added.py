"""What the sum of a layer is added to: what a shared expert gives, or a residual."""

from collections.abc import Iterable, Sequence
from itertools import chain

from torch.fx import Node

from inductor_passes.raising.views_of_rows import aten, readers, same_shape


def added_to(root: Node, parts: Iterable[Node]) -> list[Node]:
    """What rows are added to on their way from `parts` to `root`, as it is there without them: in its shape."""
    behind, pending = {*parts, root}, [*parts]
    while pending:
        users = [each for each in readers(pending.pop()) if each not in behind]
        behind.update(users)
        pending += users
    found = dict.fromkeys(chain.from_iterable(map(_added, behind)))
    shape = root.meta["val"].shape
    return [each for each in found if each not in behind and same_shape(each.meta["val"].shape, shape)]


def _added(node: Node) -> Sequence[Node]:
    """What `node` adds something to, or may have added to it."""
    if node.kwargs:
        return ()
    if node.target is aten.add.Tensor:
        return node.all_input_nodes
    is_sum = node.target in (aten.index_add.default, aten.scatter_add.default)
    return node.all_input_nodes[:1] if is_sum or node.target is aten.index_put.default else ()
