"""One layer in many spellings: (hidden_states, router_weight, w13, w2) as in `stock`, w2 and w13 [E, B, A]."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.passes.stock import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, softmax_router, swiglu

Combine = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def of_best(combine: Combine) -> Callable[..., Tensor]:
    """`combine(x, weights [T, K], ids [T, K], w13, w2)` behind Mixtral's router."""

    def run(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        weights, ids = softmax_router(F.linear(x, router))
        return combine(x, weights.to(x.dtype), ids, w13, w2).to(x.dtype)

    return run


def of_one(combine: Combine) -> Callable[..., Tensor]:
    """`combine(x, probs [T, E], ids [T], w13, w2)` behind a top-1 of Switch."""

    def run(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        probs = F.linear(x, router).float().softmax(-1)
        return combine(x, probs, probs.argmax(-1), w13, w2).to(x.dtype)

    return run


def of_expert(weights: Tensor, ids: Tensor, expert: int) -> Tensor:
    return (weights * (ids == expert)).sum(-1, keepdim=True)


def unbound(x, weights, ids, w13, w2):
    """Weights of all experts cut apart at once."""
    total = torch.zeros_like(x)
    for expert, (first, second) in enumerate(zip(w13.unbind(), w2.unbind(), strict=True)):
        total = total + F.linear(swiglu(F.linear(x, first)), second) * of_expert(weights, ids, expert)
    return total


def einsum_by_expert(x, weights, ids, w13, w2):
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        hidden = swiglu(torch.einsum("th,ih->ti", x, w13[expert]))
        weight = of_expert(weights, ids, expert).squeeze(-1)
        total = total + torch.einsum("ti,ih,t->th", hidden, w2.mT[expert], weight)
    return total


def unflattened(gate_up):
    gate, up = gate_up.unflatten(-1, (2, INTERMEDIATE)).unbind(-2)
    return F.silu(gate) * up


def in_pairs(gate_up):
    """Gate and up columns in turns, as `x.view(..., 2)` has them."""
    pairs = gate_up.view(*gate_up.shape[:-1], INTERMEDIATE, 2)
    return F.silu(pairs[..., 0]) * pairs[..., 1]


def looped(gate):
    def combine(x, weights, ids, w13, w2):
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):
            hidden = gate(F.linear(x, w13[expert]))
            total = total + F.linear(hidden, w2[expert]) * of_expert(weights, ids, expert)
        return total

    return combine


def gathered(gate):
    """gpt-fast's, weighed in the einsum that adds choices up."""

    def combine(x, weights, ids, w13, w2):
        hidden = gate(torch.einsum("th,tkih->tki", x, w13[ids]))
        return torch.einsum("tki,tkhi,tk->th", hidden, w2[ids], weights)

    return combine


def from_the_left(x, weights, ids, w13, w2):
    """Tokens are columns of products."""
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        hidden = swiglu((w13[expert] @ x.T).T)
        total = total + (w2[expert] @ hidden.T).T * of_expert(weights, ids, expert)
    return total


def flat_ids(x, weights, ids, w13, w2):
    """Weights gathered slot by slot, seen by token."""
    w13 = torch.index_select(w13, 0, ids.view(-1)).view(-1, TOP_K, 2 * INTERMEDIATE, HIDDEN)
    w2 = torch.index_select(w2, 0, ids.view(-1)).view(-1, TOP_K, HIDDEN, INTERMEDIATE)
    hidden = swiglu(torch.einsum("th,tkih->tki", x, w13))
    return (torch.einsum("tki,tkhi->tkh", hidden, w2) * weights.unsqueeze(-1)).sum(1)


def with_biases(bias):
    """`baddbmm`; biases are columns of the weights, `bias(biases, ids)` those of each slot."""

    def combine(x, weights, ids, w13, w2):
        experts, rows = ids.flatten(), x.repeat_interleave(TOP_K, 0).unsqueeze(1)
        gate_up = torch.baddbmm(bias(w13[:, :, 0], experts).unsqueeze(1), rows, w13.mT[experts])
        out = torch.baddbmm(bias(w2[:, :, 0], experts).unsqueeze(1), swiglu(gate_up), w2.mT[experts])
        return (out.view(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(1)

    return combine


def transposed(how):
    """Of weights that lie with input features first: products of [A, E * B], which is a copy."""

    def combine(x, weights, ids, w13, w2):
        dense = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
        first, second = w13.mT.contiguous(), w2.mT.contiguous()
        return how(x, dense, first, second)

    return combine


def sigmoid_of_the_best(x, router, w13, w2):
    """Llama 4's weights, behind its experts."""
    logits = F.linear(x, router)
    best, ids = logits.topk(TOP_K, dim=-1)
    weights = torch.full_like(logits, float("-inf")).scatter(1, ids, best).sigmoid()
    out = torch.einsum("tei,ehi->teh", swiglu(torch.einsum("th,eih->tei", x, w13)), w2)
    return (out * weights.unsqueeze(-1)).sum(1)


def one_gathered(x, probs, ids, w13, w2):
    out = torch.einsum("ti,thi->th", swiglu(torch.einsum("th,tih->ti", x, w13[ids])), w2[ids])
    return out * probs.gather(1, ids.unsqueeze(1)).to(x.dtype)


def one_by_mask(x, probs, ids, w13, w2):
    """Switch: the weight is that of the chosen one, whichever that is."""
    mask, total = F.one_hot(ids, EXPERTS), torch.zeros_like(x)
    for expert in range(EXPERTS):
        out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert])
        total = total + out * mask[:, expert, None].to(x.dtype)
    return total * (probs * mask).sum(-1, keepdim=True).to(x.dtype)


def one_by_maximum(x, probs, ids, w13, w2):
    """The weight is the maximum, which was looked for by itself."""
    best, total = probs.max(-1).values, torch.zeros_like(x)
    for expert in range(EXPERTS):
        out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert])
        total = total + out * (best * (ids == expert)).unsqueeze(-1).to(x.dtype)
    return total


def one_at_once(x, probs, ids, w13, w2):
    out = torch.einsum("tei,ehi->teh", swiglu(torch.einsum("th,eih->tei", x, w13)), w2)
    chosen = torch.einsum("teh,te->th", out, F.one_hot(ids, EXPERTS).to(x.dtype))
    return chosen * probs.amax(-1, keepdim=True).to(x.dtype)


def one_by_max(x, router, w13, w2):
    weights, ids = F.linear(x, router).float().softmax(-1).max(-1)
    hidden = swiglu(torch.bmm(x.unsqueeze(1), w13.mT[ids]))
    return torch.bmm(hidden, w2.mT[ids]).squeeze(1) * weights.unsqueeze(-1).to(x.dtype)


def summed(x, weights, ids, w13, w2):
    """Number by number."""
    hidden = swiglu((w13[ids] * x[:, None, None]).sum(-1))
    return ((w2[ids] * hidden.unsqueeze(2)).sum(-1) * weights.unsqueeze(-1)).sum(1)


def summed_and_kept(x, weights, ids, w13, w2):
    """Sums that keep their dimension."""
    hidden = swiglu((w13[ids] * x[:, None, None]).sum(-1, True).squeeze(-1))
    out = (w2[ids] * hidden.unsqueeze(2)).sum(-1, keepdim=True).squeeze(-1)
    return (out * weights.unsqueeze(-1)).sum(1)


def summed_by_slots(x, weights, ids, w13, w2):
    """The same of flat ids, rows first, of which one product is a product."""
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(TOP_K, 0).unsqueeze(1)
    hidden = swiglu((rows * w13.index_select(0, flat)).sum(2))
    out = torch.bmm(w2.index_select(0, flat), hidden.unsqueeze(-1)).view(-1, TOP_K, HIDDEN)
    return (out * weights.unsqueeze(-1)).sum(1)


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "experts unbound": of_best(unbound),
    "einsums by expert": of_best(einsum_by_expert),
    "weights on the left": of_best(from_the_left),
    "gate and up unflattened": of_best(looped(unflattened)),
    "gate and up in pairs": of_best(looped(in_pairs)),
    "gathered, unflattened": of_best(gathered(unflattened)),
    "gathered, in pairs": of_best(gathered(in_pairs)),
    "gathered by flat ids": of_best(flat_ids),
    "biases within products": of_best(with_biases(lambda biases, experts: biases[experts])),
    "input features first": of_best(
        transposed(
            lambda x, dense, w13, w2: torch.einsum(
                "te,teh->th",
                dense,
                torch.einsum("tei,eih->teh", swiglu(torch.einsum("th,ehi->tei", x, w13)), w2),
            )
        )
    ),
    "tensordot": of_best(
        transposed(
            lambda x, dense, w13, w2: torch.einsum(
                "te,eth->th", dense, swiglu(torch.tensordot(x, w13.transpose(0, 1), 1)).transpose(0, 1) @ w2
            )
        )
    ),
    "summed number by number": of_best(summed),
    "summed, dimensions kept": of_best(summed_and_kept),
    "summed by slots": of_best(summed_by_slots),
    "sigmoid of scattered logits": sigmoid_of_the_best,
    "top-1, gathered": of_one(one_gathered),
    "top-1 by mask": of_one(one_by_mask),
    "top-1 by a maximum": of_one(one_by_maximum),
    "top-1 at once": of_one(one_at_once),
    "top-1 by max of rows": one_by_max,
}
