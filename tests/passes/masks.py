"""Layers that place tokens by masks [T, E, C] with a capacity C, each in the style of a code base or a paper."""

import torch
from torch.nn import functional as F

from tests.passes.stock import EXPERTS, HIDDEN, swiglu


def capacity_of(tokens, top_k, factor=1.0):
    """The places of an expert."""
    return max(1, int(tokens * top_k * factor) // EXPERTS)


def experts(rows, w13, w2):
    """Rows [E, C, H] through SwiGLU."""
    return torch.einsum("eci,ehi->ech", swiglu(torch.einsum("ech,eih->eci", rows, w13)), w2)


def through(x, mask, weights, w13, w2, run=experts):
    """To the places of experts, through these, and back."""
    out = run(torch.einsum("sec,sm->ecm", mask.to(x.dtype), x), w13, w2)
    return torch.einsum("sec,ecm->sm", weights.to(x.dtype), out)


def placed_in_turn(gates, second, capacity, after_first=True):
    """DeepSpeed's and fairseq's top-2: second choices have the places after all first ones. Weights [T, E, C]."""
    first = gates.argmax(-1)
    chosen = [F.one_hot(first, EXPERTS)]
    chosen.append(F.one_hot(second(gates, chosen[0].bool()), EXPERTS))
    places = [each.cumsum(-2) - 1 for each in chosen]
    if after_first:
        places[1] = places[1] + chosen[0].sum(-2, keepdim=True)
    kept = [each * (place < capacity) for each, place in zip(chosen, places, strict=True)]
    shares = [(gates * each).sum(-1) for each in kept]
    total = (shares[0] + shares[1]).clamp(min=torch.finfo(gates.dtype).eps)
    weights = torch.zeros(*gates.shape, capacity, dtype=gates.dtype)
    for each, place, share in zip(kept, places, shares, strict=True):
        where = F.one_hot((place * each).sum(-1), capacity).to(gates.dtype)
        weights = weights + ((share / total).unsqueeze(-1) * each).unsqueeze(-1) * where.unsqueeze(-2)
    return weights


def best_of_others(gates, taken):
    return gates.masked_fill(taken, float("-inf")).argmax(-1)


def drawn_of_others(gates, taken):
    """With Gumbel noise."""
    noise = -torch.log(-torch.log(torch.rand_like(gates)))
    return (gates.log() + noise).masked_fill(taken, float("-inf")).argmax(-1)


def top2(second=best_of_others, after_first=True):
    def run(x, router, w13, w2):
        gates = F.linear(x, router).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        weights = placed_in_turn(gates, second, capacity_of(len(x), 2), after_first)
        return through(x, weights.bool(), weights, w13, w2)

    return run


def top1_of(x, router):
    """(gates, ids one-hot, places [T, E]) of a router that chooses one."""
    gates = F.linear(x, router).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), EXPERTS)
    return gates, chosen, (chosen.cumsum(0) - 1) * chosen


def top1(x, router, w13, w2):
    """DeepSpeed's."""
    (gates, chosen, place), capacity = top1_of(x, router), capacity_of(len(x), 1)
    chosen = chosen * (place < capacity)
    where = F.one_hot((place * chosen).sum(-1), capacity).to(gates.dtype)
    weights = torch.einsum("se,sc->sec", gates * chosen, where)
    return through(x, weights.bool(), weights, w13, w2)


def switch(x, router, w13, w2):
    """Mesh TensorFlow's: the mask is made first, and weighed then."""
    capacity = capacity_of(len(x), 1)
    gates = F.linear(x, router).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
    gate, ids = gates.max(-1)
    chosen = F.one_hot(ids, EXPERTS).to(gates.dtype)
    place = (chosen.cumsum(0) * chosen).to(torch.int32)
    chosen = chosen * (place <= capacity)
    where = F.one_hot((place * chosen.int()).sum(-1).long(), capacity + 1)[:, 1:]
    mask = chosen.unsqueeze(-1) * where.unsqueeze(1)
    return through(x, mask, mask * gate[:, None, None], w13, w2)


def best_tokens_first(x, router, w13, w2):
    """Experts keep the tokens that choose them most, DeepSpeed's "probs"."""
    gates = F.linear(x, router).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
    capacity = capacity_of(len(x), 2)
    chosen = torch.zeros_like(gates).scatter(1, gates.topk(2).indices, 1.0)
    kept = torch.zeros_like(gates).scatter(0, (gates * chosen).topk(capacity, dim=0).indices, 1.0)
    kept = (kept * chosen).long()
    shares = gates * kept
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-9)
    where = F.one_hot((kept.cumsum(0) - 1) * kept, capacity).to(gates.dtype)
    weights = torch.einsum("se,sec->sec", shares, where)
    return through(x, weights.bool(), weights, w13, w2)


def in_order_of_tokens(x, router, w13, w2):
    """A mask of all choices, DeepSpeed's "position"."""
    gates = F.linear(x, router).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
    capacity = capacity_of(len(x), 2)
    chosen = torch.zeros_like(gates, dtype=torch.int64).scatter(1, gates.topk(2, dim=1).indices, 1)
    place = chosen.cumsum(0) - 1
    chosen = chosen * (place < capacity)
    shares = gates * chosen
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-9)
    weights = torch.einsum("se,sec->sec", shares, F.one_hot(place * chosen, capacity).to(gates.dtype))
    return through(x, weights.bool(), weights, w13, w2)


def by_group(x, router, w13, w2, count=2):
    """GShard's: groups have places of their own, [G, S, E, C]."""
    groups = x.view(count, -1, HIDDEN)
    gates = F.linear(groups, router).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
    capacity = capacity_of(groups.shape[1], 2)
    weights = placed_in_turn(gates, best_of_others, capacity)
    rows = torch.einsum("gsec,gsm->egcm", weights.bool().to(x.dtype), groups)
    hidden = swiglu(torch.einsum("egcm,eim->egci", rows, w13))
    out = torch.einsum("egci,emi->egcm", hidden, w2)
    return torch.einsum("gsec,egcm->gsm", weights.to(x.dtype), out).view(x.shape)


def exclusive(mask):
    return mask.cumsum(-2) - mask


def by_batch(x, router, w13, w2, count=2):
    """Floating masks, counted without the token itself, [B, S, E, C]; second choices of small weight may be dropped."""
    rows = x.view(count, -1, HIDDEN)
    gates = F.linear(rows, router).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
    shares, ids = gates.topk(2)
    shares = shares / shares.sum(-1, keepdim=True)
    capacity = capacity_of(rows.shape[1], 2)
    weights, before = 0, 0
    for choice in range(2):
        share = shares[..., choice]
        chosen = F.one_hot(ids[..., choice], EXPERTS).to(gates.dtype)
        if choice:
            chosen = chosen * (share > 0.2).to(gates.dtype).unsqueeze(-1)
        place = (exclusive(chosen) + before) * chosen
        chosen = chosen * (place < capacity).to(gates.dtype)
        before = before + chosen.sum(-2, keepdim=True)
        where = F.one_hot((place * chosen).sum(-1).long(), capacity).to(gates.dtype)
        share = share * chosen.sum(-1)
        weights = weights + share[..., None, None] * chosen.unsqueeze(-1) * where.unsqueeze(-2)
    placed = torch.einsum("bnd,bnec->ebcd", rows, weights.bool().to(x.dtype))
    out = experts(placed.reshape(EXPERTS, -1, HIDDEN), w13, w2).view(placed.shape)
    return torch.einsum("ebcd,bnec->bnd", out, weights.to(x.dtype)).view(x.shape)


def with_matrices(x, router, w13, w2):
    """fairseq's: plain products of matrices [E * C, T]."""
    (gates, chosen, place), capacity = top1_of(x, router), capacity_of(len(x), 1, 1.5)
    where = F.one_hot(place.sum(-1).clamp(max=capacity), capacity + 1)[:, :capacity]
    mask = chosen.unsqueeze(-1) * where.unsqueeze(1)
    weights = (mask * gates.unsqueeze(-1)).to(x.dtype)
    rows = mask.permute(1, 2, 0).reshape(-1, len(x)).to(x.dtype) @ x
    out = experts(rows.view(EXPERTS, capacity, -1), w13, w2)
    return weights.view(len(x), -1) @ out.view(-1, HIDDEN)


def ungated(x, router, w13, w2, act=F.relu):
    """An MLP with biases: what is nobody's place is not zero behind it."""
    (gates, chosen, place), capacity = top1_of(x, router), capacity_of(len(x), 1)
    mask = (chosen * (place < capacity)).unsqueeze(-1) * F.one_hot(place.clamp(max=capacity - 1), capacity)

    def run(rows, w13, w2):
        hidden = act(torch.bmm(rows, w13[:, : w2.shape[2]].mT) + w13[:, None, : w2.shape[2], 0])
        return torch.baddbmm(w2[:, None, :, 0], hidden, w2.mT)

    return through(x, mask, mask * gates.unsqueeze(-1), w13, w2, run)


def gate_and_up_apart(x, router, w13, w2):
    def run(rows, w13, w2):
        gate, up = (torch.bmm(rows, each.mT) for each in w13.chunk(2, dim=1))
        return torch.bmm(F.gelu(gate) * up, w2.mT)

    (gates, chosen, place), capacity = top1_of(x, router), capacity_of(len(x), 1)
    mask = (chosen * (place < capacity)).unsqueeze(-1) * F.one_hot(place.clamp(max=capacity - 1), capacity)
    return through(x, mask, mask * gates.unsqueeze(-1), w13, w2, run)


def first_choices_first(x, router, w13, w2, top_k=3):
    """Slots by choice, [K * T, E], placed at once."""
    gates = F.linear(x, router).to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
    shares, ids = gates.topk(top_k)
    capacity = capacity_of(len(x), top_k, 0.5)
    chosen = F.one_hot(ids.T.reshape(-1), EXPERTS)
    place = (chosen.cumsum(0) * chosen - 1).view(top_k, -1, EXPERTS).amax(0)
    mask = place.unsqueeze(-1) == torch.arange(capacity)
    of_all = torch.zeros_like(gates).scatter(1, ids, shares)
    return through(x, mask, mask * of_all.unsqueeze(-1), w13, w2)


def for_each_expert(x, router, w13, w2, top_k=2):
    """nanoMoE's: a product of each expert's places with all tokens; who is dropped stands at one, without a weight."""
    logits = F.linear(x, router).to(torch.promote_types(x.dtype, torch.float32))
    best, ids = logits.topk(top_k)
    gates = torch.full_like(logits, float("-inf")).scatter(-1, ids, best).softmax(-1)
    capacity = capacity_of(len(x), top_k)
    chosen = F.one_hot(ids, EXPERTS).movedim(1, 0)
    place = (chosen.reshape(-1, EXPERTS).cumsum(0) - 1).view(top_k, -1, EXPERTS)
    chosen = chosen * (place < capacity)
    where = F.one_hot((chosen * place).sum(-1), capacity)
    weights = ((chosen * gates).unsqueeze(3) * where.unsqueeze(2)).sum(0)
    rows = weights.bool().permute(1, 2, 0).to(x.dtype) @ x
    return weights.flatten(1).to(x.dtype) @ experts(rows, w13, w2).flatten(0, 1)


STYLES = {
    each.__name__: each
    for each in (
        top1,
        switch,
        best_tokens_first,
        in_order_of_tokens,
        by_group,
        by_batch,
        with_matrices,
        ungated,
        gate_and_up_apart,
        first_choices_first,
        for_each_expert,
    )
} | {"top2": top2()}
