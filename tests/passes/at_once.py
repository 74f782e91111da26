"""Layers of products of all tokens with all experts at once, out of which choices are taken."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.passes.stock import EXPERTS, HIDDEN, TOP_K, softmax_router, swiglu


def routed(combine: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer of `combine(x, weights, ids, w13, w2)`."""

    def run(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        weights, ids = softmax_router(F.linear(x, router))
        return combine(x, weights.to(x.dtype), ids, w13, w2)

    return run


def gathered(out, ids):
    return out.gather(1, ids.unsqueeze(-1).expand(-1, -1, HIDDEN))


def at_once(finish):
    """All experts in one product, [T, E, H]."""

    def run(x, weights, ids, w13, w2):
        hidden = swiglu(torch.einsum("th,eih->tei", x, w13))
        return finish(torch.einsum("tei,ehi->teh", hidden, w2), ids, weights)

    return run


def by_expert_at_once(finish):
    """The same as [E, T, H]."""

    def run(x, weights, ids, w13, w2):
        hidden = swiglu(torch.bmm(x.expand(EXPERTS, -1, -1), w13.mT))
        return finish(torch.bmm(hidden, w2.mT), ids, weights)

    return run


def over_choices(out, ids, weights):
    """In two sums: over experts for each choice, then over choices."""
    masks = F.one_hot(ids, EXPERTS).to(out.dtype)
    return (torch.einsum("tke,teh->tkh", masks, out) * weights.unsqueeze(-1)).sum(1)


def masked_choices(out, ids, weights):
    """Out of what all give by expert, with `torch.where` for each choice."""
    total = 0.0
    for k in range(TOP_K):
        mask = (ids[:, k] == torch.arange(EXPERTS)[:, None]).unsqueeze(-1)
        total = total + torch.where(mask, out * weights[:, k, None], 0.0).sum(0)
    return total


AT_ONCE = {
    "at once, gathered": at_once(
        lambda out, ids, weights: (gathered(out, ids) * weights.unsqueeze(-1)).sum(1)
    ),
    "at once, picked": at_once(
        lambda out, ids, weights: torch.einsum(
            "tk,tkh->th", weights, out[torch.arange(len(ids)).unsqueeze(1), ids]
        )
    ),
    "by expert at once, picked": by_expert_at_once(
        lambda out, ids, weights: (out[ids, torch.arange(len(ids))[:, None]] * weights[..., None]).sum(1)
    ),
    "at once, over choices": at_once(over_choices),
    "by expert at once, masked choices": by_expert_at_once(masked_choices),
}
