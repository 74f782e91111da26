"""MoE layers as people write them, who know nothing of us: each in the style of a code base."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

HIDDEN, EXPERTS, INTERMEDIATE, TOP_K = 64, 6, 32, 3

Router = Callable[[Tensor], tuple[Tensor, Tensor]]


class Layer(NamedTuple):
    """Inputs of a layer: rows have a multiple of 16 bytes, as `_grouped_mm` wants them."""

    hidden_states: Tensor
    router_weight: Tensor
    w13: Tensor
    w2: Tensor


def layer(
    tokens: int, dtype: torch.dtype = torch.bfloat16, dynamic: bool = False, experts: int = EXPERTS
) -> Layer:
    """Seeded. The first columns of a token are its logits, a permutation of numbers far apart: no rounding ties any."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = (
        (tokens, HIDDEN),
        (experts, HIDDEN),
        (experts, 2 * INTERMEDIATE, HIDDEN),
        (experts, HIDDEN, INTERMEDIATE),
    )
    made = Layer(*(torch.randn(shape, generator=generator).to(dtype) / 4 for shape in shapes))
    ranks = torch.rand(tokens, experts, generator=generator).argsort(-1)
    made.hidden_states[:, :experts] = (ranks - experts // 2) / 4
    made.router_weight.copy_(torch.eye(experts, HIDDEN))
    if dynamic:
        torch._dynamo.mark_dynamic(made.hidden_states, 0)
    return made


def softmax_router(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Mixtral's."""
    weights, ids = logits.float().softmax(-1).topk(TOP_K, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


def swiglu(gate_up: Tensor) -> Tensor:
    """Gate columns first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sorted_slots(ids: Tensor, num_experts: int = EXPERTS) -> tuple[Tensor, Tensor]:
    """The slots by expert, and where each expert's end."""
    ranked, order = ids.reshape(-1).sort()
    counted = ranked.float() if ranked.device.type == "cpu" else ranked.int()  # neither takes the other's
    counts = torch.histc(counted, bins=num_experts, min=0, max=num_experts - 1)
    return order, counts.cumsum(0, dtype=torch.int32)


def grouped(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """transformers, `grouped_mm`."""
    weights, ids = softmax_router(F.linear(x, router))
    return grouped_experts(x, weights, ids, w13, w2)


def grouped_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    gate: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """Of `grouped`, from ids."""
    order, offsets = sorted_slots(ids)
    rows = x[order // TOP_K]
    activated = gate(torch._grouped_mm(rows, w13.transpose(-2, -1), offsets))
    out = torch._grouped_mm(activated, w2.transpose(-2, -1), offsets) * weights.reshape(-1)[order].unsqueeze(
        -1
    )
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return out[inverse].view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)


def batched(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """transformers, `batched_mm`."""
    weights, ids = softmax_router(F.linear(x, router))
    return batched_experts(x, weights, ids, w13, w2)


def batched_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    gate: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """Of `batched`, from ids."""
    rows, experts = x.unsqueeze(1).expand(-1, TOP_K, -1).reshape(-1, HIDDEN), ids.reshape(-1)
    activated = gate(torch.bmm(w13[experts], rows.unsqueeze(-1)).squeeze(-1))
    out = torch.bmm(w2[experts], activated.unsqueeze(-1)).squeeze(-1) * weights.reshape(-1).unsqueeze(-1)
    return out.view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)


def einsums(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """gpt-fast: gate and up apart, weights gathered."""
    weights, ids = softmax_router(F.linear(x, router))
    w1, w3 = w13.chunk(2, dim=1)
    gate = F.silu(torch.einsum("th,teih->tei", x, w1[ids]))
    up = torch.einsum("th,teih->tei", x, w3[ids])
    out = torch.einsum("tei,tehi->teh", gate * up, w2[ids])
    return torch.einsum("teh,te->th", out, weights.to(x.dtype))


def scattered(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """torchtitan: argsort, gate and up apart, weights on what goes in, scatter_add."""
    weights, ids = torch.sigmoid(F.linear(x, router).float()).topk(TOP_K, dim=1)
    counts = torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
    order = torch.argsort(ids.view(-1), stable=True)
    tokens = (order // TOP_K).reshape(-1, 1).expand(-1, HIDDEN)
    rows = (torch.gather(x, 0, tokens).float() * weights.view(-1)[order].reshape(-1, 1)).to(x.dtype)
    offsets, (w1, w3) = counts.cumsum(0, dtype=torch.int32), w13.chunk(2, dim=1)
    gate = F.silu(torch._grouped_mm(rows, w1.transpose(-2, -1), offsets))
    activated = gate * torch._grouped_mm(rows, w3.transpose(-2, -1), offsets)
    out = torch._grouped_mm(activated, w2.transpose(-2, -1), offsets)
    return torch.zeros_like(x).scatter_add(0, tokens, out)


def unsorted(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """torchtitan of later: rows put back by index, the sum a product with the weights."""
    weights, ids = softmax_router(F.linear(x, router))
    order, offsets = sorted_slots(ids)
    activated = swiglu(torch._grouped_mm(x[order // TOP_K], w13.transpose(-2, -1), offsets))
    out = torch._grouped_mm(activated, w2.transpose(-2, -1), offsets)
    slots = torch.zeros_like(out)
    slots[order] = out
    summed = torch.bmm(weights.reshape(-1, 1, TOP_K), slots.view(-1, TOP_K, HIDDEN).float())
    return summed.squeeze(1).to(x.dtype)


def looped(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """vLLM's reference: every token through every expert."""
    weights, ids = softmax_router(F.linear(x, router))
    total = None
    for expert in range(EXPERTS):
        weight = (weights.to(x.dtype) * (ids == expert)).sum(-1, keepdim=True)
        term = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]) * weight
        total = term if total is None else total + term
    assert total is not None
    return total


def multiplied(x: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Rows that broadcast over gathered weights, the best of sorted scores: `x[:, None, None] @ w[ids].mT`."""
    scores, ids = F.linear(x, router).float().softmax(-1).sort(-1, descending=True)
    weights, ids = scores[:, :TOP_K], ids[:, :TOP_K]
    weights, (w1, w3) = weights / weights.sum(-1, keepdim=True), w13.chunk(2, dim=1)
    rows = x[:, None, None]
    hidden = F.silu(rows @ w1[ids].mT) * (rows @ w3[ids].mT)
    return ((hidden @ w2[ids].mT).squeeze(2) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


STYLES = {
    style.__name__: style for style in (grouped, batched, einsums, scattered, unsorted, looped, multiplied)
}


def oracle(inputs: Layer, style: Callable[..., Tensor]) -> Tensor:
    """The layer in float64, expert by expert. What a style weighs its rows by, and where, is its own."""
    x, router, w13, w2 = (tensor.double() for tensor in inputs)
    logits = x @ router.T
    scores = logits.sigmoid() if style is scattered else logits.softmax(-1)
    weights, ids = scores.topk(TOP_K)
    if style is not scattered:
        weights = weights / weights.sum(-1, keepdim=True)
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        weight = (weights * (ids == expert)).sum(-1, keepdim=True)
        rows, after = (x * weight, (weight > 0)) if style is scattered else (x, weight)
        total += swiglu(rows @ w13[expert].T) @ w2[expert].T * after
    return total


def added_by_index(out, inverse, x, order):
    return torch.zeros_like(x, dtype=out.dtype).index_add(0, order // TOP_K, out).to(x.dtype)


def weighed(out, weights, order):
    return out * weights.reshape(-1)[order].unsqueeze(-1)


def grouped_with(**parts):
    """`grouped`, with some parts written differently."""

    def order_of(ids):
        return sorted_slots(ids)

    def finish(out, inverse, x, order):
        return out[inverse].view(-1, TOP_K, HIDDEN).sum(1).to(x.dtype)

    part = {
        "order": order_of,
        "rows": lambda x, order: x[order // TOP_K],
        "gate": lambda gate_up, rows: swiglu(gate_up),
        "weigh": weighed,
        "finish": finish,
        "result": lambda result, gate_up, out: result,
        **parts,
    }

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        order, offsets = part["order"](ids)
        rows = part["rows"](x, order)
        gate_up = torch._grouped_mm(rows, w13.transpose(-2, -1), offsets)
        out = torch._grouped_mm(part["gate"](gate_up, rows), w2.transpose(-2, -1), offsets)
        rows = part["weigh"](out, weights, order)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        return part["result"](part["finish"](rows, inverse, x, order), gate_up, out)

    return run


def gathered_with(**parts):
    """`batched`, with some parts written differently."""
    part = {
        "rows": lambda x, weights: x.unsqueeze(1).expand(-1, TOP_K, -1).reshape(-1, HIDDEN),
        "experts": lambda experts: (experts, experts),
        "activate": lambda gate_up: swiglu(gate_up.squeeze(-1)).unsqueeze(-1),
        "sum": lambda out, weights: (out * weights.reshape(-1, 1)).view(-1, TOP_K, HIDDEN).sum(1),
        **parts,
    }

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        rows = part["rows"](x, weights).to(x.dtype)
        first, second = part["experts"](ids.reshape(-1))
        activated = part["activate"](torch.bmm(w13[first], rows.unsqueeze(-1)))
        return part["sum"](torch.bmm(w2[second], activated).squeeze(-1), weights).to(x.dtype)

    return run


def behind(slots, last):
    """Which rows come behind the last one."""
    return torch.arange(slots).unsqueeze(-1) >= last


def masked_gate(gate_up, rows, more=0.0):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).masked_fill(behind(rows.shape[0], rows.shape[0]), 0.0) * (up + more)
