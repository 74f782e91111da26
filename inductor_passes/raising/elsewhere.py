"""Weights [T, E] of all experts, which are zero where nobody chose, however they are made so.

weights = logits.masked_fill(~chosen, -math.inf).softmax(-1)
weights = probs * chosen / (probs * chosen).sum(-1, keepdim=True)
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes.raising.choices import is_of_router
from inductor_passes.raising.evaluation import WIDE, Cut, cut, evaluate, is_plain, is_size
from inductor_passes.raising.indices import Indices
from inductor_passes.raising.strays import stray_runs
from inductor_passes.raising.views_of_rows import prims, rank, same_shape


def ways_of_all(node: Node, indices: Indices) -> Iterator[bool]:
    """Whether `node` may be by expert, [E, T], where it may have a floating number for each expert of each token."""
    tokens = indices.ids.meta["val"].shape[:-1]
    if rank(node) > 1 and node.meta["val"].dtype in WIDE:
        for is_by_expert, wanted in (
            (False, (*tokens, indices.num_experts)),
            (True, (indices.num_experts, *tokens)),
        ):
            if same_shape(node.meta["val"].shape, wanted) and not (is_by_expert and len(tokens) > 1):
                yield is_by_expert


def is_zero_elsewhere(node: Node, indices: Indices, is_by_expert: bool) -> bool:
    """Whether `node`, of all experts, is zero for those that a token did not choose: for any ids and logits.

    Of ids that are not the best ones a router makes NaN where these weigh nothing beside the best.
    """
    if stray_runs(indices):
        return False
    found, generator = _between(node, indices), torch.Generator().manual_seed(0)
    for ids, power in product(indices.samples, (0, 2)):
        weights = _weights(node, found, ids, indices, partial(of_sizes, power=power, generator=generator))
        if weights is None:
            return False
        weights = weights.T if is_by_expert else weights.reshape(len(ids), indices.num_experts)
        unknown = weights.isnan().any(1, keepdim=True)
        others = weights.scatter(1, ids, 0.0).masked_fill(unknown, 0.0)
        if bool(others.ne(0).any()) or (power == 0 and bool(unknown.any())):
            return False
    return True


def _between(node: Node, indices: Indices) -> Cut:
    """Back to ids, to logits, and to noise."""
    return cut([node], lambda each: each is indices.ids or is_of_router(each) or is_noise(each))


def is_noise(node: Node) -> bool:
    """Whether `node` is drawn: Inductor draws by seeds."""
    return node.target is prims.inductor_random.default or not is_plain(node)


def _weights(
    node: Node, found: Cut, ids: Tensor, indices: Indices, draw: Callable[[Sequence[int]], Tensor]
) -> Tensor | None:
    """`node` for these ids; None where it depends on anything that cannot be drawn."""
    known: dict[Node, Any] = {leaf: _drawn(leaf, ids, indices, draw) for leaf in found.leaves}
    if any(value is None for value in known.values()):
        return None
    try:
        return evaluate(found.nodes, known)[node]
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None


def _drawn(leaf: Node, ids: Tensor, indices: Indices, draw: Callable[[Sequence[int]], Tensor]) -> Any:
    """Numbers for a leaf; None where it holds others."""
    if leaf is indices.ids:
        return indices.as_read(ids)
    if is_size(leaf):
        return indices.size(leaf, len(ids))
    shape = [indices.given(size, len(ids)) for size in leaf.meta["val"].shape] if rank(leaf) >= 0 else [None]
    if None in shape or leaf.meta["val"].dtype not in WIDE:
        return None
    return draw([size or 0 for size in shape])


def of_sizes(shape: Sequence[int], power: int, generator: torch.Generator) -> Tensor:
    """Random numbers, large, small and negative: the larger the power."""
    numbers, sizes = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return numbers * 10 ** (power * sizes)
