"""Layers made of two parts, which put tokens into buffers and read them: some right, some not."""

import torch
from torch.nn import functional as F

from tests.passes.buffers import experts, placed_in_order
from tests.passes.masks import capacity_of
from tests.passes.stock import EXPERTS, HIDDEN, TOP_K, softmax_router, swiglu


def put(x, ids, place, capacity, weights):
    """Into buffers with a last row for who has no place."""
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity).reshape(-1)
    rows = x.new_zeros(EXPERTS * capacity + 1, HIDDEN)
    return rows.index_put((where,), x.repeat_interleave(ids.shape[1], 0))[:-1]


def read(out, x, ids, place, capacity, weights):
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity)
    out = torch.cat([out, out.new_zeros(1, HIDDEN)])[where]
    return (out * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def of(put=put, read=read, run=experts, route=softmax_router, places=placed_in_order, factor=1.0):
    """A layer of parts: how rows are put into buffers, and read."""

    def function(x, router, w13, w2):
        weights, ids = route(F.linear(x, router))
        where = x, ids, places(ids), capacity_of(len(x), ids.shape[1], factor), weights
        out = run(put(*where).view(EXPERTS, -1, HIDDEN), w13, w2)
        return read(out.view(-1, HIDDEN), *where)

    return function


def renormalised(out, x, ids, place, capacity, weights):
    """Weights of who has a place add up to one."""
    kept = weights * (place < capacity)
    return read(out, x, ids, place, capacity, kept / kept.sum(1, keepdim=True).clamp(min=1e-9))


def twice_the_best(logits):
    """Both choices are the best one: a token has two places with one expert."""
    weights, ids = logits.float().softmax(-1).max(-1)
    return torch.stack([weights, weights / 3], 1), torch.stack([ids, logits.argmax(-1)], 1)


def best_of_softmax(logits):
    return logits.float().softmax(-1).topk(1)


def squeezed(out, x, ids, place, capacity, weights):
    """A dimension of size 1 goes: the only column of weights is none."""
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity)
    out = out * (1 + torch.arange(len(out)).unsqueeze(1)).to(x.dtype)  # each place weighs something else
    out = torch.cat([out.unsqueeze(0).squeeze(), out.new_zeros(1, HIDDEN)])[where]
    return (out * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def cast_in_between(x, *where):
    return put(x.float(), *where).to(x.dtype)


def weighed_before(x, ids, place, capacity, weights):
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity).reshape(-1)
    rows = x.repeat_interleave(ids.shape[1], 0) * weights.reshape(-1, 1).to(x.dtype)
    return x.new_zeros(EXPERTS * capacity + 1, HIDDEN).index_put((where,), rows)[:-1]


def unweighed(out, x, ids, place, capacity, weights):
    return read(out, x, ids, place, capacity, torch.ones_like(weights))


def with_a_last_place(x, ids, place, capacity, weights):
    """Each expert has a place more for all who are too late: one of them is in it, and weighs nothing."""
    where = ids * (capacity + 1) + place.clamp(max=capacity)
    rows = x.new_zeros(EXPERTS * (capacity + 1), HIDDEN)
    return rows.index_put((where.reshape(-1),), x.repeat_interleave(ids.shape[1], 0))


def read_but_at_the_last_place(out, x, ids, place, capacity, weights):
    out = out[ids * (capacity + 1) + place.clamp(max=capacity)]
    return (out * (weights * (place < capacity)).unsqueeze(-1).to(x.dtype)).sum(1)


def beside_their_weights(x, router, w13, w2):
    """Weights are put into a column of the zeros that rows are put into."""
    weights, ids = softmax_router(F.linear(x, router))
    capacity, tokens = capacity_of(len(x), TOP_K), torch.arange(len(x)).repeat_interleave(TOP_K)
    place = placed_in_order(ids)
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity).reshape(-1)
    zeros, at = x.new_zeros(EXPERTS * capacity + 1, HIDDEN), torch.zeros(EXPERTS * capacity + 1).long()
    share = zeros[:, 0].index_put((where,), weights.reshape(-1).to(x.dtype))[:-1]
    rows = zeros.index_put((where,), x[tokens])[:-1]
    out = experts(rows.view(EXPERTS, capacity, -1), w13, w2).view(-1, HIDDEN) * share.unsqueeze(1)
    return torch.zeros_like(x).index_add(0, at.index_put((where,), tokens)[:-1], out)


def summed(x, ids, place, capacity, weights):
    """Choices have buffers of their own, which are added up."""
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity)
    zeros = x.new_zeros(EXPERTS * capacity + 1, HIDDEN)
    return sum(zeros.index_copy(0, each, x)[:-1] for each in where.unbind(1))


RIGHT = {
    "a sum of buffers": of(summed),
    "zeros for weights as well": beside_their_weights,
    "a place more": of(with_a_last_place, read_but_at_the_last_place),
    "weights of who has a place": of(read=renormalised),
    "an expert twice": of(route=twice_the_best),
    "an expert twice, with room for one": of(route=twice_the_best, factor=0.1),
    "weighed before experts": of(weighed_before, unweighed),
    "no weights": of(read=unweighed),
    "capacity of one": of(read=renormalised, factor=0.01),
    "squeezed": of(read=squeezed, route=best_of_softmax),
}


def clamped(ids, place, capacity):
    return (ids * capacity + place.clamp(max=capacity - 1)).reshape(-1)


def crammed(x, ids, place, capacity, weights):
    """Who is too late is added to the last place."""
    rows = x.repeat_interleave(ids.shape[1], 0)
    return x.new_zeros(EXPERTS * capacity, HIDDEN).index_add(0, clamped(ids, place, capacity), rows)


def overwritten(x, ids, place, capacity, weights):
    """Who is too late takes the last place."""
    rows = x.repeat_interleave(ids.shape[1], 0)
    return x.new_zeros(EXPERTS * capacity, HIDDEN).index_copy(0, clamped(ids, place, capacity), rows)


def read_at_the_last(out, x, ids, place, capacity, weights):
    """Whoever is there."""
    out = out[clamped(ids, place, capacity)].view(*ids.shape, HIDDEN)
    return (out * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def one_place_too_many(x, ids, place, capacity, weights):
    """The place behind the last one is the first one of the next expert."""
    where = torch.where(place <= capacity, ids * capacity + place, EXPERTS * capacity).reshape(-1)
    rows = x.new_zeros(EXPERTS * capacity + 1, HIDDEN)
    return rows.index_add(0, where.clamp(max=EXPERTS * capacity), x.repeat_interleave(ids.shape[1], 0))[:-1]


def with_something_there(x, ids, place, capacity, weights):
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity).reshape(-1)
    rows = torch.ones(EXPERTS * capacity + 1, HIDDEN, dtype=x.dtype)
    return rows.index_add(0, where, x.repeat_interleave(ids.shape[1], 0))[:-1]


def of_the_next_expert(x, ids, place, capacity, weights):
    return put(x, (ids + 1) % EXPERTS, place, capacity, weights)


def trash_that_is_read(out, x, ids, place, capacity, weights):
    """Who has no place reads ones."""
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity)
    out = torch.cat([out, out.new_ones(1, HIDDEN)])[where]
    return (out * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def memory_that_is_read(x, ids, place, capacity, weights):
    """Who has no place reads what nobody has written, if it is nobody's."""
    where = torch.where(place < capacity, ids * (capacity + 1) + place, EXPERTS * (capacity + 1)).reshape(-1)
    rows = x.new_empty(EXPERTS * (capacity + 1) + 1, HIDDEN)
    return rows.index_put((where,), x.repeat_interleave(ids.shape[1], 0))[:-1]


def read_behind_the_last(out, x, ids, place, capacity, weights):
    out = out[ids * (capacity + 1) + place.clamp(max=capacity)]
    return (out * weights.unsqueeze(-1).to(x.dtype)).sum(1)


def of_other_tokens(out, x, ids, place, capacity, weights):
    return read(out, x, ids.roll(1, 0), place.roll(1, 0), capacity, weights)


def squared(out, x, ids, place, capacity, weights):
    return read(out * out, x, ids, place, capacity, weights)


def with_columns_weighed_apart(out, x, ids, place, capacity, weights):
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity)
    out = torch.cat([out, out.new_zeros(1, HIDDEN)])[where]
    return (out * (weights.unsqueeze(-1) * torch.arange(HIDDEN))).sum(1).to(x.dtype)


def unread(out, x, ids, place, capacity, weights):
    return read(out, x, ids, place, capacity, weights * 0.0)


def of_their_neighbours(rows, w13, w2):
    return torch.bmm(swiglu(torch.bmm(rows, w13.mT)).softmax(1), w2.mT)


def gate_and_up_of_different_places(rows, w13, w2):
    gate, up = w13.chunk(2, dim=1)
    hidden = F.silu(torch.bmm(rows, gate.mT)) * torch.bmm(rows[:, :1].expand_as(rows), up.mT)
    return torch.bmm(hidden, w2.mT)


def counted_in_bfloat16(ids):
    """Numbers beyond 256 are none of its numbers."""
    chosen = F.one_hot(ids.reshape(-1), EXPERTS).bfloat16()
    return ((chosen.cumsum(0) - 1) * chosen).sum(-1).long().view(ids.shape)


def choosing(x, router, w13, w2):
    """Experts choose."""
    share, tokens = F.linear(x, router).float().softmax(-1).T.topk(capacity_of(len(x), TOP_K))
    out = experts(x[tokens], w13, w2) * share.unsqueeze(-1).to(x.dtype)
    return torch.zeros_like(x).index_add(0, tokens.reshape(-1), out.view(-1, HIDDEN))


def with_indices_in_bfloat16(x, ids, place, capacity, weights):
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity).reshape(-1)
    rows = x.new_zeros(EXPERTS * capacity + 1, HIDDEN)
    return rows.index_put((where.bfloat16().long(),), x.repeat_interleave(ids.shape[1], 0))[:-1]


def added_to_a_last_place(x, ids, place, capacity, weights):
    """Nobody reads it, but a sum of numbers might be that of a token."""
    where = ids * (capacity + 1) + place.clamp(max=capacity)
    rows = x.new_zeros(EXPERTS * (capacity + 1), HIDDEN)
    return rows.index_add(0, where.reshape(-1), x.repeat_interleave(ids.shape[1], 0))


def added_to_memory(x, ids, place, capacity, weights):
    where = torch.where(place < capacity, ids * capacity + place, EXPERTS * capacity).reshape(-1)
    rows = x.new_empty(EXPERTS * capacity + 1, HIDDEN)
    return rows.index_add(0, where, x.repeat_interleave(ids.shape[1], 0))[:-1]


NOT_READ = "a token reads what experts give for others"
SEVERAL = "a place may hold several tokens"
WRONG = {
    "two tokens in a place": (of(crammed, read_at_the_last), SEVERAL),
    "two tokens in a place, of which one reads it": (of(crammed), SEVERAL),
    "the last one in a place": (of(overwritten, read_at_the_last), NOT_READ),
    "somebody else in a place": (of(read=read_at_the_last), NOT_READ),
    "a place too many": (of(one_place_too_many), SEVERAL),
    "not of zeros": (of(with_something_there), SEVERAL),
    "other experts": (of(of_the_next_expert), NOT_READ),
    "a row of ones": (of(read=trash_that_is_read), NOT_READ),
    "memory": (of(memory_that_is_read, read_behind_the_last), NOT_READ),
    "other tokens": (of(read=of_other_tokens), NOT_READ),
    "squares": (of(read=squared), NOT_READ),
    "columns": (of(read=with_columns_weighed_apart), "columns are weighed differently"),
    "no weights": (of(read=unread), "nobody has a weight"),
    "rows that meet": (of(run=of_their_neighbours), "the gate"),
    "gate and up": (of(run=gate_and_up_of_different_places), "inputs"),
    "places in bfloat16": (of(places=counted_in_bfloat16), "places are counted in torch.bfloat16"),
    "several in a last place": (of(added_to_a_last_place, read_but_at_the_last_place), SEVERAL),
    "added to memory": (of(added_to_memory), "memory that nobody has written"),
    "indices in bfloat16": (of(with_indices_in_bfloat16), "indices are computed in torch.bfloat16"),
    "experts that choose": (choosing, "expert ids of shape [6, 22] cannot be tried out"),
}
