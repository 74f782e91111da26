"""More layers as strangers write them, and what becomes of each: the table in docs/raising.md."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.passes.buffers import drop_and_pad_by_position, late_ones_added, with_trash_row
from tests.passes.masks import by_group
from tests.passes.stock import EXPERTS, HIDDEN, TOP_K, softmax_router, sorted_slots, swiglu

BOTH = "experts and router"
EXPERTS_ONLY = "experts"


class Stranger(NamedTuple):
    """A layer of (hidden_states, router_weight, w13, w2), what is raised of it, and why something is not."""

    run: Callable[..., Tensor]
    raised: str
    reason: str = ""


def of_router(router: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """torchtitan's experts with another router; they take weights and ids of any number of columns."""

    def run(x: Tensor, weight: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return experts(x, *router(F.linear(x, weight).float()), w13, w2)

    return run


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    gate: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    order, offsets = sorted_slots(ids)
    tokens = order // ids.shape[1]
    hidden = gate(torch._grouped_mm(x[tokens], w13.mT, offsets))
    out = torch._grouped_mm(hidden, w2.mT, offsets) * weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, tokens, out.to(x.dtype))


def of_gate(gate: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return experts(x, *softmax_router(F.linear(x, weight)), w13, w2, gate)

    return run


def of_weights(combine: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """All experts on all tokens: `combine(hidden_states, weights [T, E], w13, w2)`."""

    def run(x: Tensor, weight: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        weights, ids = softmax_router(F.linear(x, weight))
        return combine(x, torch.zeros(x.shape[0], EXPERTS).scatter(1, ids, weights).to(x.dtype), w13, w2)

    return run


def dense(x, weights, w13, w2):
    out = torch.einsum("tei,ehi->teh", swiglu(torch.einsum("th,eih->tei", x, w13)), w2)
    return (out * weights.unsqueeze(-1)).sum(1)


def looped(x, weights, w13, w2):
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        w1, w3 = w13[expert].chunk(2)
        hidden = F.silu(F.linear(x, w1)) * F.linear(x, w3)
        total = total + F.linear(hidden, w2[expert]) * weights[:, expert, None]
    return total


def by_expert(x, weights, w13, w2):
    """w1 and w3 are tensors that hold those of all experts."""
    (w1, w3), total = w13.chunk(2, dim=1), torch.zeros_like(x)
    for expert in range(EXPERTS):
        hidden = F.silu(F.linear(x, w1[expert])) * F.linear(x, w3[expert])
        total = total + F.linear(hidden, w2[expert]) * weights[:, expert, None]
    return total


def with_biases(x, weights, w13, w2):
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        hidden = swiglu(F.linear(x, w13[expert], w13[expert, :, 0]))
        total = total + F.linear(hidden, w2[expert], w2[expert, :, 0]) * weights[:, expert, None]
    return total


def dispatched(x, weights, w13, w2):
    """GShard: [T, E, C], and what does not fit is dropped."""
    chosen = (weights > 0).int()
    place = chosen.cumsum(0) - 1
    slots = F.one_hot(place.clamp(0, 4), 5).to(x.dtype) * (chosen * (place < 5)).to(x.dtype).unsqueeze(-1)
    hidden = swiglu(torch.einsum("ech,eih->eci", torch.einsum("tec,th->ech", slots, x), w13))
    out = torch.einsum("eci,ehi->ech", hidden, w2)
    return torch.einsum("tec,ech->th", slots * weights.unsqueeze(-1), out)


def weighed_at_places(x, weights, w13, w2):
    """GShard's masks, weighed on the way in."""
    chosen = (weights > 0).int()
    place = chosen.cumsum(0) - 1
    slots = F.one_hot(place.clamp(0, 4), 5).to(x.dtype) * (chosen * (place < 5)).to(x.dtype).unsqueeze(-1)
    rows = torch.einsum("tec,th->ech", slots * weights.unsqueeze(-1), x)
    out = torch.einsum("eci,ehi->ech", swiglu(torch.einsum("ech,eih->eci", rows, w13)), w2)
    return torch.einsum("tec,ech->th", slots, out)


def expert_choice(x, weight, w13, w2):
    weights, tokens = F.linear(x, weight).softmax(-1).T.topk(4, dim=-1)
    out = torch.bmm(swiglu(torch.bmm(x[tokens], w13.mT)), w2.mT) * weights.unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, tokens.reshape(-1), out.reshape(-1, HIDDEN))


def not_flattened(x, weight, w13, w2):
    x = x.unsqueeze(0).expand(2, -1, -1)
    weights, ids = F.linear(x, weight).softmax(-1).topk(TOP_K)
    hidden = swiglu(torch.einsum("bth,btkih->btki", x, w13[ids]))
    return (torch.einsum("btki,btkhi->btkh", hidden, w2[ids]) * weights.unsqueeze(-1)).sum(2)


def padded(x, weight, w13, w2):
    """torchtitan's groups of a multiple of 8 rows."""
    weights, ids = softmax_router(F.linear(x, weight))
    order, offsets = sorted_slots(ids)
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    ends = ((counts + 7) // 8 * 8).cumsum(0)
    row = torch.arange(ids.numel() + 8 * EXPERTS)
    expert = torch.searchsorted(ends, row, right=True).clamp(max=EXPERTS - 1)
    within = row - (ends - (counts + 7) // 8 * 8)[expert]
    slot = torch.where(within < counts[expert], (offsets - counts)[expert] + within, ids.numel())
    rows = torch.cat([x[order // TOP_K], x.new_zeros(1, HIDDEN)])[slot]
    out = torch._grouped_mm(swiglu(torch._grouped_mm(rows, w13.mT, ends.int())), w2.mT, ends.int())
    sorted_out = out.new_zeros(ids.numel() + 1, HIDDEN).index_put((slot,), out)[:-1]
    sorted_out = sorted_out * weights.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
    return torch.zeros_like(x).index_add(0, order // TOP_K, sorted_out)


def residual_inside(x, weight, w13, w2):
    weights, ids = softmax_router(F.linear(x, weight))
    order, offsets = sorted_slots(ids)
    rows = x[order // TOP_K]
    out = rows + torch._grouped_mm(swiglu(torch._grouped_mm(rows, w13.mT, offsets)), w2.mT, offsets)
    out = out * weights.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // TOP_K, out.to(x.dtype))


def best_of_softmax(logits):
    weights, ids = logits.softmax(-1).max(-1)
    return weights.unsqueeze(-1), ids.unsqueeze(-1)


def in_log_space(logits):
    weights, ids = F.log_softmax(logits, -1).topk(TOP_K)
    return weights.exp(), ids


def within_capacity(logits):
    weights, ids = logits.softmax(-1).topk(TOP_K)
    of_expert = F.one_hot(ids.reshape(-1), EXPERTS)
    place = ((of_expert.cumsum(0) - 1) * of_expert).sum(-1).view(ids.shape)
    return torch.where(place < 5, weights, 0.0), ids


def scaled_by_expert(logits):
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return weights * torch.arange(EXPERTS)[ids], ids


def with_temperature(logits):
    return (logits / 0.7).softmax(-1).topk(TOP_K)


def adapters(x, weight, w13, w2):
    """LoRA: nothing stands between the products."""
    weights, ids = softmax_router(F.linear(x, weight))
    rows = torch.einsum("th,tkih->tki", x, w13[:, : w2.shape[2]][ids])
    return torch.einsum("tki,tkhi,tk->th", rows, w2[ids], weights.to(x.dtype))


def softmax_of_the_best(x, weight, w13, w2):
    """nanoGPT-like: logits in rows of minus infinity."""
    logits = F.linear(x, weight)
    best, ids = logits.topk(TOP_K, dim=-1)
    weights = torch.full_like(logits, float("-inf")).scatter(-1, ids, best).softmax(-1)
    return dense(x, weights, w13, w2)


def capped(logits):
    return (torch.tanh(logits / 30) * 30).softmax(-1).topk(TOP_K)


def of_squares(logits):
    return logits.sigmoid().square().topk(TOP_K)


def normed(gate_up):
    return F.rms_norm(swiglu(gate_up), (gate_up.shape[1] // 2,))


def in_turn(x, weight, w13, w2):
    """The choices of a token, one after another."""
    weights, ids = softmax_router(F.linear(x, weight))
    total = torch.zeros_like(x)
    for k in range(TOP_K):
        hidden = swiglu(torch.einsum("th,tih->ti", x, w13[ids[:, k]]))
        total = total + weights[:, k, None].to(x.dtype) * torch.einsum("ti,thi->th", hidden, w2[ids[:, k]])
    return total


def with_masks(x, weight, w13, w2):
    """Every token through every expert, once for each choice."""
    weights, ids = softmax_router(F.linear(x, weight))
    total = torch.zeros_like(x)
    for k in range(TOP_K):
        for expert in range(EXPERTS):
            out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert])
            mask = (ids[:, k] == expert).unsqueeze(1)
            total = total + torch.where(mask, weights[:, k, None].to(x.dtype) * out, 0.0)
    return total


def by_choice(x, weight, w13, w2):
    """Slots [K, T]."""
    weights, ids = softmax_router(F.linear(x, weight))
    order, offsets = sorted_slots(ids.T)
    rows = swiglu(torch._grouped_mm(x.repeat(TOP_K, 1)[order], w13.mT, offsets))
    out = torch._grouped_mm(rows, w2.mT, offsets)[order.argsort()].view(TOP_K, -1, HIDDEN)
    return (out * weights.T.unsqueeze(-1).to(x.dtype)).sum(0)


STRANGERS = {
    "a loop over `w1[e]`, `w3[e]`, `w2[e]`, every token through every expert": Stranger(
        of_weights(by_expert), BOTH
    ),
    "a loop that cuts gate and up out of `w13[e]`": Stranger(of_weights(looped), BOTH),
    "a loop with biases": Stranger(of_weights(with_biases), BOTH),
    "a loop over choices, which gathers weights for each": Stranger(in_turn, BOTH),
    "a loop over choices and experts, with masks": Stranger(with_masks, BOTH),
    "slots by choice, tokens repeated in turns": Stranger(by_choice, BOTH),
    "einsums over all experts, weights scattered": Stranger(of_weights(dense), BOTH),
    "two products with nothing between, as in LoRA": Stranger(adapters, BOTH),
    "a softmax over logits scattered into minus infinity": Stranger(softmax_of_the_best, BOTH),
    "tokens [B, S, H] and ids [B, S, K]": Stranger(not_flattened, BOTH),
    "top-1 by `max`": Stranger(of_router(best_of_softmax), BOTH),
    "`log_softmax`, `topk`, `exp`": Stranger(of_router(in_log_space), BOTH),
    "weights times a scale of each expert": Stranger(of_router(scaled_by_expert), BOTH),
    "weights beyond a capacity are zero": Stranger(of_router(within_capacity), BOTH),
    "gates of one's own, ReGLU": Stranger(
        of_gate(lambda x: F.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]), BOTH
    ),
    "a temperature before the softmax": Stranger(of_router(with_temperature), BOTH),
    "logits capped by a tanh": Stranger(of_router(capped), BOTH),
    "a router of squared scores": Stranger(
        of_router(of_squares), EXPERTS_ONLY, "the router is no RoutingConfig"
    ),
    "a norm between the products": Stranger(of_gate(normed), "", "the gate also reads"),
    "experts that add their input": Stranger(
        residual_inside, "", "aten.add.Tensor reads what experts give, not a weighted sum"
    ),
    "groups padded to multiples of 8 rows": Stranger(padded, "", "not from tokens in expert order"),
    "masks [T, E, C] with a capacity": Stranger(of_weights(dispatched), BOTH),
    "masks [B, S, E, C], a first choice and a second one": Stranger(
        partial(by_group, count=1), EXPERTS_ONLY, "the router is no RoutingConfig"
    ),
    "masks [T, E, C] that weigh what they place": Stranger(
        of_weights(weighed_at_places), "", "tokens are weighed where they are placed"
    ),
    "buffers [E * C, H] into which tokens are put by index": Stranger(with_trash_row, BOTH),
    "buffers that experts fill up, drop and pad": Stranger(drop_and_pad_by_position, BOTH),
    "buffers in which late tokens are added to the last place": Stranger(
        late_ones_added, "", "a place may hold several tokens"
    ),
    "experts choose their tokens": Stranger(expert_choice, "", "not all of them all tokens"),
}


def table() -> str:
    """What docs/raising.md shows."""
    rows = [
        f"| {name} | {stranger.raised or 'nothing'} | {stranger.reason and f'{stranger.reason} …'} |"
        for name, stranger in STRANGERS.items()
    ]
    return "\n".join(["| a layer with | raised | what `explain` says of the rest |", "|---|---|---|", *rows])
