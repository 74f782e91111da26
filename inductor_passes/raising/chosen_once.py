"""A router that is raised chooses once: whoever reads its ids, in any shape, reads those of the new one.

Of scores that tie our routers take the lower id, a top-k any: beside the new ids those of before may be others.
"""

from torch.fx import Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import cut
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.router_trials import Choice
from inductor_passes.raising.views_of_rows import args, aten, changes_dtype, is_view, readers, same_shape


def first_held(ids: Node) -> Node:
    """Where ids [T, K] are first in a graph, as [*, K]: models, and layers of buffers, show, copy and cast them."""
    first = ids
    while _is_the_same(ids):
        ids = args(ids)[0]
        has_choices = same_shape(ids.meta["val"].shape[-1:], first.meta["val"].shape[-1:])
        first = ids if has_choices else first
    return first


def _is_the_same(ids: Node) -> bool:
    is_held = is_view(ids) or changes_dtype(ids) or ids.target is aten.clone.default
    return is_held and is_integral(args(ids)[0])


def expect_one_choice(choice: Choice, first: Node) -> None:
    """Refuses where somebody else reads what a router has chosen before that became its ids."""
    inside = {*choice.cut.nodes}
    for node in cut([first], lambda node: node is choice.logits).nodes:
        others = [user for user in readers(node) if user not in inside]
        if node is not first and is_integral(node) and others:
            reason = f"{describe(others[0])} also reads {describe(node)}, of which a router makes its ids"
            raise Refusal(others[0], reason)
