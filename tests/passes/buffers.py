"""Layers that put tokens into buffers [E * C, H] by index, each in the style of a code base or of a tutorial."""

import torch
from torch.nn import functional as F

from tests.passes.masks import capacity_of
from tests.passes.stock import EXPERTS, HIDDEN, softmax_router, swiglu


def experts(rows, w13, w2):
    """Rows [E, C, H] through SwiGLU."""
    return torch.bmm(swiglu(torch.bmm(rows, w13.mT)), w2.mT)


def placed(ids):
    """[T, K]: the place of each slot with its expert; second choices come behind all first ones."""
    by_choice = F.one_hot(ids.T.reshape(-1), EXPERTS)
    places = ((by_choice.cumsum(0) - 1) * by_choice).sum(-1)
    return places.view(ids.shape[1], -1).T


def placed_in_order(ids):
    """[T, K]: the same, token by token."""
    chosen = F.one_hot(ids.reshape(-1), EXPERTS)
    return ((chosen.cumsum(0) - 1) * chosen).sum(-1).view(ids.shape)


def tutel(x, router, w13, w2):
    """Choice after choice; dropped tokens are masked, and add zeros to the first place."""
    weights, ids = softmax_router(F.linear(x, router))
    capacity = capacity_of(len(x), ids.shape[1])
    place = placed(ids)
    kept = place < capacity
    where = torch.where(kept, ids * capacity + place, 0)
    rows = x.new_zeros(EXPERTS * capacity, HIDDEN)
    for choice in range(ids.shape[1]):
        rows = rows.index_add(0, where[:, choice], x * kept[:, choice, None].to(x.dtype))
    out = experts(rows.view(EXPERTS, capacity, HIDDEN), w13, w2).view(-1, HIDDEN)
    total = torch.zeros_like(x)
    for choice in range(ids.shape[1]):
        share = (weights[:, choice] * kept[:, choice]).to(x.dtype)
        total = total + out[where[:, choice]] * share.unsqueeze(-1)
    return total


def with_trash_row(x, router, w13, w2):
    """Slots without a place go to the last row, which reads back as zero."""
    weights, ids = softmax_router(F.linear(x, router))
    capacity = capacity_of(len(x), ids.shape[1])
    place = placed_in_order(ids).reshape(-1)
    where = torch.where(place < capacity, ids.reshape(-1) * capacity + place, EXPERTS * capacity)
    rows = x.new_zeros(EXPERTS * capacity + 1, HIDDEN)
    rows = rows.index_copy(0, where, x.repeat_interleave(ids.shape[1], 0))
    out = experts(rows[:-1].view(EXPERTS, capacity, HIDDEN), w13, w2)
    out = torch.cat([out.view(-1, HIDDEN), x.new_zeros(1, HIDDEN)])[where]
    return (out.view(*ids.shape, HIDDEN) * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def never_dropped(x, router, w13, w2):
    """As many places as tokens, buffers [E, T, H] written at two indices and read at them."""
    weights, ids = softmax_router(F.linear(x, router))
    place, tokens = placed_in_order(ids), torch.arange(len(x)).unsqueeze(1).expand_as(ids)
    rows = x.new_zeros(EXPERTS, len(x), HIDDEN)
    rows[ids, place] = x[tokens]
    return torch.einsum("tkh,tk->th", experts(rows, w13, w2)[ids, place], weights.to(x.dtype))


def without_memory(x, router, w13, w2):
    """Places that nobody has are never written: whatever they hold is not read."""
    weights, ids = softmax_router(F.linear(x, router))
    place = placed_in_order(ids)
    where = (ids * len(x) + place).reshape(-1)
    rows = x.new_empty(EXPERTS * len(x), HIDDEN)
    rows[where] = x.unsqueeze(1).expand(-1, ids.shape[1], -1).reshape(-1, HIDDEN)
    out = experts(rows.view(EXPERTS, -1, HIDDEN), w13, w2).view(-1, HIDDEN)
    return (out[where].view(*ids.shape, HIDDEN) * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def drop_and_pad(x, router, w13, w2):
    """Megatron's: an expert takes as many tokens as it has places, those that choose it most first."""
    weights, ids = softmax_router(F.linear(x, router))
    capacity = capacity_of(len(x), ids.shape[1])
    of_all = torch.zeros(len(x), EXPERTS, dtype=weights.dtype).scatter(1, ids, weights)
    chosen = torch.zeros(len(x), EXPERTS, dtype=torch.int64).scatter(1, ids, 1).bool()
    picked = (of_all * chosen).T.topk(capacity, dim=1).indices
    tokens = picked.reshape(-1)
    share = (of_all * chosen).T.gather(1, picked).reshape(-1)
    out = experts(x.index_select(0, tokens).view(EXPERTS, capacity, HIDDEN), w13, w2)
    out = out.view(-1, HIDDEN) * share.unsqueeze(-1).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, tokens.unsqueeze(1).expand(-1, HIDDEN), out)


def drop_and_pad_by_position(x, router, w13, w2):
    """The same, early tokens first: those that have not chosen an expert fill its places, and weigh nothing."""
    weights, ids = softmax_router(F.linear(x, router))
    capacity = capacity_of(len(x), ids.shape[1])
    of_all = torch.zeros(len(x), EXPERTS, dtype=weights.dtype).scatter(1, ids, weights)
    chosen = torch.zeros(len(x), EXPERTS, dtype=torch.int64).scatter(1, ids, 1)
    picked = chosen.T.contiguous().argsort(dim=-1, descending=True, stable=True)[:, :capacity].contiguous()
    tokens, at = picked.view(-1), (torch.arange(EXPERTS).unsqueeze(-1) * len(x) + picked).view(-1)
    share = of_all.T.contiguous().view(-1).index_select(0, at)
    out = experts(x.index_select(0, tokens).view(EXPERTS, capacity, -1), w13, w2)
    out = out.view(-1, HIDDEN) * share.unsqueeze(-1).to(x.dtype)
    return torch.zeros_like(x).scatter_add_(0, tokens.unsqueeze(1).expand(-1, HIDDEN), out)


def sorted_into_buffers(x, router, w13, w2):
    """Slots in expert order, each at its distance from the first of its expert."""
    weights, ids = softmax_router(F.linear(x, router))
    top_k, capacity = ids.shape[1], capacity_of(len(x), ids.shape[1])
    order = ids.reshape(-1).argsort(stable=True)
    expert = ids.reshape(-1)[order]
    counts = F.one_hot(ids.reshape(-1), EXPERTS).sum(0)
    place = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[expert]
    where = torch.where(place < capacity, expert * capacity + place, EXPERTS * capacity)
    rows = x.new_zeros(EXPERTS * capacity + 1, HIDDEN)
    rows.scatter_(0, where.unsqueeze(1).expand(-1, HIDDEN), x[order // top_k])
    out = experts(rows[:-1].unflatten(0, (EXPERTS, capacity)), w13, w2).flatten(0, 1)
    out = F.pad(out, (0, 0, 0, 1))[where] * weights.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
    return torch.zeros_like(x).index_add(0, order // top_k, out)


def indices_of_tokens(x, router, w13, w2):
    """A buffer of token numbers, whose last one is a row of zeros; what weighs them lies beside."""
    weights, ids = softmax_router(F.linear(x, router))
    capacity, (tokens, top_k) = capacity_of(len(x), ids.shape[1]), ids.shape
    place = placed(ids)
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity).reshape(-1)
    token = torch.arange(tokens).repeat_interleave(top_k)
    at = torch.full((EXPERTS * capacity + 1,), tokens).index_put((where,), token)[:-1]
    share = torch.zeros(EXPERTS * capacity + 1, dtype=weights.dtype).index_put((where,), weights.reshape(-1))[
        :-1
    ]
    rows = torch.cat([x, x.new_zeros(1, HIDDEN)])[at]
    out = experts(rows.view(EXPERTS, capacity, HIDDEN), w13, w2).view(-1, HIDDEN)
    total = x.new_zeros(tokens + 1, HIDDEN)
    return total.index_add(0, at, out * share.unsqueeze(-1).to(x.dtype))[:-1]


def switch_by_index(x, router, w13, w2):
    """A top-1 that drops, with scatter and gather along columns."""
    gate, ids = F.linear(x, router).float().softmax(-1).max(-1)
    capacity = capacity_of(len(x), 1)
    place = placed_in_order(ids.unsqueeze(1)).squeeze(1)
    kept = place < capacity
    where = (ids * capacity + place.clamp(max=capacity - 1)).unsqueeze(1).expand(-1, HIDDEN)
    rows = torch.zeros(EXPERTS * capacity, HIDDEN, dtype=x.dtype)
    rows = rows.scatter_add(0, where, x.masked_fill(~kept.unsqueeze(1), 0.0))
    out = experts(rows.view(EXPERTS, capacity, HIDDEN), w13, w2).view(-1, HIDDEN)
    return out.gather(0, where) * (gate * kept).unsqueeze(1).to(x.dtype)


def with_biases(x, router, w13, w2):
    """An MLP with biases: what nobody has put in a place is not zero behind it."""
    weights, ids = softmax_router(F.linear(x, router))
    capacity, intermediate = capacity_of(len(x), ids.shape[1]), w2.shape[2]
    place = placed(ids).reshape(-1)
    kept = (place < capacity).unsqueeze(1).to(x.dtype)
    where = ids.reshape(-1) * capacity + place.clamp(max=capacity - 1)
    slots = x.repeat_interleave(ids.shape[1], 0) * kept
    rows = x.new_zeros(EXPERTS * capacity, HIDDEN).index_add(0, where, slots).view(EXPERTS, capacity, HIDDEN)
    hidden = F.relu(torch.baddbmm(w13[:, None, :intermediate, 0], rows, w13[:, :intermediate].mT))
    out = torch.baddbmm(w2[:, None, :, 0], hidden, w2.mT).view(-1, HIDDEN)
    out = out[where] * kept * weights.reshape(-1, 1).to(x.dtype)
    return out.view(*ids.shape, HIDDEN).sum(1)


def best_first(x, router, w13, w2):
    """Tutel's batch prioritised routing: tokens of large weights have places first."""
    weights, ids = softmax_router(F.linear(x, router))
    capacity = capacity_of(len(x), ids.shape[1])
    rank = weights.amax(1).argsort(descending=True)
    place = placed(ids[rank])[rank.argsort()]
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity)
    rows = x.new_zeros(EXPERTS * capacity + 1, HIDDEN)
    rows[where.reshape(-1)] = x.repeat_interleave(ids.shape[1], 0)
    out = experts(rows[:-1].view(EXPERTS, capacity, HIDDEN), w13, w2).view(-1, HIDDEN)
    out = torch.cat([out, out.new_zeros(1, HIDDEN)])[where]
    return (out * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def of_batches(x, router, w13, w2):
    """[B, S, H] with a residual, gate and up apart."""
    tokens = x.view(2, -1, HIDDEN)
    weights, ids = softmax_router(F.linear(tokens, router))
    capacity, top_k = capacity_of(len(x), ids.shape[2]), ids.shape[2]
    place = placed_in_order(ids.view(-1, top_k)).reshape(-1)
    where = torch.where(place < capacity, ids.reshape(-1) * capacity + place, EXPERTS * capacity)
    rows = x.new_zeros(EXPERTS * capacity + 1, HIDDEN)
    rows = rows.index_add(0, where, tokens.reshape(-1, 1, HIDDEN).expand(-1, top_k, -1).reshape(-1, HIDDEN))
    rows = rows[: EXPERTS * capacity].view(EXPERTS, capacity, HIDDEN)
    gate, up = (torch.einsum("ech,eih->eci", rows, each) for each in w13.chunk(2, dim=1))
    out = torch.einsum("eci,ehi->ech", F.gelu(gate) * up, w2).reshape(-1, HIDDEN)
    out = torch.cat([out, out.new_zeros(1, HIDDEN)])[where].view(*ids.shape, HIDDEN)
    return (tokens + (out * weights.unsqueeze(-1).to(x.dtype)).sum(2)).view(x.shape)


def by_choice_at_once(x, router, w13, w2):
    """All first choices, then all second ones, added to what a shared expert gives; squeezed and unsqueezed."""
    weights, ids = softmax_router(F.linear(x, router))
    top_k, capacity = ids.shape[1], capacity_of(len(x), ids.shape[1])
    place, chosen = placed(ids).T.reshape(-1), ids.T.reshape(-1)
    where = torch.where(place < capacity, chosen * capacity + place, EXPERTS * capacity)
    rows = x.new_zeros(1, EXPERTS * capacity + 1, HIDDEN).squeeze()
    rows.index_copy_(0, where, x.repeat(top_k, 1))
    out = experts(rows[:-1].view(EXPERTS, capacity, HIDDEN), w13, w2).flatten(0, 1)
    out = torch.cat((out, torch.zeros_like(out[:1]))).index_select(0, where)
    out = out * weights.T.reshape(-1, 1).to(x.dtype)
    shared = F.silu(x) @ w13[0]
    return shared.index_add(0, torch.arange(len(x)).repeat(top_k), out)


def with_a_matrix(x, router, w13, w2):
    """Tokens are placed by a matrix of zeros and ones, and read by index."""
    weights, ids = softmax_router(F.linear(x, router))
    capacity = capacity_of(len(x), ids.shape[1])
    place = placed_in_order(ids)
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity)
    mask = F.one_hot(where, EXPERTS * capacity + 1).sum(1)[:, :-1]
    out = experts((mask.T.to(x.dtype) @ x).view(EXPERTS, capacity, HIDDEN), w13, w2).view(-1, HIDDEN)
    out = torch.cat([out, out.new_zeros(1, HIDDEN)])
    return torch.bmm(weights.unsqueeze(1).to(x.dtype), out[where]).squeeze(1)


def late_ones_added(x, router, w13, w2):
    """Who is too late is added to the last place, which both read."""
    weights, ids = softmax_router(F.linear(x, router))
    capacity = capacity_of(len(x), ids.shape[1])
    where = ids * capacity + placed_in_order(ids).clamp(max=capacity - 1)
    rows = x.new_zeros(EXPERTS * capacity, HIDDEN)
    rows = rows.index_add(0, where.reshape(-1), x.repeat_interleave(ids.shape[1], 0))
    out = experts(rows.view(EXPERTS, capacity, HIDDEN), w13, w2).view(-1, HIDDEN)
    return (out[where] * weights.unsqueeze(-1).to(x.dtype)).sum(1)


STYLES = {
    each.__name__: each
    for each in (
        tutel,
        with_trash_row,
        never_dropped,
        without_memory,
        drop_and_pad,
        drop_and_pad_by_position,
        sorted_into_buffers,
        indices_of_tokens,
        switch_by_index,
        with_biases,
        best_first,
        of_batches,
        by_choice_at_once,
        with_a_matrix,
    )
}
